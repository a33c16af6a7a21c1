"""The loader and the evictor as actors in a real cluster: slices, deadlines, and death."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from eagleray.actors.cache.evictor_actor import EvictorClient, create_evictor
from eagleray.actors.cache.feature_cache import SHARED_MEMORY
from eagleray.actors.cache.frame import digest_key
from eagleray.actors.cache.segment_folder import PREFIX
from eagleray.actors.data import Dataset
from eagleray.actors.data.batch import Batch
from eagleray.actors.data.loader import Loader
from eagleray.actors.data.loader_actor import LoaderSpec, create_loader
from eagleray.actors.data.loader_client import LoaderClient
from eagleray.actors.data.shards import Shard
from eagleray.platform.config import FeatureCacheConfig
from eagleray.platform.errors import DeadlineExceededError, NotFoundError, ServiceError
from eagleray.platform.redis_server import RedisServer
from eagleray.platform.storage import Storage

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("ray_cluster"),
]
Until = Callable[..., None]


def spec_for(dataset: Dataset, **changes: Any) -> LoaderSpec:
    return LoaderSpec(dataset.folder.parents[1], dataset.digest, 5, 8, **changes)


def pid_of(handle: Any) -> int:
    pid: int = ray.get(handle.__ray_call__.remote(lambda self: os.getpid()), timeout=60)
    return pid


def same(ours: Batch, theirs: Batch) -> bool:
    return np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.tokens, theirs.tokens)


def test_slices_of_all_ranks_make_the_global_batch(small_dataset: Dataset) -> None:
    client = LoaderClient(create_loader(spec_for(small_dataset)), 60)
    with Loader(small_dataset, "train", 5, 8, prefetch_batches=0) as plain:
        for step, world_size in ((0, 1), (1, 2), (2, 4), (3, 8), (90_000, 2)):
            parts = [client.batch(step, rank, world_size) for rank in range(world_size)]
            whole = plain.batch(step)
            assert np.array_equal(np.concatenate([p.ids for p in parts]), whole.ids)
            assert np.array_equal(np.concatenate([p.tokens for p in parts]), whole.tokens)
        assert same(client.eval_batch(3), plain.eval_batch(3))
    assert client.stats().batches == 17
    # Views of what all ranks of a node share.
    assert not client.batch(0).tokens.flags.writeable


def test_rows_of_numbers_come_through_the_actor(small_rows: Dataset) -> None:
    client = LoaderClient(create_loader(spec_for(small_rows)), 60)
    with Loader(small_rows, "train", 5, 8, prefetch_batches=0) as plain:
        parts = [client.batch(7, rank, 4) for rank in range(4)]
        whole = plain.batch(7)
        assert np.array_equal(np.concatenate([p.features for p in parts]), whole.features)
        assert np.array_equal(np.concatenate([p.labels for p in parts]), whole.labels)


@pytest.fixture
def hogs() -> Iterator[None]:
    """Each core has more to do than it can."""
    hog = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
    words = [sys.executable, "-c", hog]
    started = [subprocess.Popen(words) for _ in range(os.cpu_count() or 1)]
    yield
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("hogs")
def test_a_loader_that_is_killed_ten_times_gives_every_batch_as_if_it_had_not_been(
    small_dataset: Dataset,
) -> None:
    handle = create_loader(spec_for(small_dataset))
    client = LoaderClient(handle, 90)
    places = set(random.Random(7).sample(range(1, 60), 10))
    pids = set()
    with Loader(small_dataset, "train", 5, 8, prefetch_batches=0) as plain:
        for step in range(60):
            if step in places:
                pids.add(pid_of(handle))
                os.kill(pid_of(handle), signal.SIGKILL)
            for rank in range(2):
                ours = client.batch(step, rank, 2)
                assert same(ours, plain.batch(step).slice_for_rank(rank, 2))
    pids.add(pid_of(handle))
    assert len(pids) == 11


def test_a_loader_that_does_not_answer_is_given_up_by_step(small_dataset: Dataset) -> None:
    handle = create_loader(spec_for(small_dataset))
    pid = pid_of(handle)
    LoaderClient(handle, 60).batch(0)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(
            DeadlineExceededError,
            match=r"step 41 did not come within 0\.5 s: loader \w{12} does not answer at all",
        ):
            LoaderClient(handle, 0.5).batch(41)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert LoaderClient(handle, 60).batch(42).step == 42


def test_a_read_that_hangs_is_given_up_by_shard_and_loader(
    small_dataset: Dataset, tmp_path: Path
) -> None:
    handle = create_loader(spec_for(small_dataset, prefetch_batches=0))
    gate = tmp_path / "gate"

    def hang(_: Any) -> None:
        """Every block hangs that is checked from now on, as it would on storage that is away."""
        real = Shard.is_sound

        def is_sound(self: Shard, block: int) -> bool:
            while not gate.exists():
                time.sleep(0.01)
            return real(self, block)

        Shard.is_sound = is_sound  # type: ignore[method-assign]

    ray.get(handle.__ray_call__.remote(hang), timeout=60)
    with pytest.raises(
        DeadlineExceededError,
        match=r"step 7 did not come within 1 s: loader \w{12} has been reading block 0 of shard "
        r"main\.train-00000\.bin for \d",
    ):
        LoaderClient(handle, 1).batch(7)
    gate.touch()
    assert LoaderClient(handle, 60).batch(7).step == 7


def test_errors_arrive_with_their_type_or_as_service_errors(
    small_dataset: Dataset, storage: Storage
) -> None:
    missing = create_loader(LoaderSpec(storage.root, "0" * 64, 0, 4))
    with pytest.raises(NotFoundError, match="there is no dataset 000"):
        LoaderClient(missing, 60).batch(0)
    client = LoaderClient(create_loader(spec_for(small_dataset)), 60)
    with pytest.raises(ServiceError, match="batch_size 8 must be a multiple of world_size 3"):
        client.batch(0, 0, 3)


def test_a_loader_that_was_ended_is_a_service_error(small_dataset: Dataset, until: Until) -> None:
    handle = create_loader(spec_for(small_dataset))
    client = LoaderClient(handle, 60)
    client.batch(0)
    ray.kill(handle)

    refusals: list[str] = []

    def is_refused() -> bool:
        # The kill is on its way; until it arrives the loader may answer.
        try:
            client.batch(1)
        except ServiceError as error:
            refusals.append(error.what)
        return bool(refusals)

    until(is_refused, "the end of the loader")
    assert "its actor is gone" in refusals[0]


def test_loaders_report_to_the_evictor_which_survives_its_own_death(
    small_dataset: Dataset, redis_server: RedisServer, until: Until
) -> None:
    config = FeatureCacheConfig(timeout_s=5, policy="auto")
    name = f"evictor-{uuid.uuid4().hex}"
    handle = create_evictor(config, redis_server.url, name=name)
    evictor = EvictorClient(handle)
    node = ray.get_runtime_context().get_node_id()
    spec = spec_for(small_dataset, cache=config, redis_url=redis_server.url, evictor=name)
    loader = LoaderClient(create_loader(spec, node_id=node), 60)

    def reads_are_noted() -> bool:
        for step in range(60):
            loader.batch(step)
        return evictor.stats(60).touches > 1

    until(reads_are_noted, "touches", 60)
    assert evictor.stats(60).expected > 60
    assert loader.stats().cache_hits > 0
    assert redis_server.url not in repr(spec)
    os.kill(pid_of(handle), signal.SIGKILL)
    until(lambda: _keys(evictor) == 1, "the evictor with what lies in Redis", 60)


def test_a_loader_without_the_evictor_it_was_told_of_reads_all_the_same(
    small_dataset: Dataset, redis_server: RedisServer
) -> None:
    config = FeatureCacheConfig(timeout_s=5)
    spec = spec_for(
        small_dataset, cache=config, redis_url=redis_server.url, evictor="evictor:never-made"
    )
    with Loader(small_dataset, "train", 5, 8, prefetch_batches=0) as plain:
        assert same(LoaderClient(create_loader(spec), 60).batch(3), plain.batch(3))


def test_loaders_of_a_node_share_segments_which_go_when_they_close(
    small_dataset: Dataset, storage: Storage, until: Until
) -> None:
    config = FeatureCacheConfig.model_validate({"shared_bytes": "8MB"})
    folder = SHARED_MEMORY / (PREFIX + digest_key(str(storage.root).encode()).hex())
    handles = [create_loader(spec_for(small_dataset, cache=config)) for _ in range(2)]
    clients = [LoaderClient(handle, 60) for handle in handles]
    for client in clients:
        client.batch(0)
    until(folder.is_dir, "the segments")
    assert sorted(client.stats().cache_hits > 0 for client in clients)[1]
    os.kill(pid_of(handles[0]), signal.SIGKILL)
    assert clients[0].batch(1).step == 1  # The one that Ray restarts finds what was stored.
    assert clients[0].stats().cache_hits > 0
    for handle in handles:
        ray.get(handle.close.remote(), timeout=60)
    assert not folder.exists()


def _keys(evictor: EvictorClient) -> int:
    try:
        return evictor.stats(60).keys
    except ServiceError:
        return -1
