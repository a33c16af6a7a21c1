import subprocess
import sys

import pytest

from eagleray.platform.config import ModelConfig
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size 0 must be above 0"),
        ({"norm_eps": float("nan")}, "norm_eps nan must be above 0"),
        ({"dim": 65}, "dim 65 must be a multiple of num_heads 4"),
        ({"num_kv_heads": 3}, "num_heads 4 must be a multiple of num_kv_heads 3"),
        ({"head_dim": 15}, "head_dim 15 must be even"),
    ],
)
def test_refuses_a_shape_that_cannot_be(make_config, changes, message):
    with pytest.raises(ValueError, match=message):
        make_config(**changes)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_embeddings": False}, {"num_kv_heads": 4}, {"head_dim": 32}, {"num_layers": 1}],
)
def test_counts_the_parameters_of_the_module(make_config, changes):
    config = make_config(**changes)

    counted = sum(parameter.numel() for parameter in Decoder(config).parameters())

    assert config.num_parameters == counted


def test_flops_are_six_per_matmul_weight_plus_attention(make_config):
    config = make_config(
        vocab_size=10, dim=4, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=2, ffn_dim=8
    )
    per_layer = 4 * 4 + 4 * 2 + 4 * 2 + 4 * 4 + 3 * 4 * 8

    assert config.flops_per_token(100) == 6 * (3 * per_layer + 10 * 4) + 12 * 3 * 2 * 2 * 100


def test_a_tied_head_costs_as_many_flops_as_its_own(make_config):
    tied, untied = make_config(), make_config(tie_embeddings=False)

    assert tied.flops_per_token(8) == untied.flops_per_token(8)
    assert tied.num_parameters < untied.num_parameters


def test_section_without_ffn_dim_gets_eight_thirds_in_steps_of_32():
    config = DecoderConfig.from_section(
        ModelConfig(dim=192, num_layers=4, num_heads=6, num_kv_heads=2), vocab_size=4096
    )

    assert (config.ffn_dim, config.head_dim, config.vocab_size) == (512, 32, 4096)
    assert config.tie_embeddings


def test_section_values_are_taken_over():
    section = ModelConfig(
        dim=64, num_heads=2, num_kv_heads=1, ffn_dim=100, max_seq_len=99, rope_theta=5e5,
        norm_eps=1e-6, tie_embeddings=False,
    )  # fmt: skip

    config = DecoderConfig.from_section(section, vocab_size=300)

    assert (config.ffn_dim, config.max_seq_len, config.rope_theta) == (100, 99, 5e5)
    assert (config.norm_eps, config.tie_embeddings, config.num_layers) == (1e-6, False, 4)


def test_cache_elements_count_keys_and_values_of_all_layers(make_config):
    assert make_config().kv_elements_per_token == 2 * 2 * 2 * 16


def test_shape_is_known_without_importing_torch():
    program = "import sys, eagleray.platform.model.config; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 0
