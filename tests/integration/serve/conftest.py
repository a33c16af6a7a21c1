"""A tiny random model, registered and served."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eagleray.platform.artifact import publish_artifact
from eagleray.platform.config import LoadedConfig, ProjectConfig
from eagleray.platform.ledger import Ledger
from eagleray.platform.model import hf_layout
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder
from eagleray.platform.registry import Registry
from eagleray.platform.storage import Storage
from eagleray.serve.api.openai import create_app
from eagleray.serve.backend import key_store, open_model
from eagleray.serve.spec import resolve

TEXT = "the quick brown fox jumps over the lazy dog \u6771\u4eac \U0001f44d d\u00e9j\u00e0 "
SERVE = {
    "max_running": 4, "max_queued": 12, "kv_cache_bytes": "8MB", "step_tokens": 64,
    "num_threads": 1, "max_body_bytes": 100_000, "cpus_per_replica": 0.5,
}  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _register(storage: Storage, seed: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    config = DecoderConfig(
        vocab_size=320, dim=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=12,
        ffn_dim=96, max_seq_len=512,
    )  # fmt: skip
    decoder = Decoder(config)
    decoder.init_weights(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in decoder.parameters():
            # Initial weights give nearly equal logits: no test of equal texts.
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    content = tokenizer.to_str().encode()
    artifact = publish_artifact(
        storage, lambda folder: hf_layout.save(decoder, folder, content, eos_token="<|endoftext|>")
    )
    record = Ledger(storage).put("model", {"seed": seed}, {})
    Registry(storage).register("tiny", record, artifact, {})
    return record


@pytest.fixture(scope="session")
def register_tiny() -> Callable[..., str]:
    """Registers a random decoder as `tiny`: `(storage, seed) -> digest of its record`."""
    return _register


@pytest.fixture(scope="session")
def make_project() -> Callable[..., LoadedConfig]:
    """A project in a folder, served on a free port: `(folder, **serve) -> LoadedConfig`."""

    def make(folder: Path, **values: Any) -> LoadedConfig:
        section = {**SERVE, "port": _free_port(), **values}
        return LoadedConfig(
            ProjectConfig.model_validate({"name": "tiny", "serve": section}), folder
        )

    return make


@pytest.fixture(scope="session")
def with_serve() -> Callable[..., LoadedConfig]:
    """A project with other `serve` settings: `(loaded, **serve) -> LoadedConfig`."""

    def change(loaded: LoadedConfig, **values: Any) -> LoadedConfig:
        tree = loaded.config.model_dump(mode="json")
        tree["serve"].update(values)
        return replace(loaded, config=ProjectConfig.model_validate(tree))

    return change


@pytest.fixture(scope="session")
def served_locally() -> Callable[[LoadedConfig], AbstractContextManager[str]]:
    """Runs a project's application in a thread, without Ray: `with served_locally(p) as url`."""
    return _served_locally


@contextlib.contextmanager
def _served_locally(loaded: LoadedConfig) -> Iterator[str]:
    """The application in a thread of this process."""
    spec = resolve(loaded)
    model = open_model(spec)
    server = uvicorn.Server(uvicorn.Config(create_app(model, key_store(spec)), log_level="error"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join(30)
            model.engine.shutdown(30)
