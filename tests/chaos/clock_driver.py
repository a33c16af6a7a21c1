"""Trains a project while the wall clock of all its Python processes jumps, and two are killed.

    python -m tests.chaos.clock_driver PROJECT CLOCK RESULT

CLOCK holds the seconds by which the clock is off, for the `sitecustomize` of test_chaos_clock.
"""

import json
import sys
from pathlib import Path

from eagleray.actors.chaos import ChaosPlan, Injector
from eagleray.actors.trainer.progress import Progress
from eagleray.project import Project

HOUR_S = 3600.0
# Forth in an attempt, at once after a kill, and far back after the next one.
JUMPS = ((30, HOUR_S), (60, 30 * HOUR_S), (100, -20 * HOUR_S), (150, 0.0))
KILLS = ((60, "process"), (100, "gang"))


def main(folder: Path, clock: Path, result: Path) -> None:
    """Train, and write what came out."""
    project = Project.load(folder, ["train.max_failures=3", "train.spares=1"])
    faults = [{"role": role, "step": step} for step, role in KILLS]
    injector, jumps = Injector(ChaosPlan.model_validate({"faults": faults})), list(JUMPS)

    def follow(run_id: str, progress: Progress) -> None:
        injector(run_id, progress)
        while jumps and progress.rows and progress.rows[-1].step >= jumps[0][0]:
            clock.write_text(str(jumps.pop(0)[1]))

    run = project.train(follow)
    assert run.model is not None
    found = {
        "run_id": run.run_id, "steps": run.steps, "samples": run.samples, "missing": run.missing,
        "doubled": run.doubled, "artifact": run.model.artifact, "eval_loss": run.eval_loss,
        "attempts": run.attempts, "fired": len(injector.fired), "jumps_left": len(jumps),
    }  # fmt: skip
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
