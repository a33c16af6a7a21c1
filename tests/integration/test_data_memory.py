"""Reading many epochs takes no more memory than reading a few, in all processes together."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagleray.actors.data import Dataset

NUM_LOADERS = 2
EPOCHS = (2, 20, 38)
# Reads every batch in an order of its own; after each of EPOCHS it says so and waits to be let on.
LOADER = """
import sys
from pathlib import Path
from eagleray.actors.cache import open_cache
from eagleray.actors.data import BatchStream, Dataset
from eagleray.platform.config import FeatureCacheConfig
from eagleray.platform.storage import Storage
root, digest, url, seed, *epochs = sys.argv[1:]
dataset = Dataset.open(Storage(Path(root)), digest)
cache = open_cache(FeatureCacheConfig(timeout_s=5), url) if url else None
with BatchStream(dataset, 32, seed=int(seed), cache=cache) as stream:
    for epoch in range(1, int(epochs[-1]) + 1):
        for batch in stream:
            pass
        if str(epoch) in epochs:
            stats = stream._loader.stats()
            print(stats.batches, stats.cache_hits, flush=True)
            sys.stdin.readline()
"""


def memory(pid: int) -> tuple[int, int]:
    """Resident bytes of a process, and its share of those that are no file's."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    rows = [line.split() for line in rollup.splitlines()[1:]]
    sizes = {name: 1024 * int(size) for name, size, _ in rows}
    return sizes["Rss:"], sizes["Pss_Anon:"] + sizes["Pss_Shmem:"]


@contextlib.contextmanager
def loaders(dataset: Dataset, url: str) -> Iterator[list["subprocess.Popen[str]"]]:
    root: Path = dataset.folder.parents[1]
    words = [sys.executable, "-c", LOADER, str(root), dataset.digest, url]
    started = [
        subprocess.Popen(
            [*words, str(seed), *map(str, EPOCHS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for seed in range(NUM_LOADERS)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def dataset(
    tmp_path_factory: pytest.TempPathFactory, build_letters: Callable[[Path, int], Dataset]
) -> Dataset:
    """Batches of eighteen epochs are far more than a twentieth of a loader."""
    return build_letters(tmp_path_factory.mktemp("dataset"), 50_000)


@pytest.mark.parametrize("has_cache", [False, True], ids=["no cache", "redis"])
def test_the_memory_of_loaders_grows_by_less_than_a_twentieth_over_eighteen_epochs(
    dataset: Dataset, has_cache: bool, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("redis_server").url if has_cache else ""
    resident, own, batches = [], [], []
    with loaders(dataset, url) as started:
        for _ in EPOCHS:
            said = [process.stdout.readline().split() for process in started if process.stdout]
            assert len(said) == NUM_LOADERS
            assert all((int(hits) > 0) == has_cache for _, hits in said)
            batches.append(int(said[0][0]))
            each = [memory(process.pid) for process in started]
            resident.append(sum(of_one[0] for of_one in each))
            own.append(sum(of_one[1] for of_one in each))
            for process in started:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
        assert [process.wait(30) for process in started] == [0] * NUM_LOADERS
    assert batches[1] >= 9 * batches[0] > 0
    assert resident[1] < 1.05 * resident[0]
    # Buffers and threads are all there by then: what still grows, grows for ever.
    assert own[2] < 1.01 * own[1]
