"""Whether the kernel's out-of-memory killer struck while a process lived.

It sends a SIGKILL that looks like any other, but counts: in the `memory.events` of the victim's
control group (cgroup v2), in `memory.oom_control` (v1), else in /proc/vmstat for the machine.
"""

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


class OomKills:
    """The count that concerns one process, from now on.

    Args:
        pid: Of a process that lives.
        root: Of the file system.
    """

    def __init__(self, pid: int, root: Path = _ROOT) -> None:
        self._path = next((p for p in _paths(pid, root) if _count(p) is not None), None)
        self._before = self._now()

    def risen(self) -> bool:
        """Whether the killer has struck since; False also where nobody counts."""
        now = self._now()
        return self._before is not None and now is not None and now > self._before

    def _now(self) -> int | None:
        return _count(self._path) if self._path else None


def _paths(pid: int, root: Path) -> Iterator[Path]:
    try:
        lines = (root / "proc" / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    groups = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, group = line.split(":", 2)
        inside = group.lstrip("/")
        if not controllers:
            yield groups / inside / "memory.events"
            yield groups / "unified" / inside / "memory.events"
        elif "memory" in controllers.split(","):
            yield groups / controllers / inside / "memory.oom_control"
    yield root / "proc/vmstat"


def _count(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
