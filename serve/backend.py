"""From a name to a running engine: which model, from where, with what memory.

`ServingSpec` is plain data and crosses to the replica; `open_model` turns it into an engine there.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from eagleray.platform.artifact import verify_artifact
from eagleray.platform.config import LoadedConfig, ServeConfig
from eagleray.platform.model import hf_layout
from eagleray.platform.model.text import ModelText
from eagleray.platform.registry import Registry
from eagleray.platform.storage import Storage
from eagleray.serve.api.keys import KeyStore
from eagleray.serve.api.openai import ServedModel
from eagleray.serve.engine.block_pool import BlockPool
from eagleray.serve.engine.engine import Engine
from eagleray.serve.engine.kv_cache import KVCache, num_blocks_within
from eagleray.serve.engine.limits import RequestLimits
from eagleray.serve.engine.model_runner import ModelRunner
from eagleray.serve.engine.scheduler import Scheduler, SchedulerLimits


@dataclass(frozen=True)
class ServingSpec:
    """Which model to serve, and how.

    Attributes:
        name, version: Of the registered model.
        record: Digest of its ledger record, sent with every answer.
        artifact: Digest of the folder that holds it.
        created_s: When it was registered.
        storage: The storage folder; every node sees the same one.
        config: The `serve` section.
    """

    name: str
    version: int
    record: str
    artifact: str
    created_s: float
    storage: str
    config: ServeConfig


def resolve(loaded: LoadedConfig, model: str | None = None) -> ServingSpec:
    """The model that a spec means now: the argument, else `serve.model`, else the project's own.

    Raises:
        NotFoundError: There is no such model; the message lists those there are.
    """
    config = loaded.config
    wanted = model or config.serve.model or config.train.register_as or config.name
    found = Registry(Storage(loaded.storage_path)).resolve(wanted)
    return ServingSpec(
        name=found.name,
        version=found.version,
        record=found.record,
        artifact=found.artifact,
        created_s=found.created_s,
        storage=str(loaded.storage_path),
        config=config.serve,
    )


def open_model(spec: ServingSpec) -> ServedModel:
    """Load a model, reserve its KV cache and start its engine.

    Raises:
        NotFoundError: Its artifact is gone.
        IntegrityError: Its bytes are not those that were registered.
        DataError: It is not a model that can be served.
        InfeasibleError: `serve.kv_cache_bytes` cannot hold two blocks.
    """
    config = spec.config
    folder = verify_artifact(Storage(Path(spec.storage)), spec.artifact)
    text = ModelText(folder)
    decoder = hf_layout.load(folder).eval()
    weight = next(decoder.parameters())
    num_blocks = num_blocks_within(
        config.kv_cache_bytes, decoder.config, config.block_tokens, weight.element_size()
    )
    cache = KVCache(decoder.config, num_blocks, config.block_tokens, weight.dtype, weight.device)
    pool = BlockPool(num_blocks, config.block_tokens)
    scheduling = SchedulerLimits(config.max_running, config.max_queued, config.step_tokens)
    limits = RequestLimits(
        vocab_size=decoder.config.vocab_size,
        context_tokens=decoder.config.max_seq_len,
        pool_tokens=pool.capacity_tokens,
        max_new_tokens=config.max_new_tokens,
    )
    engine = Engine(
        ModelRunner(decoder, cache),
        Scheduler(scheduling, pool),
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
    )


def key_store(spec: ServingSpec) -> KeyStore | None:
    """Who may use the endpoint; None if the configuration lets everybody in."""
    return KeyStore(Storage(Path(spec.storage))) if spec.config.require_key else None


def limit_threads(config: ServeConfig) -> None:
    """Give this process its compute threads; Ray sets them to the CPUs of the actor."""
    torch.set_num_threads(config.num_threads)
