"""What processes of peers leave behind when they are ended: children, and names in /dev/shm.

A name is removed only if it appeared inside the context, is one that a peer would give, belongs to
this user, and no process that lives has it mapped: others may make names alike at the same time.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_SHARED_MEMORY = Path("/dev/shm")
_NAMES = re.compile(
    r"sem\.mp-[a-z0-9_]{8}"  # multiprocessing, which litdata uses
    # streaming/base/constant.py
    r"|\d{6}_(locals|barrier|next_epoch|cache_usage|shard_states|shard_access_times|resume"
    r"|epoch_shape|epoch_data)"
)
_END_S = 10.0


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """A context after which peers have no names in shared memory that they had not before."""
    before = _names()
    try:
        yield
    finally:
        deadline = time.monotonic() + _END_S
        while appeared := _names().items() - before.items():
            mapped = _mapped()
            for name, file in appeared:
                if file not in mapped:
                    (_SHARED_MEMORY / name).unlink(missing_ok=True)
            if time.monotonic() > deadline:
                # Somebody else's.
                break
            time.sleep(0.1)


def end_family(pid: int) -> None:
    """Kill all descendants of a process, which may be this one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _names() -> dict[str, tuple[int, int]]:
    """What lies there that a peer of this user may have made: device and inode of each name."""
    found = {}
    for path in _SHARED_MEMORY.iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if _NAMES.fullmatch(path.name) and status.st_uid == os.getuid():
                found[path.name] = status.st_dev, status.st_ino
    return found


def _mapped() -> set[tuple[int, int]]:
    """Device and inode of what processes that live have mapped.

    Not by name: whoever makes a semaphore has it mapped under another one, that it had at first.
    """
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_bytes().splitlines():
                _, _, _, device, inode, *_ = line.split(maxsplit=5)
                major, minor = (int(part, 16) for part in device.split(b":"))
                found.add((os.makedev(major, minor), int(inode)))
    return found
