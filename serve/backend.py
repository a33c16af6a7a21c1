"""From a model's spec to a running engine, in the process that serves it."""

from pathlib import Path

import torch

from eagleray.platform.artifact import verify_artifact
from eagleray.platform.config import ServeConfig
from eagleray.platform.errors import InfeasibleError
from eagleray.platform.model import hf_layout
from eagleray.platform.model.decoder import Decoder
from eagleray.platform.model.text import ModelText
from eagleray.platform.storage import Storage
from eagleray.serve.api.allowance import KeyLimits
from eagleray.serve.api.keys import KeyStore
from eagleray.serve.api.served_model import ServedModel
from eagleray.serve.engine.block_pool import BlockPool
from eagleray.serve.engine.engine import Engine
from eagleray.serve.engine.kv_cache import KVCache, num_blocks_within
from eagleray.serve.engine.limits import RequestLimits
from eagleray.serve.engine.model_runner import ModelRunner, Runner
from eagleray.serve.engine.native_runner import CACHE_DTYPE, NativeRunner
from eagleray.serve.engine.scheduler import Scheduler, SchedulerLimits
from eagleray.serve.kernels.decoder import NativeDecoder, runs
from eagleray.serve.spec import ServingSpec


def open_model(spec: ServingSpec) -> ServedModel:
    """Load a model, reserve its KV cache and start its engine.

    Raises:
        NotFoundError: Its artifact is gone.
        IntegrityError: Its bytes are not those that were registered.
        DataError: It is not a model that can be served.
        InfeasibleError: `serve.kv_cache_bytes` cannot hold two blocks, or there are no kernels for
            `serve.weights`.
    """
    config = spec.config
    folder = verify_artifact(Storage(Path(spec.storage)), spec.artifact)
    text = ModelText(folder)
    decoder = hf_layout.load(folder).eval()
    weight = next(decoder.parameters())
    dtype = weight.dtype if config.weights == "exact" else CACHE_DTYPE
    num_blocks = num_blocks_within(
        config.kv_cache_bytes, decoder.config, config.block_tokens, dtype.itemsize
    )
    cache = KVCache(decoder.config, num_blocks, config.block_tokens, dtype, weight.device)
    pool = BlockPool(num_blocks, config.block_tokens, keeps_prefixes=config.prefix_cache)
    scheduling = SchedulerLimits(config.max_running, config.max_queued, config.step_tokens)
    limits = RequestLimits(
        vocab_size=decoder.config.vocab_size,
        context_tokens=decoder.config.max_seq_len,
        pool_tokens=pool.capacity_tokens,
        max_new_tokens=config.max_new_tokens,
    )
    engine = Engine(
        _runner(decoder, cache, config),
        Scheduler(scheduling, pool, config.guessed_tokens),
        text,
        limits,
        config.request_timeout_s,
    )
    engine.start()
    return ServedModel(
        name=spec.name,
        version=spec.version,
        digest=spec.record,
        created_s=spec.created_s,
        engine=engine,
        text=text,
        timeout_s=config.request_timeout_s,
        max_body_bytes=config.max_body_bytes,
        key_limits=KeyLimits(**config.key_limits.model_dump()),
    )


def _runner(decoder: Decoder, cache: KVCache, config: ServeConfig) -> Runner:
    if config.weights == "exact":
        return ModelRunner(decoder, cache)
    if not runs(decoder.config):
        raise InfeasibleError(
            f"serve.weights {config.weights} needs the compiled kernels (a C++ compiler when "
            "eagleray was installed, a CPU with AVX2) and heads of 8 to 128 channels",
            "set serve.weights to exact, or install g++ and then eagleray again",
        )
    native = NativeDecoder(
        decoder,
        bits=8 if config.weights == "int8" else 4,
        block_tokens=config.block_tokens,
        cache_dtype=CACHE_DTYPE,
        num_threads=config.num_threads,
    )
    return NativeRunner(native, cache)


def key_store(spec: ServingSpec) -> KeyStore | None:
    """Who may use the endpoint; None if the configuration lets everybody in."""
    return KeyStore(Storage(Path(spec.storage))) if spec.config.require_key else None


def limit_threads(config: ServeConfig) -> None:
    """Give this process its compute threads; Ray sets them to the CPUs of the actor."""
    torch.set_num_threads(config.num_threads)
