"""How a budget is cut into segments, and what fits into it at once."""

from collections.abc import Sequence

from eagleray.actors.cache.frame import OVERHEAD_BYTES
from eagleray.actors.cache.segment_folder import HEADER_BYTES
from eagleray.actors.cache.segment_index import Geometry
from eagleray.platform.errors import InfeasibleError

MIB = 1 << 20
_ALIGN = 32


class WorkingSetError(InfeasibleError):
    """What should be held at once is more than the budget."""

    def __init__(self, needed_bytes: int, max_bytes: int, setting: str) -> None:
        super().__init__(
            f"values to hold at once need {needed_bytes} bytes, {setting} is {max_bytes}",
            f"set {setting} to at least {needed_bytes}",
        )
        self.args = (needed_bytes, max_bytes, setting)
        self.needed_bytes, self.max_bytes, self.setting = needed_bytes, max_bytes, setting


def geometry_for(max_bytes: int, segment_bytes: int | None) -> Geometry:
    """How a budget is cut: into segments of a size, or of the usual one."""
    usual = min(max_bytes // 4, max(8 * MIB, min(64 * MIB, max_bytes // 16)))
    return Geometry(max_bytes, segment_bytes or usual)


def check_fits(
    sizes: Sequence[int], geometry: Geometry, segment_bytes: int | None, setting: str
) -> None:
    """Refuse values that cannot all be pinned at once.

    Args:
        sizes: Of the values, in bytes.
        geometry: What there is.
        segment_bytes: Whether a larger budget would have segments of this size, or the usual one.
        setting: What sets the budget.

    Raises:
        WorkingSetError: They and a segment to write into are more than the budget.
    """
    if _fit(sizes, geometry):
        return
    needed = max(sum(sizes), geometry.max_bytes)
    # A value that is larger than a segment needs larger ones.
    is_small = HEADER_BYTES + aligned(max(sizes) + OVERHEAD_BYTES) <= geometry.segment_bytes
    kept_bytes = segment_bytes if is_small else None
    while not _fit(sizes, geometry_for(needed, kept_bytes)):
        needed += needed // 16 + MIB
    raise WorkingSetError(needed, geometry.max_bytes, setting)


def aligned(num_bytes: int) -> int:
    """What a frame of so many bytes takes in a segment."""
    return -(-num_bytes // _ALIGN) * _ALIGN


def _fit(sizes: Sequence[int], geometry: Geometry) -> bool:
    """Whether values fit into all segments but one, however they follow one another."""
    largest = max((aligned(size + OVERHEAD_BYTES) for size in sizes), default=0)
    # At the end of each segment there may be a gap in which the next value found no room.
    room = geometry.segment_bytes - HEADER_BYTES - largest + _ALIGN
    total = sum(aligned(size + OVERHEAD_BYTES) for size in sizes)
    return room > 0 and total <= room * (geometry.num_segments - 1)
