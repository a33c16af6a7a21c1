"""Quantised linear layers and the step in C++: against float64, and bit by bit."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.unit.serve.engine_runs import (
    BLOCK_TOKENS,
    CONFIG,
    make_decoder,
    prompts,
    run,
)
from torch import Tensor

from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder
from eagleray.serve.engine.kv_cache import KVCache
from eagleray.serve.engine.native_runner import CACHE_DTYPE, NativeRunner
from eagleray.serve.kernels.decoder import NativeDecoder, QuantizedLinear, runs
from eagleray.serve.kernels.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="kernels not compiled, or no AVX2")
SHAPES = [(1, 1), (8, 32), (7, 31), (9, 33), (64, 96), (37, 200), (130, 576)]


def groups_of(x_BN: Tensor) -> Tensor:
    """Rows in groups of 32, padded with zeros: [B, groups, 32], float64."""
    return F.pad(x_BN.double(), (0, -x_BN.shape[1] % 32)).unflatten(1, (-1, 32))


def rounded(x_BN: Tensor) -> Tensor:
    """Rows as the kernels round them, float64."""
    x_BGK = groups_of(x_BN)
    scale = x_BGK.abs().amax(-1, keepdim=True) / 127
    whole = torch.where(scale > 0, x_BGK / torch.where(scale > 0, scale, 1.0), 0.0).round()
    return (whole * scale).flatten(1)[:, : x_BN.shape[1]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_rounded_to_the_nearest_level_of_their_group(
    shape: tuple[int, int], bits: int
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = QuantizedLinear(weight, bits).weight()
    w_OGK = groups_of(weight)
    is_inside = groups_of(torch.ones(shape)) > 0
    most = w_OGK.masked_fill(~is_inside, -torch.inf).amax(-1, keepdim=True)
    least = w_OGK.masked_fill(~is_inside, torch.inf).amin(-1, keepdim=True)
    step = (most - least) / 15 if bits == 4 else torch.maximum(most, -least) / 127
    # Half a step, and what 16 bits make of the scale and the offset.
    allowed = 0.5 * step + 2e-3 * torch.maximum(most.abs(), least.abs())
    assert ((groups_of(found) - w_OGK).abs() <= allowed + 1e-12)[is_inside].all()


def test_weights_that_lie_on_a_grid_of_four_bits_are_kept() -> None:
    draw = torch.Generator().manual_seed(2)
    levels = torch.randint(16, (24, 4, 32), generator=draw)
    levels[..., 0], levels[..., 1] = 0, 15
    scale = torch.rand(24, 4, 1, generator=draw).half().float()
    offset = -torch.rand(24, 4, 1, generator=draw).half().float()
    weight = (levels * scale + offset).flatten(1)
    assert (QuantizedLinear(weight, 4).weight() - weight).abs().max() < 2e-3


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 31, 33, 70])
def test_products_are_those_of_the_rounded_numbers(
    shape: tuple[int, int], bits: int, rows: int
) -> None:
    draw = torch.Generator().manual_seed(rows)
    linear = QuantizedLinear(torch.randn(shape, generator=draw), bits)
    x_BN = torch.randn(rows, shape[1], generator=draw) * 10 ** torch.randint(
        -3, 3, (rows, 1), generator=draw
    )
    expected = rounded(x_BN) @ linear.weight().double().T
    scale = rounded(x_BN).abs() @ linear.weight().double().abs().T
    assert ((linear.apply(x_BN) - expected).abs() <= 1e-5 * scale + 1e-12).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_numbers_do_not_overflow(bits: int) -> None:
    weight = torch.ones(8, 64)
    weight[:, ::2] = -1
    linear = QuantizedLinear(weight, bits)
    for x_BN in (weight[:1], -weight[:1], torch.ones(1, 64), -torch.ones(1, 64)):
        expected = x_BN.double() @ linear.weight().double().T
        torch.testing.assert_close(linear.apply(x_BN).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_no_finite_answer_and_spoils_no_other(
    bits: int, value: float
) -> None:
    linear = QuantizedLinear(torch.randn(16, 64, generator=torch.Generator().manual_seed(3)), bits)
    x_BN = torch.ones(3, 64)
    good = linear.apply(x_BN)
    x_BN[1, 40] = value
    found = linear.apply(x_BN)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], good[[0, 2]])


@torch.inference_mode()
def emulated(decoder: Decoder, native: "Emulation", tokens: list[int]) -> Tensor:
    """Logits of all tokens by torch in float64, with everything rounded as the kernels do."""
    x_TD = decoder.embed_tokens.weight[tokens].double()
    config = decoder.config
    heads, kv_heads, channels = config.num_heads, config.num_kv_heads, config.head_dim
    cos, sin = (t[: len(tokens), None].double() for t in (decoder.cos_MC, decoder.sin_MC))

    def turned(y_THC: Tensor) -> Tensor:
        return y_THC * cos + y_THC.roll(channels // 2, -1) * sin

    def norm(y_TD: Tensor, weight_D: Tensor) -> Tensor:
        return F.rms_norm(y_TD, (config.dim,), weight_D.double(), config.norm_eps)

    for layer in decoder.layers:
        linear = partial(native.apply, layer)
        y_TD = norm(x_TD, layer.input_layernorm.weight)
        q = turned(linear("q_proj", y_TD).unflatten(-1, (heads, channels)))
        k = turned(linear("k_proj", y_TD).unflatten(-1, (kv_heads, channels)))
        v = linear("v_proj", y_TD).unflatten(-1, (kv_heads, channels))
        mixed = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True,
            enable_gqa=True,
        )  # fmt: skip
        x_TD = x_TD + linear("o_proj", mixed.transpose(0, 1).flatten(1))
        y_TD = norm(x_TD, layer.post_attention_layernorm.weight)
        gated = F.silu(linear("gate_proj", y_TD)) * linear("up_proj", y_TD)
        x_TD = x_TD + linear("down_proj", gated)
    head = QuantizedLinear(decoder.embed_tokens.weight, 8).weight().double()
    return rounded(norm(x_TD, decoder.norm.weight)) @ head.T


class Emulation:
    """Linear layers as torch computes them from the rounded weights."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def apply(self, layer: torch.nn.Module, name: str, x_BN: Tensor) -> Tensor:
        part = layer.self_attn if name in ("q_proj", "k_proj", "v_proj", "o_proj") else layer.mlp
        weight = QuantizedLinear(getattr(part, name).weight, self._bits).weight()
        return rounded(x_BN) @ weight.double().T


def step(
    native: NativeDecoder,
    config: DecoderConfig,
    tokens: list[int],
    chunks: list[int],
    blocks: list[int],
) -> Tensor:
    """Logits of all tokens of one sequence that is computed in chunks."""
    shape = (config.num_layers, 64, BLOCK_TOKENS, config.num_kv_heads, config.head_dim)
    # What was there before must never be looked at.
    keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    table = np.array([blocks], np.int32)
    found, at = [], 0
    for count in chunks:
        rows = np.arange(count, dtype=np.int32)
        part = np.array(tokens[at : at + count], np.int32)
        positions, requests = rows + np.int32(at), np.zeros(count, np.int32)
        logits, likeliest = native.step(part, positions, requests, table, rows, keys, values)
        assert likeliest.tolist() == logits.argmax(-1).tolist()
        found.append(logits)
        at += count
    return torch.cat(found)


def native_of(decoder: Decoder, bits: int, num_threads: int = 1) -> NativeDecoder:
    return NativeDecoder(
        decoder, bits=bits, block_tokens=BLOCK_TOKENS, cache_dtype=torch.float32,
        num_threads=num_threads,
    )  # fmt: skip


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"dim": 48, "num_heads": 3, "num_kv_heads": 1, "head_dim": 16, "ffn_dim": 100},
        {"dim": 40, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "vocab_size": 301},
        {"dim": 64, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "num_layers": 1},
        {"dim": 96, "num_heads": 2, "num_kv_heads": 1, "head_dim": 96, "num_layers": 1},
        {"dim": 96, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "num_layers": 1},
    ],
)
def test_a_step_computes_what_torch_computes_of_the_rounded_model(
    bits: int, shape: dict[str, int]
) -> None:
    fields = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
    config = DecoderConfig(**{**fields, **shape})
    decoder = Decoder(config).eval()
    decoder.init_weights(torch.Generator().manual_seed(4))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1.5)
    tokens = prompts(30)[0]
    found = step(native_of(decoder, bits), config, tokens, [30], list(range(20)))
    expected = emulated(decoder, Emulation(bits), tokens)
    # A value at the edge between two levels may be rounded the other way, once in a while.
    difference = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert difference.median() < 1e-3
    assert difference.max() < 2e-2


@pytest.mark.parametrize("bits", [4, 8])
def test_chunks_threads_and_blocks_change_no_bit(bits: int) -> None:
    decoder, tokens = make_decoder(), prompts(40)[0]
    whole = step(native_of(decoder, bits), CONFIG, tokens, [40], list(range(10)))
    draw = random.Random(5)
    for num_threads in (1, 2, 3):
        native = native_of(decoder, bits, num_threads)
        blocks = draw.sample(range(64), 10)
        for chunks in ([40], [1] * 40, [33, 7], [5, 1, 30, 4]):
            assert torch.equal(step(native, CONFIG, tokens, chunks, blocks), whole)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_request_computes_the_same_bits_alone_in_a_batch_and_after_a_preemption(
    bits: int,
) -> None:
    native = NativeDecoder(
        make_decoder(), bits=bits, block_tokens=BLOCK_TOKENS, cache_dtype=CACHE_DTYPE,
        num_threads=2,
    )  # fmt: skip
    play = partial(run, partial(NativeRunner, native), dtype=CACHE_DTYPE)
    asked = prompts(*[1 + (7 * i) % 40 for i in range(32)])
    alone = [play([prompt])[:2] for prompt in asked]
    few, many = {"num_blocks": 60}, {"num_blocks": 600}
    for options in (many, few, {**many, "garbage": True}, {**few, "keeps_prefixes": True}):
        together, logits, preemptions = play(asked, max_running=32, **options)
        assert (preemptions > 0) == (options["num_blocks"] == 60)
        for (tokens, rows), got, got_rows in zip(alone, together, logits, strict=True):
            assert tokens == [got]
            assert all(map(torch.equal, rows[0], got_rows))


def test_what_is_out_of_range_is_refused_before_anything_is_computed() -> None:
    native = native_of(make_decoder(), 8)
    good = {"tokens": [5], "positions": [0], "requests": [0], "table": [[3]], "sampled": [0]}
    cache = KVCache(CONFIG, 8, BLOCK_TOKENS, torch.float32, torch.device("cpu"))
    before = [page.clone() for page in cache.pages]

    def compute(**changed: list[int]) -> Tensor:
        arrays = [np.array(array, np.int32) for array in {**good, **changed}.values()]
        return native.step(*arrays, *cache.pages)[0]

    for bad in (
        {"tokens": [97]}, {"tokens": [-1]}, {"positions": [-1]}, {"positions": [4]},
        {"positions": [128]}, {"sampled": [1]}, {"sampled": [-1]}, {"requests": [1]},
        {"requests": [-1]}, {"sampled": [0, 0]}, {"table": [[9]]}, {"table": [[-1]]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="out of range"):
            compute(**bad)
    assert all(map(torch.equal, before, cache.pages))
    assert compute().isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_have_no_likeliest_token(value: float) -> None:
    decoder = make_decoder()
    with torch.no_grad():
        decoder.norm.weight[3] = value
    native = native_of(decoder, 8)
    cache = KVCache(CONFIG, 8, BLOCK_TOKENS, torch.float32, torch.device("cpu"))
    one = [np.array(array, np.int32) for array in ([5], [0], [0], [[3]], [0])]
    logits, likeliest = native.step(*one, *cache.pages)
    assert not logits.isfinite().all()
    assert likeliest.tolist() == [-1]


def test_a_model_whose_heads_do_not_fit_is_not_taken() -> None:
    fields = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
    assert runs(CONFIG)
    assert not runs(DecoderConfig(**{**fields, "head_dim": 20}))
    assert not runs(DecoderConfig(**{**fields, "head_dim": 40}))


@pytest.mark.parametrize("bits", [4, 8])
def test_what_an_earlier_request_left_gives_the_bits_that_are_computed(bits: int) -> None:
    native = NativeDecoder(
        make_decoder(), bits=bits, block_tokens=BLOCK_TOKENS, cache_dtype=CACHE_DTYPE,
        num_threads=2,
    )  # fmt: skip
    play = partial(run, partial(NativeRunner, native), dtype=CACHE_DTYPE, max_running=1)
    [system] = prompts(21)
    asked = [[*system, *end] for end in prompts(1, 3, 9, 1)]
    kept, kept_logits, _ = play(asked, keeps_prefixes=True)
    fresh, fresh_logits, _ = play(asked)
    assert kept == fresh
    for rows, fresh_rows in zip(kept_logits, fresh_logits, strict=True):
        assert all(map(torch.equal, rows, fresh_rows))
