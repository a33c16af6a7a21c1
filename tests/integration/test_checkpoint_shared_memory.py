"""Snapshots in shared memory while their processes are killed, and through a real store actor."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from eagleray.actors.checkpoint.actor import create_store
from eagleray.actors.checkpoint.client import StoreClient
from eagleray.actors.checkpoint.snapshot_buffer import BufferName, Placed, SnapshotBuffer, lay_out
from eagleray.actors.checkpoint.state import Snapshot
from eagleray.actors.checkpoint.store import CheckpointStore
from eagleray.platform.config import CheckpointConfig
from eagleray.platform.errors import ServiceError
from eagleray.platform.runs import RunStore
from eagleray.platform.storage import Storage

pytestmark = [pytest.mark.timeout(180)]
Until = Callable[..., None]
PLACES, NUM_BYTES = lay_out([("model.w", np.dtype(np.float32), (1 << 20,))])
ATTACH = """
import sys
from eagleray.actors.checkpoint.snapshot_buffer import *
pid, descriptor, token, num_bytes, size = sys.argv[1:]
name = BufferName(int(pid), int(descriptor), bytes.fromhex(token), int(num_bytes))
buffer = SnapshotBuffer.attach(name)
array = np.ndarray((int(size),), np.float32, buffer=buffer._data, offset=4096)
"""
WORKER = f"""{ATTACH}
buffer.fill(1, 2)
array[: array.size // 2] = 2
print("half", flush=True)
sys.stdin.readline()
array[:] = 3
print("written", flush=True)
sys.stdin.readline()
"""
OWNER = """
import sys
from eagleray.actors.checkpoint.snapshot_buffer import *
name = SnapshotBuffer.create(int(sys.argv[1])).name
print(name.pid, name.descriptor, name.token.hex(), name.num_bytes, flush=True)
sys.stdin.readline()
"""


def started(code: str, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("go on\n")
    process.stdin.flush()


def worker_at(name: BufferName) -> "subprocess.Popen[str]":
    words = (name.pid, name.descriptor, name.token.hex(), name.num_bytes, 1 << 20)
    return started(WORKER, *map(str, words))


@pytest.fixture
def ended() -> Iterator[list["subprocess.Popen[str]"]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def users_of(inode: int) -> set[int]:
    """Processes that have an anonymous file of ours open or mapped."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines = (folder / "maps").read_text().splitlines()
            files = list((folder / "fd").iterdir())
        except OSError:
            continue
        if any("eagleray-snapshot" in line and f" {inode} " in line for line in lines):
            found.add(int(folder.name))
        for file in files:
            try:
                if "eagleray-snapshot" in os.readlink(file) and file.stat().st_ino == inode:
                    found.add(int(folder.name))
            except OSError:
                continue
    return found


def test_a_worker_killed_in_the_middle_of_its_copy_leaves_the_state_before(
    tmp_path: Path, ended: list["subprocess.Popen[str]"], until: Until
) -> None:
    store = CheckpointStore(Storage(tmp_path), "r", CheckpointConfig())
    store.begin(1)
    name = store.lend(1, NUM_BYTES)
    assert name is not None
    buffer = SnapshotBuffer.attach(name)
    buffer.fill(1, 1)
    buffer.arrays(PLACES)["model.w"][:] = 1
    buffer.complete(1, 1)
    store.submit(Snapshot(1, 1, 0, 1, {}, np.zeros((1, 1)), 0, placed=Placed(name, PLACES)))
    other = store.lend(1, NUM_BYTES)
    assert other is not None
    worker = worker_at(other)
    ended.append(worker)
    assert said(worker) == "half"
    inode = os.stat(f"/proc/self/fd/{other.descriptor}").st_ino
    assert users_of(inode) == {os.getpid(), worker.pid}
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)
    found = store.begin(2)
    assert found is not None
    assert found.step == 1
    assert np.all(found.arrays["model.w"] == 1)
    # Half of a state is of no use to anybody, and takes no memory.
    until(lambda: not users_of(inode), "the end of the buffer")
    store.close()


def test_memory_outlives_a_killed_store_only_in_its_workers(
    ended: list["subprocess.Popen[str]"], until: Until
) -> None:
    before = set(os.listdir("/dev/shm"))
    owner = started(OWNER, str(NUM_BYTES))
    ended.append(owner)
    pid, descriptor, token, num_bytes = said(owner).split()
    name = BufferName(int(pid), int(descriptor), bytes.fromhex(token), int(num_bytes))
    worker = worker_at(name)
    ended.append(worker)
    assert said(worker) == "half"
    inode = os.stat(f"/proc/{pid}/fd/{descriptor}").st_ino
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    tell(worker)
    assert said(worker) == "written"
    assert users_of(inode) == {worker.pid}
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)
    until(lambda: not users_of(inode), "the end of the buffer")
    assert not [n for n in set(os.listdir("/dev/shm")) - before if "snapshot" in n]


def part(step: int, attempt: int, **changes: Any) -> Snapshot:
    values: dict[str, Any] = {"arrays": {"rng.0.cpu": np.arange(3)}, **changes}
    return Snapshot(step, attempt, 0, 1, samples_SB=np.zeros((2, 1)), first_step=step - 2, **values)


def snapshot(client: StoreClient, step: int, attempt: int) -> None:
    buffer = client.lend(NUM_BYTES)
    assert buffer is not None
    buffer.fill(attempt, step)
    buffer.arrays(PLACES)["model.w"][:] = step
    buffer.complete(attempt, step)
    client.submit(part(step, attempt, placed=Placed(buffer.name, PLACES)))


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_through_an_actor_arrays_stay_in_shared_memory_on_its_node_alone(
    tmp_path: Path, until: Until
) -> None:
    storage = Storage(tmp_path)
    runs = RunStore(storage)
    run_id = runs.create(f"r{uuid.uuid4().hex[:8]}", "train", {})
    handle = create_store(storage, run_id, CheckpointConfig())
    client = StoreClient(handle, 60)
    assert client.begin(1) is None
    for step in (2, 4, 6):
        snapshot(client, step, 1)
    client.flush()
    near = StoreClient(handle, 60)
    found = near.begin(2)
    assert found is not None
    assert found.step == 6
    assert np.all(found.arrays["model.w"] == 6)
    assert found.arrays["rng.0.cpu"].tolist() == [0, 1, 2]
    assert "eagleray-snapshot" in Path("/proc/self/maps").read_text()

    # On another node, and where the store's files cannot be opened, arrays travel.
    far = StoreClient(handle, 60)
    far._node_id = "another"
    travelled = far.begin(3)
    assert travelled is not None
    assert np.array_equal(travelled.arrays["model.w"], found.arrays["model.w"])
    assert far.lend(NUM_BYTES) is None
    far.submit(part(8, 3, arrays={"model.w": np.full(4, 8.0), "rng.0.cpu": np.arange(3)}))
    far.flush()
    events = [event["event"] for event in runs.events(run_id)]
    assert events == ["checkpoint"] * 4

    apart = StoreClient(handle, 60)
    apart.begin(4)
    apart._attached = lambda name: SnapshotBuffer.attach(  # type: ignore[method-assign]
        BufferName(name.pid, name.descriptor, b"\0" * 16, name.num_bytes)
    )
    assert apart.lend(NUM_BYTES) is None
    assert apart.lend(NUM_BYTES) is None
    (told,) = [e for e in runs.events(run_id) if e["event"] == "snapshots_not_shared"]
    assert "another file" in told["message"]

    pid = ray.get(handle.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
    os.kill(pid, signal.SIGKILL)

    def is_restarted() -> bool:
        try:
            return bool(
                ray.get(handle.__ray_call__.remote(lambda _: os.getpid()), timeout=60) != pid
            )
        except ray.exceptions.RayActorError:
            return False

    until(is_restarted, "the restart of the store", 60)
    with pytest.raises(ServiceError, match="restarted"):
        near.lend(NUM_BYTES)
    again = StoreClient(handle, 60)
    found = again.begin(5)
    assert found is not None
    assert found.step == 8
    ray.kill(handle)
