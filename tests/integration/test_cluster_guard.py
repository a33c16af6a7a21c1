"""The guard: whatever ends, and however, no process, folder or shared memory of it is left."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagleray.platform.cluster import guard
from eagleray.platform.cluster.head import Head, new_folder, remove_abandoned
from eagleray.platform.cluster.options import new_options
from eagleray.platform.cluster.tokens import write_token
from eagleray.platform.config import ClusterConfig

# Starts a child in a session of its own that outlives it, the hardest to find, and says its pid.
STRAY = (
    "import subprocess as s;"
    "print(s.Popen(['sleep', '300'], start_new_session=True).pid, flush=True)"
)
# Names shared memory and holds it mapped.
HOLDER = """\
import mmap, sys, time
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    held = mmap.mmap(file.fileno(), 4096)
    print("held", flush=True)
    time.sleep(300)
"""
HOLDER_OF_TWO = """\
import mmap, sys, time
files = [open(name, "w+b") for name in sys.argv[1:]]
for file in files:
    file.truncate(4096)
held = [mmap.mmap(file.fileno(), 4096) for file in files]
print("held", flush=True)
time.sleep(300)
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def mark() -> str:
    return secrets.token_hex(8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "cluster"
    folder.mkdir()
    return folder


@pytest.fixture
def start_guard(mark: str, folder: Path) -> Iterator[Start]:
    """Starts a guard over a command; anything it leaves is ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, mark, str(folder), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, guard.MARK_VARIABLE: mark},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
    guard.end_family(mark)


def spoken(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def detach(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write(guard.DETACH.decode())
    process.stdin.close()


def is_alive(pid: int) -> bool:
    return guard.start_ticks(pid) is not None


def test_an_owner_that_goes_takes_everything_with_it(start_guard: Start, folder: Path) -> None:
    process = start_guard(sys.executable, "-c", f"{STRAY}; import time; time.sleep(300)")
    stray = int(spoken(process))
    assert is_alive(stray)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 0
    assert not is_alive(stray)
    assert not folder.exists()


def test_a_detached_cluster_outlives_its_owner_until_it_is_told_to_end(
    start_guard: Start, folder: Path, mark: str
) -> None:
    process = start_guard(sys.executable, "-c", f"{STRAY}; import signal; signal.pause()")
    assert is_alive(int(spoken(process)))
    ticks = guard.start_ticks(process.pid)
    assert ticks is not None
    detach(process)
    time.sleep(0.3)  # long enough for a guard that took this for its owner's end
    assert process.poll() is None
    assert guard.family(mark)
    assert guard.end_process(process.pid, ticks, timeout_s=10)
    assert guard.family(mark) == set()
    assert not folder.exists()


def test_a_command_that_dies_by_itself_leaves_its_folder_for_its_logs(
    start_guard: Start, folder: Path, until: Callable[..., None], mark: str
) -> None:
    process = start_guard(sys.executable, "-c", f"{STRAY}; import signal; signal.pause()")
    stray = int(spoken(process))
    detach(process)
    (command,) = guard.family(mark) - {process.pid, stray}
    os.kill(command, signal.SIGKILL)
    process.wait(20)
    assert not is_alive(stray)
    assert folder.exists()


def test_the_kernel_ends_the_command_when_the_guard_is_killed(
    start_guard: Start, mark: str, until: Callable[..., None]
) -> None:
    process = start_guard("sleep", "300")
    until(lambda: len(guard.family(mark)) == 2, "the command's start")
    (command,) = guard.family(mark) - {process.pid}
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    until(lambda: not is_alive(command), "the command's end", timeout_s=5)
    assert guard.family(mark) == set()


def test_shared_memory_that_nobody_else_maps_is_freed(start_guard: Start, mark: str) -> None:
    segment = Path(f"/dev/shm/eagleray-test-{mark}")
    process = start_guard(sys.executable, "-c", HOLDER, str(segment))
    assert spoken(process) == "held"
    assert segment.exists()
    process.terminate()
    process.wait(10)
    assert not segment.exists()


def test_a_folder_of_the_feature_cache_goes_but_for_what_is_foreign_in_it(
    start_guard: Start, mark: str
) -> None:
    folders = [Path(f"/dev/shm/eagleray-segments-test-{mark}-{n}") for n in range(2)]
    try:
        for folder in folders:
            folder.mkdir()
            for name in ("lock", "alive", "segment-0000000001"):
                (folder / name).touch()
        (folders[1] / "notes").touch()
        indexes = [str(folder / "index") for folder in folders]
        process = start_guard(sys.executable, "-c", HOLDER_OF_TWO, *indexes)
        assert spoken(process) == "held"
        process.terminate()
        process.wait(10)
        assert not folders[0].exists()
        assert [path.name for path in folders[1].iterdir()] == ["notes"]
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def test_processes_without_the_mark_are_never_touched(start_guard: Start, mark: str) -> None:
    bystander = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        process = start_guard(sys.executable, "-c", f"{STRAY}; import signal; signal.pause()")
        spoken(process)
        process.terminate()
        process.wait(10)
        assert guard.end_family(mark) == set()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_pid_used_again_is_not_signalled() -> None:
    bystander = subprocess.Popen(["sleep", "300"])
    try:
        ticks = guard.start_ticks(bystander.pid)
        assert ticks is not None
        assert guard.end_process(bystander.pid, ticks + 1, timeout_s=1)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.fixture
def starting_head() -> Iterator[Head]:
    """A real head that has only begun to start."""
    folder = new_folder()
    write_token(folder / "token")
    options = new_options(ClusterConfig(num_cpus=1), is_lasting=False, shows_logs=False)
    head = Head.start(options, folder, folder / "token")
    yield head
    head.stop()
    assert guard.family(head.mark) == set()
    assert not head.folder.exists()


@pytest.mark.cluster
def test_a_head_that_is_stopped_while_it_starts_leaves_nothing(
    starting_head: Head, until: Callable[..., None]
) -> None:
    until(lambda: len(guard.family(starting_head.mark)) > 1, "the head's process")
    starting_head.stop()
    starting_head.stop()
    assert guard.family(starting_head.mark) == set()
    assert not starting_head.folder.exists()


@pytest.mark.cluster
def test_what_a_killed_guard_leaves_is_removed_by_the_next_start(
    starting_head: Head, until: Callable[..., None]
) -> None:
    until(lambda: len(guard.family(starting_head.mark)) > 1, "the head's process")
    os.kill(starting_head.guard_pid, signal.SIGKILL)
    until(lambda: not is_alive(starting_head.guard_pid), "the guard's end")
    assert starting_head.folder.exists()
    remove_abandoned()
    assert guard.family(starting_head.mark) == set()
    assert not starting_head.folder.exists()
