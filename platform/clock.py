"""Time of day that does not jump while a process lives.

The wall clock jumps when somebody sets it, or when a machine that started without the time learns
it. Records of a run are sorted and subtracted by time: those of one process must not swap places.
"""

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while a machine is suspended, where there is such a clock."""
_OFFSET_S = time.time() - time.clock_gettime(_CLOCK)


def steady_time() -> float:
    """Seconds since the epoch: by the wall clock as it was when this process began to ask."""
    return _OFFSET_S + time.clock_gettime(_CLOCK)
