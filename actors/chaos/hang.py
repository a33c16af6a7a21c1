"""A thread that hangs: it stands still where it is, and the rest of its process goes on.

What users meet is a rank stuck in one call, a lock, a read, an endless loop, while its process
answers all who ask. Here the busiest thread of a process, the one that trains, is stopped alone, as
a debugger stops one. It goes on when the process that stopped it ends.
"""

import ctypes
import logging
import os
import threading
import time
from pathlib import Path

from eagleray.platform.clock import steady_time

logger = logging.getLogger(__name__)

_SEIZE, _INTERRUPT = 0x4206, 0x4207
_WALL = 0x40000000
"""waitpid(2): also for threads. Python has no name for it."""
_SAMPLE_S, _LOOK_S = 5.0, 0.02
_ENOUGH_NS = 100_000_000
_ANSWER_S = 10.0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def hang(pid: int) -> float:
    """Stop the busiest thread of a process; when, in seconds since the epoch.

    Returns:
        0 if there is no such process, or it may not be traced.
    """
    tid = _busiest(pid)
    struck: list[float] = []
    is_decided = threading.Event()

    def hold() -> None:
        # The kernel lets it go when this thread ends.
        try:
            _ptrace(_SEIZE, tid)
            _ptrace(_INTERRUPT, tid)
            os.waitpid(tid, _WALL)
            struck.append(steady_time())
        except OSError as error:
            logger.warning("thread %d of process %d cannot be stopped: %s", tid, pid, error)
            return
        finally:
            is_decided.set()
        # A traced thread that was killed is not gone before this.
        while not _has_ended(tid):
            pass

    if tid:
        threading.Thread(target=hold, name=f"hang-{tid}", daemon=True).start()
        is_decided.wait(_ANSWER_S)
    return struck[0] if struck else 0.0


def _has_ended(tid: int) -> bool:
    try:
        _, status = os.waitpid(tid, _WALL)
    except ChildProcessError:
        return True
    return not os.WIFSTOPPED(status)


def _ptrace(request: int, tid: int) -> None:
    if _libc.ptrace(request, tid, None, None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _busiest(pid: int) -> int:
    """The thread that computes most now; 0 if there is no such process."""
    before, deadline = _computed(pid), time.monotonic() + _SAMPLE_S
    while spent := {tid: ns - before.get(tid, 0) for tid, ns in _computed(pid).items()}:
        busiest = max(spent, key=lambda tid: spent[tid])
        # On a busy machine a moment may give the processor to none of them.
        if spent[busiest] >= _ENOUGH_NS or time.monotonic() > deadline:
            return busiest
        time.sleep(_LOOK_S)
    return 0


def _computed(pid: int) -> dict[int, int]:
    """Thread -> nanoseconds on a processor."""
    found = {}
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            found[int(stat.parent.name)] = int(stat.read_text().split()[0])
        except OSError:
            continue
    return found
