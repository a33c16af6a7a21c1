"""A training process whose address space is limited from a step on; prints how its attempts end.

python -m tests.unit.trainer.starved_process FOLDER STEP
"""

import json
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.unit.trainer.test_train_loop import (
    MODEL,
    FakeBatch,
    FakeSource,
    ListReporter,
    StoreSink,
    config,
)

from eagleray.actors.checkpoint.store import CheckpointStore
from eagleray.actors.trainer.loop import RankTrainer
from eagleray.actors.trainer.process import TrainProcess
from eagleray.actors.trainer.recorder import Fatal
from eagleray.actors.trainer.run_actors import RunActors
from eagleray.actors.trainer.seams import LoopSpec, Seat
from eagleray.actors.trainer.seating import Plan
from eagleray.platform.config import CheckpointConfig
from eagleray.platform.storage import Storage

STEPS, BATCH, SEQ_LEN, VOCAB = 5, 32, 8, 64_000
# Less than the logits of a micro-batch, which are 65.5 MB.
_ROOM_BYTES = 50_000_000


def limit(room_bytes: int | None) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize()
    most = resource.RLIM_INFINITY if room_bytes is None else size + room_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


class LimitedSource(FakeSource):
    """Takes memory away when a step is asked for."""

    def __init__(self, limited_at: int | None) -> None:
        super().__init__(BATCH)
        self._limited_at = limited_at

    def batch(self, step: int, rank: int, world_size: int, mixture: object = None) -> FakeBatch:
        if step == self._limited_at:
            limit(_ROOM_BYTES)
        return super().batch(step, rank, world_size)


class Fatals:
    """Hears of fatal failures, as the recorder does."""

    def __init__(self) -> None:
        self.fatal: Fatal | None = None

    def ask(self, method: str, *args: Any) -> Any:
        if method == "fail":
            (self.fatal,) = args
        return None


@dataclass
class Untold:
    """Stands for the gang."""

    def __getattr__(self, name: str) -> "Untold":
        return self

    def remote(self, *_: object) -> None:
        """Nobody hears."""


class Process(TrainProcess):
    """A training process with a source and a store of its own."""

    limited_at: int | None = None

    def __init__(self, spec: LoopSpec, folder: Path) -> None:
        gang = Untold()
        super().__init__(spec, RunActors(gang, gang, {}, None, "r", None), gang, folder / "stacks")
        self._store = CheckpointStore(Storage(folder), "r", CheckpointConfig())
        self.fatals = self._recorder = Fatals()  # type: ignore[assignment]
        self.reporter = ListReporter()

    def _train(self, trainer: RankTrainer, plan: Plan) -> None:
        source = LimitedSource(self.limited_at)
        trainer.run(plan.seat, source, StoreSink(self._store), self.reporter)

    def close(self) -> None:
        self._store.close()


def main(folder: Path, limited_at: int) -> None:
    train = config(
        steps=STEPS, batch_size=BATCH, micro_batch_size=BATCH, **{"eval.num_batches": 1}
    )  # fmt: skip
    process = Process(LoopSpec(train, replace(MODEL, vocab_size=VOCAB), SEQ_LEN), folder)
    attempts = []
    for at in (limited_at, None):
        process.limited_at = at
        outcome = process.run(Plan(Seat()), None)
        limit(None)
        fatal = process.fatals.fatal
        attempts.append(
            {
                "end": outcome.end.name,
                "message": outcome.message,
                "standing": outcome.standing and outcome.standing.applied,
                "fatal": fatal and fatal.what,
                "fix": fatal and fatal.fix,
                "step": process.reporter.rows[-1].step if process.reporter.rows else 0,
            }
        )
    process.close()
    print(json.dumps(attempts))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
