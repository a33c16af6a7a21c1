"""The watcher that a cluster lives under: when it ends, nothing of the cluster is left.

It is run by path with the standard library alone, so that it starts in milliseconds, weighs little
and depends on nothing that may break:

    python -I guard.py MARK FOLDER COMMAND...

It starts COMMAND, adopts every process that COMMAND's descendants orphan, and ends all of them by
SIGKILL (a cluster keeps nothing outside FOLDER that a gentler end would save) when

    * its standard input closes before the line `detach` came, or its parent dies;
    * it gets SIGTERM or SIGINT: `eagleray down`;
    * COMMAND ends by itself. If the owner had detached, FOLDER stays then, for its logs.

A process belongs to the cluster if it descends from the guard or carries `MARK_VARIABLE=MARK` in
its environment. Should the guard itself be killed, COMMAND is killed with it by the kernel.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

MARK_VARIABLE = "EAGLERAY_CLUSTER_MARK"
DETACH = b"detach\n"
END_TIMEOUT_S = 15.0
_KILL_TIMEOUT_S = 5.0

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.5
_SHARED_MEMORY = "/dev/shm/"
_CACHE_PREFIX = "eagleray-segments-"
# Fields of /proc/PID/stat after the parenthesised name: see proc_pid_stat(5).
_STATE, _PARENT, _START_TICKS = 0, 1, 19
_ENDED = ("Z", "X")


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it has ended.

    With the boot's id this names a process for ever; the pid alone is used again.
    """
    fields = _stat(pid)
    return int(fields[_START_TICKS]) if fields and fields[_STATE] not in _ENDED else None


def family(mark: str, root: int | None = None) -> set[int]:
    """Living processes that descend from `root` or carry the mark; `root` itself is left out."""
    parents = {pid: int(fields[_PARENT]) for pid, fields in _living()}
    members = {pid for pid in parents if _carries(pid, mark)}
    if root is not None:
        members |= _descendants(parents, root)
    return members - {root, os.getpid()}


def end_family(mark: str, root: int | None = None, timeout_s: float = END_TIMEOUT_S) -> set[int]:
    """Kill a cluster's processes until none is left, and free the shared memory they leave.

    Returns:
        Those that still lived at the deadline; empty but for a process stuck in the kernel.
    """
    deadline = time.monotonic() + timeout_s
    segments: set[str] = set()
    members = family(mark, root)
    while members and time.monotonic() < deadline:
        segments |= mapped_segments(members)
        for pid in members:
            _kill(pid)
        reap()
        time.sleep(0.02)
        members = family(mark, root)
    _free(segments)
    return members


def end_process(pid: int, ticks: int, timeout_s: float) -> bool:
    """Ask a guard to end its cluster and itself; kill it if it does not in time.

    Returns:
        Whether it ended by itself.
    """
    for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, _KILL_TIMEOUT_S)):
        deadline = time.monotonic() + wait_s
        if start_ticks(pid) == ticks:
            _kill(pid, number)
        while start_ticks(pid) == ticks and time.monotonic() < deadline:
            time.sleep(0.02)
        if start_ticks(pid) != ticks:
            return number is signal.SIGTERM
    return False


def mapped_segments(pids: Iterable[int]) -> set[str]:
    """Named files in /dev/shm that processes have mapped."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        except OSError:
            continue
        paths = [line[line.index(_SHARED_MEMORY) :] for line in lines if _SHARED_MEMORY in line]
        found |= {path for path in paths if not path.endswith("(deleted)")}
    return found


def reap() -> set[int]:
    """Collect ended children, adopted ones too; none is left a zombie."""
    ended: set[int] = set()
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended.add(pid)


def main(arguments: list[str]) -> int:
    """Watch one command until it, its owner or a signal ends it."""
    mark, folder, *command = arguments
    owner = os.getppid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, cwd=folder, preexec_fn=_die_with_the_guard
    )
    keep_folder = _watch(child.pid, owner, woken)
    child.returncode = 0  # reaped by us: Popen must not look for it
    left = end_family(mark, os.getpid())
    if not keep_folder:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if left else 0


def _watch(command: int, owner: int, woken: int) -> bool:
    """Wait for a reason to end; tell whether the folder should stay."""
    owned = True
    while True:
        sources = [woken, sys.stdin.fileno()] if owned else [woken]
        ready, _, _ = select.select(sources, [], [], _POLL_S)
        if woken in ready and {signal.SIGTERM, signal.SIGINT} & set(os.read(woken, 4096)):
            return False
        if sys.stdin.fileno() in ready:
            line = os.read(sys.stdin.fileno(), len(DETACH))
            if line != DETACH:
                return False
            owned = False
        if command in reap():
            return not owned
        # A forked child of the owner may hold the pipe open, so the parent is looked at too.
        if owned and os.getppid() != owner:
            return False


def _die_with_the_guard() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _living() -> list[tuple[int, list[str]]]:
    found = ((int(name), _stat(int(name))) for name in os.listdir("/proc") if name.isdigit())
    return [(pid, fields) for pid, fields in found if fields and fields[_STATE] not in _ENDED]


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _carries(pid: int, mark: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone meanwhile, or another user's
        return False
    return f"{MARK_VARIABLE}={mark}".encode() in environment.split(b"\0")


def _descendants(parents: dict[int, int], root: int) -> set[int]:
    found: set[int] = set()
    border = {root}
    while border:
        border = {pid for pid, parent in parents.items() if parent in border} - found
        found |= border
    return found


def _kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except OSError:  # it ended by itself
        return


def _free(segments: set[str]) -> None:
    if not segments:
        return
    mapped = mapped_segments(pid for pid, _ in _living())
    for path in segments - mapped:
        Path(path).unlink(missing_ok=True)
    used = {Path(path).parent for path in mapped}
    for folder in {Path(path).parent for path in segments} - used:
        _free_folder(folder)


def _free_folder(folder: Path) -> None:
    """Remove a folder of the feature cache: locks, and segments that nobody had mapped."""
    if not folder.name.startswith(_CACHE_PREFIX):
        return
    for pattern in ("segment-*", "index*", "lock", "alive"):
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # Something foreign lies there.
        folder.rmdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
