"""Fixtures for all tests."""

import json
import logging
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from tools.redis_cluster import RedisCluster

from eagleray.platform.config import ClusterConfig, DataConfig, load_config
from eagleray.platform.storage import Storage

if TYPE_CHECKING:
    from eagleray.actors.data import Dataset
    from eagleray.platform.cluster.head import Head

# A busy machine makes any example slow; pytest-timeout bounds the whole test instead.
settings.register_profile("eagleray", deadline=None, max_examples=50)
settings.load_profile("eagleray")


# A shell's background job ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse tests that start a cluster without the mark by which tools/run_tests.sh parts them."""
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "ray_cluster" in fixtures and not item.get_closest_marker("cluster"):
            raise pytest.UsageError(f"{item.nodeid} uses ray_cluster: mark it pytest.mark.cluster")


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """A verb sets up logging for its process; here the next test's process is the same one."""
    logger = logging.getLogger("eagleray")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate, logger.level = before[0], before[1], before[2]


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """Storage in a folder of its own."""
    return Storage(tmp_path / "storage")


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Waits for a condition: `until(condition, "what it is", timeout_s=30)`, else fails."""

    def wait(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"{what} did not come within {timeout_s:g} s")
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def build_letters() -> Callable[[Path, int], "Dataset"]:
    """Builds datasets of samples of 16 tokens; letters without sense make about a token each."""
    from eagleray.actors.data import build_dataset

    def build(folder: Path, num_letters: int) -> "Dataset":
        draw = random.Random(1)
        texts = (
            "".join(draw.choices(ascii_lowercase + " ", k=800)) for _ in range(num_letters // 800)
        )
        (folder / "docs.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        config = DataConfig.model_validate(
            {
                "sources": [{"path": "docs.jsonl"}],
                "tokenizer": {"vocab_size": 300},
                "seq_len": 16,
                "eval_fraction": 0.1,
            }
        )
        return build_dataset(config, lambda path: folder / path, Storage(folder / "store"))

    return build


@pytest.fixture(scope="session")
def _ray_head() -> Iterator["Head"]:
    """A Ray head of four CPUs, as the verbs start one for themselves."""
    from eagleray.platform.cluster.head import Head, new_folder
    from eagleray.platform.cluster.options import new_options
    from eagleray.platform.cluster.tokens import write_token

    config = ClusterConfig(num_cpus=4, object_store_bytes=200_000_000)
    folder = new_folder()
    write_token(folder / "token")
    options = new_options(config, is_lasting=False, shows_logs=False)
    head = Head.start(options, folder, folder / "token")
    try:
        head.wait_ready(120)
        yield head
    finally:
        head.stop()


@pytest.fixture(scope="module")
def ray_cluster(_ray_head: "Head", tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray cluster of four CPUs that this process is attached to; gives its address.

    The tests of a module share the attachment, name no actors, and end what outlives it. Actors
    end with it, and the cluster is used again: to start one takes seconds. It ends with a module,
    as others test what happens in a process without Ray.
    """
    from eagleray.platform.cluster import session

    folder = tmp_path_factory.mktemp("cluster")
    (folder / "eagleray.yaml").write_text(
        f"name: test\ncluster: {{address: '{_ray_head.address}'}}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(_ray_head.token_file))
        with session(load_config(folder)) as info:
            yield info.address


@pytest.fixture(scope="module")
def _module_redis_cluster(until: Callable[..., None]) -> Iterator[RedisCluster]:
    with _joined(RedisCluster(), until) as cluster:
        yield cluster


@pytest.fixture
def redis_cluster(_module_redis_cluster: RedisCluster) -> RedisCluster:
    """An empty Redis Cluster that the tests of a module share: its nodes must stay well."""
    _module_redis_cluster.flush()
    return _module_redis_cluster


@pytest.fixture
def fragile_redis_cluster(
    until: Callable[..., None], request: pytest.FixtureRequest
) -> Iterator[RedisCluster]:
    """A Redis Cluster of one test, whose nodes may be killed.

    A replica takes over from a master that is silent for a second, or for the milliseconds of
    an indirect parameter.
    """
    with _joined(RedisCluster(getattr(request, "param", 1000)), until) as cluster:
        yield cluster


@contextmanager
def _joined(cluster: RedisCluster, until: Callable[..., None]) -> Iterator[RedisCluster]:
    try:
        cluster.join(until)
        yield cluster
    finally:
        cluster.stop()
