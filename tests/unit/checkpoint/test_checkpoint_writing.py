"""How a checkpoint's files are written: by threads, at a pace, digested on the way."""

import errno
import fcntl
import hashlib
import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from torch.serialization import get_crc32_options

from eagleray.actors.checkpoint import dcp
from eagleray.actors.checkpoint.dcp import read_arrays, write_arrays
from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.actors.checkpoint.shard_file import Pacer, ShardFile, give_way
from eagleray.actors.checkpoint.state import Checkpoint
from eagleray.platform.config import CheckpointConfig, ConfigError, ProjectConfig, validated
from eagleray.platform.errors import StorageError
from eagleray.platform.storage import Storage


class Clock:
    """Time that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def arrays(count: int = 4, size: int = 1_000) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    return {f"model.w{i}": draw.standard_normal(size).astype(np.float32) for i in range(count)}


@pytest.fixture
def many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp, "_BYTES_PER_FILE", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})


@pytest.mark.usefixtures("many_files")
def test_large_checkpoints_are_written_to_several_files_by_threads(tmp_path: Path) -> None:
    given = arrays()
    written = write_arrays(given, tmp_path)
    assert written.keys() == {"__0_0.distcp", "__0_1.distcp", "__0_2.distcp", ".metadata"}
    for name, file in written.items():
        content = (tmp_path / name).read_bytes()
        assert file == (len(content), hashlib.sha256(content).hexdigest())
    found = read_arrays(tmp_path)
    assert all(np.array_equal(found[name], array) for name, array in given.items())


@pytest.mark.parametrize(("megabytes", "files"), [(1, 1), (127, 1), (128, 2), (1_000, 4)])
def test_the_number_of_files_follows_from_the_size(
    megabytes: int, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    view = np.broadcast_to(np.zeros(1, np.uint8), (megabytes * 100_000,))
    assert dcp._num_files({str(i): view for i in range(10)}) == files


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("refused", [0, 1, 2, ".metadata"])
def test_a_file_that_fails_in_a_thread_fails_the_checkpoint(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, refused: int | str
) -> None:
    plain = ShardFile.write
    name = refused if isinstance(refused, str) else f"__0_{refused}.distcp"

    def write(self: ShardFile, data: Any) -> int:
        if self._path.name.startswith(name) and self.tell() > 0:
            self.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise self.error
        return plain(self, memoryview(data)[:64])

    monkeypatch.setattr(ShardFile, "write", write)
    folder = CheckpointFolder(storage, "r")
    with pytest.raises(StorageError, match=r"cannot be written to .*No space left on device"):
        folder.write(Checkpoint(1, arrays(), "", {}))
    assert folder.all_steps() == []
    assert os.listdir(storage.path(*folder.place())) == []


def test_a_paced_writer_keeps_its_pace(tmp_path: Path) -> None:
    clock = Clock()
    pacer = Pacer(100_000, clock, clock.sleep)
    began_s = clock.now_s
    written = write_arrays(arrays(count=4, size=50_000), tmp_path, pacer)
    total = sum(file.bytes for file in written.values())
    assert total > 800_000
    # The last chunk need not be waited for.
    assert (total - pacer.chunk_bytes) / 100_000 <= clock.now_s - began_s <= total / 100_000


def test_a_paced_file_reaches_the_disk_at_its_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, synced = Clock(), []
    plain = os.fdatasync

    def fdatasync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        plain(descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    write_arrays(arrays(count=1, size=100_000), tmp_path, Pacer(100_000, clock, clock.sleep))
    assert len(synced) == 4
    assert all(100_000 <= b - a < 120_000 for a, b in zip([0, *synced], synced, strict=False))


@pytest.mark.parametrize("size", [1, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 4096, 5 * 2**20 + 77])
@pytest.mark.parametrize("refusal", ["", "mode", "write"])
def test_a_large_file_goes_around_the_page_cache_where_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, refusal: str
) -> None:
    plain_write, plain_fcntl = os.write, fcntl.fcntl
    was_direct = []

    def is_direct(descriptor: int) -> bool:
        return bool(plain_fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)

    def write(descriptor: int, data: memoryview) -> int:
        if is_direct(descriptor) and refusal == "write":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        was_direct.append((is_direct(descriptor), len(data)))
        return plain_write(descriptor, data)

    def control(descriptor: int, command: int, flags: int = 0) -> int:
        if refusal == "mode" and command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain_fcntl(descriptor, command, flags)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(fcntl, "fcntl", control)
    data = np.random.default_rng(2).bytes(size)
    file = ShardFile(tmp_path / "file", Pacer())
    with io.BufferedWriter(file, 100) as stream:
        stream.write(data[:50])
        stream.write(data[50:])
    assert (tmp_path / "file").read_bytes() == data
    assert file.written() == (size, hashlib.sha256(data).hexdigest())
    if refusal:
        assert not any(direct for direct, _ in was_direct)
    else:
        # All but the end, which fills no block.
        expected = size // 4096 * 4096 if size >= 2**20 else 0
        assert sum(length for direct, length in was_direct if direct) == expected


def test_arrays_load_as_they_are_without_their_archives_checksums(tmp_path: Path) -> None:
    given = arrays()
    write_arrays(given, tmp_path)
    assert get_crc32_options()
    found = {name: torch.empty(array.shape) for name, array in given.items()}
    torch.distributed.checkpoint.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert all(np.array_equal(found[name].numpy(), array) for name, array in given.items())


def test_threads_share_one_pace() -> None:
    clock = Clock()
    pacer = Pacer(1_000, clock, clock.sleep)
    for _ in range(10):
        for _ in range(3):
            pacer.wait(100)
    assert clock.now_s - 100.0 == pytest.approx(2.9)


def test_without_a_pace_nothing_is_waited_for() -> None:
    def never(seconds: float) -> None:
        pytest.fail(f"slept {seconds} s")

    pacer = Pacer(None, time.monotonic, never)
    pacer.wait(10**12)
    assert pacer.chunk_bytes > 10**5


def test_a_pace_is_a_size_per_second() -> None:
    assert CheckpointConfig.model_validate({"max_bytes_per_s": "50MB"}).max_bytes_per_s == 5 * 10**7
    section = {"name": "p", "train": {"checkpoint": {"max_bytes_per_s": 0, "keep_every_steps": 0}}}
    with pytest.raises(ConfigError) as caught:
        validated(section, "eagleray.yaml")
    assert "at least 1000 bytes per second, or null" in str(caught.value)
    assert "keep_every_steps" in str(caught.value)
    assert ProjectConfig.model_validate({"name": "p"}).train.checkpoint.max_bytes_per_s is None


def test_arrays_that_must_not_be_written_are_written_without_a_copy(tmp_path: Path) -> None:
    given = arrays(count=1) | {
        "model.empty": np.empty((0, 3), np.float32),
        "model.turned": np.arange(6, dtype=np.int64).reshape(2, 3).T,
        "model.scalar": np.array(2.5),
    }
    for array in given.values():
        array.flags.writeable = False  # as they arrive through Ray
    assert dcp._shared(given["model.w0"]).data_ptr() == given["model.w0"].ctypes.data
    write_arrays(given, tmp_path)
    found = read_arrays(tmp_path)
    for name, array in given.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)


def test_the_writer_gives_way_to_training() -> None:
    seen: list[int] = []

    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def work() -> None:
        give_way()
        helper = threading.Thread(target=lambda: seen.append(nice()))
        helper.start()
        helper.join()

    before = nice()
    writer = threading.Thread(target=work)
    writer.start()
    writer.join()
    assert seen == [max(before, 10)]
    assert nice() == before
