"""Progress without what makes it: whoever draws it need not load torch."""

from dataclasses import dataclass

from eagleray.actors.trainer.recorder import WorkerInfo
from eagleray.actors.trainer.step_row import StepRow


@dataclass(frozen=True)
class Progress:
    """What a follower of a run sees."""

    rows: tuple[StepRow, ...]
    attempt: int
    workers: tuple[WorkerInfo, ...]
    first_row_at: dict[int, float]

    @classmethod
    def none(cls) -> "Progress":
        """Nothing yet."""
        return cls((), 0, (), {})
