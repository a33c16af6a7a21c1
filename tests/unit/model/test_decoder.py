import pytest
import torch
import torch.nn.functional as F

from eagleray.platform.model.decoder import Decoder, causal_attention, rope_tables, rotate


def tokens(*shape, seed=0):
    return torch.randint(0, 320, shape, generator=torch.Generator().manual_seed(seed))


def test_future_tokens_do_not_reach_past_logits(make_model):
    model, before = make_model(), tokens(2, 12)
    after = before.clone()
    after[:, 8:] = (after[:, 8:] + 1) % 320

    with torch.no_grad():
        first, second = model(before), model(after)

    assert torch.equal(first[:, :8], second[:, :8])
    assert not torch.allclose(first[:, 8:], second[:, 8:])


def test_grouped_heads_equal_the_same_heads_repeated(make_model):
    grouped = make_model(num_kv_heads=2)
    repeated = make_model(num_kv_heads=4)
    state = grouped.state_dict()
    for name, value in state.items():
        if "k_proj" in name or "v_proj" in name:
            state[name] = value.view(2, 16, 64).repeat_interleave(2, dim=0).reshape(64, 64)
    repeated.load_state_dict(state)

    with torch.no_grad():
        difference = (grouped(tokens(2, 9)) - repeated(tokens(2, 9))).abs().max()

    assert difference < 1e-5


def test_rotation_turns_pairs_by_position_times_frequency(make_config):
    config = make_config(rope_theta=100.0)
    cos_MC, sin_MC = rope_tables(config)
    x_BTHC = torch.randn(1, 5, 3, 16, generator=torch.Generator().manual_seed(0))

    turned = rotate(x_BTHC, cos_MC[:5, None], sin_MC[:5, None])

    pairs = torch.complex(x_BTHC[..., :8], x_BTHC[..., 8:])
    angles = torch.outer(torch.arange(5.0), 100.0 ** (-torch.arange(8) / 8))
    expected = pairs * torch.polar(torch.ones(5, 8), angles)[:, None]
    assert torch.allclose(turned, torch.cat((expected.real, expected.imag), dim=-1), atol=1e-6)


def test_scores_depend_on_the_distance_alone(make_config):
    cos_MC, sin_MC = rope_tables(make_config())
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(1))

    def score(query_at, key_at):
        at = [(cos_MC[i], sin_MC[i]) for i in (query_at, key_at)]
        return (rotate(q, *at[0]) * rotate(k, *at[1])).sum().item()

    assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def test_given_positions_mean_the_same_as_the_default(make_model):
    model, tokens_BT = make_model(), tokens(3, 7)

    with torch.no_grad():
        given = model(tokens_BT, positions_BT=torch.arange(7).expand(3, 7))

        assert torch.equal(given, model(tokens_BT))


def test_one_row_can_hold_sequences_that_attend_apart(make_model):
    model, first, second = make_model(), tokens(1, 5, seed=1), tokens(1, 4, seed=2)
    positions = torch.cat((torch.arange(5), torch.arange(4)))[None]

    def apart(layer, q, k, v):
        parts = [slice(0, 5), slice(5, 9)]
        return torch.cat(
            [causal_attention(layer, q[:, at], k[:, at], v[:, at]) for at in parts], dim=1
        )

    with torch.no_grad():
        ragged = model(torch.cat((first, second), dim=1), positions, apart)
        alone = torch.cat((model(first), model(second)), dim=1)

    assert torch.allclose(ragged, alone, atol=1e-5)


def test_attend_is_asked_once_per_layer_with_rotated_heads(make_model):
    model, calls = make_model(num_layers=3), []

    def attend(layer, q_BTHC, k_BTKC, v_BTKC):
        calls.append((layer, tuple(q_BTHC.shape), tuple(k_BTKC.shape), tuple(v_BTKC.shape)))
        return torch.zeros_like(q_BTHC)

    with torch.no_grad():
        model.hidden(tokens(2, 6), attend=attend)

    assert calls == [(layer, (2, 6, 4, 16), (2, 6, 2, 16), (2, 6, 2, 16)) for layer in range(3)]


def test_same_generator_state_gives_the_same_weights(make_config):
    models = [Decoder(make_config(tie_embeddings=False)) for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        torch.rand(seed)  # The global generator has no part in it.
        model.init_weights(torch.Generator().manual_seed(seed))
    first, same, other = (torch.nn.utils.parameters_to_vector(m.parameters()) for m in models)

    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_a_new_decoder_has_weights_without_being_asked(make_config):
    torch.manual_seed(1)
    first = torch.nn.utils.parameters_to_vector(Decoder(make_config()).parameters())
    torch.manual_seed(2)
    second = torch.nn.utils.parameters_to_vector(Decoder(make_config()).parameters())

    assert torch.equal(first, second)
    assert first.isfinite().all()


def test_residual_projections_start_smaller_with_depth(make_config):
    model = Decoder(make_config(num_layers=8, dim=256))
    model.init_weights(torch.Generator().manual_seed(0))
    attention = model.layers[0].self_attn

    assert attention.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert attention.o_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(model.norm.weight, torch.ones(256))


def test_half_precision_keeps_logits_in_float32_and_near(make_model):
    model = make_model()
    with torch.no_grad():
        exact = model(tokens(1, 8))
        rough = model.to(torch.bfloat16)(tokens(1, 8))

    assert rough.dtype is torch.float32
    assert model.cos_MC.dtype is torch.float32
    assert model.norm.weight.dtype is torch.bfloat16
    assert F.cosine_similarity(exact.flatten(), rough.flatten(), dim=0) > 0.99


def test_gradients_reach_every_parameter(make_model):
    model = make_model(tie_embeddings=False)

    F.cross_entropy(model(tokens(2, 8)).flatten(0, 1), tokens(16, seed=3)).backward()

    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_row_longer_than_the_context_is_refused(make_model):
    with pytest.raises(ValueError, match="33 tokens in a row exceed max_seq_len 32"):
        make_model()(tokens(1, 33))


def test_tables_of_positions_are_not_part_of_the_state(make_model):
    assert not [name for name in make_model().state_dict() if "cos" in name or "sin" in name]
