"""The compiled kernels, if they are there and this CPU can run them."""

import ctypes
import functools
import logging
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

logger = logging.getLogger(__name__)

_NAME = "_decoder"


class Config(ctypes.Structure):
    """`ErConfig` of decoder.cpp."""

    _fields_ = (
        *((name, c_int32) for name in (
            "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size",
            "max_seq_len",
        )),
        ("norm_eps", c_float),
        *((name, c_int32) for name in ("is_half_cache", "block_tokens", "num_threads")),
    )  # fmt: skip


class Layer(ctypes.Structure):
    """`ErLayer` of decoder.cpp."""

    _fields_ = tuple(
        (name, c_void_p) for name in ("input_norm", "post_norm", "qkv", "out", "gate", "up", "down")
    )


class Batch(ctypes.Structure):
    """`ErBatch` of decoder.cpp."""

    _fields_ = (
        *((name, c_int32) for name in (
            "num_tokens", "num_sampled", "num_requests", "table_width", "num_blocks",
        )),
        *((name, c_void_p) for name in (
            "tokens", "positions", "requests", "tables", "sampled", "keys", "values",
        )),
        ("layer_stride", c_int64),
        ("logits", c_void_p),
        ("likeliest", c_void_p),
    )  # fmt: skip


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels; None where they were not compiled, do not load, or the CPU lacks AVX2."""
    folder = Path(__file__).parent
    found = [
        path for suffix in EXTENSION_SUFFIXES if (path := folder / f"{_NAME}{suffix}").exists()
    ]
    if not found:
        return None
    try:
        kernels = ctypes.CDLL(str(found[0]))
    except OSError as error:  # made for another machine
        logger.warning("kernels do not load: %s", error)
        return None
    kernels.er_is_supported.restype = c_int
    if not kernels.er_is_supported():
        return None
    kernels.er_linear_new.restype = c_void_p
    kernels.er_linear_new.argtypes = [c_void_p, c_int, c_int, c_int]
    kernels.er_linear_free.argtypes = [c_void_p]
    kernels.er_linear_bytes.restype = c_int64
    kernels.er_linear_bytes.argtypes = [c_void_p]
    kernels.er_linear_weights.argtypes = [c_void_p, c_void_p]
    kernels.er_linear_apply.restype = c_int
    kernels.er_linear_apply.argtypes = [c_void_p, c_void_p, c_int, c_void_p]
    kernels.er_model_new.restype = c_void_p
    kernels.er_model_new.argtypes = [
        POINTER(Config), c_void_p, c_void_p, c_void_p, POINTER(Layer), c_void_p, c_void_p
    ]  # fmt: skip
    kernels.er_model_free.argtypes = [c_void_p]
    kernels.er_step.restype = c_int
    kernels.er_step.argtypes = [c_void_p, POINTER(Batch)]
    return kernels
