"""One trial of a sweep: the ordinary training loop in the trial's own process, with one worker.

A trial is a run: it has a record, checkpoints and a lineage, and a restarted one goes on from its
newest checkpoint. The global batch is the project's, so values carry over to a run on many workers.
"""

import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune

from eagleray.actors.checkpoint.state import Checkpoint, Snapshot
from eagleray.actors.checkpoint.store import CheckpointStore
from eagleray.actors.data.dataset import Dataset
from eagleray.actors.data.loader import Loader
from eagleray.actors.data.mixing import mixer_spec, mixture_for
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.telemetry import RaySink
from eagleray.actors.trainer.finish import finish_run
from eagleray.actors.trainer.loop import run_loop
from eagleray.actors.trainer.non_finite import NonFiniteLossError, Poison
from eagleray.actors.trainer.recorder import RunRecorder
from eagleray.actors.trainer.seams import LoopSpec, Seat
from eagleray.actors.trainer.step_row import StepRow
from eagleray.platform.config import ProjectConfig
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.runs import RunStatus, RunStore
from eagleray.platform.storage import Storage
from eagleray.tune.space import trial_config

METRIC, STEPS = "value", "steps"


@dataclass(frozen=True)
class TrialSpec:
    """What every trial of a sweep shares."""

    storage_root: Path
    config: ProjectConfig
    dataset: str


def run_trial(config: dict[str, Any], spec: TrialSpec) -> None:
    """Ray Tune's entry point of a trial; `config` holds `run_id` and `params`."""
    storage = Storage(spec.storage_root)
    runs, run_id = RunStore(storage), config["run_id"]
    project = trial_config(spec.config, config["params"])
    dataset = Dataset.open(storage, spec.dataset)
    model = DecoderConfig.from_section(project.model, dataset.vocab_size)
    loader = Loader(
        dataset, "train", project.data.order_seed, project.train.batch_size, None,
        project.data.prefetch_batches,
        mixture_for(project.data, dataset, project.train.batch_size, project.train.steps),
        fetchers=project.data.fetchers,
    )  # fmt: skip
    recorder = RunRecorder(runs, run_id, sink=RaySink())
    reporter = _Reporter(recorder)
    store = CheckpointStore(storage, run_id, project.train.checkpoint, lambda *_, **__: None)
    try:
        done = run_loop(
            Seat(),
            LoopSpec(project.train, model, dataset.seq_len, mixer_spec(project.data, dataset)),
            _Source(loader),
            _Sink(store),
            reporter,
        )
    except NonFiniteLossError as error:
        runs.update(run_id, status=RunStatus.FAILED, message=error.what)
        tune.report({METRIC: float("nan"), STEPS: error.step + 1})
        return
    except Exception as error:
        # The first line, for `eagleray ps`; Tune keeps the whole.
        runs.update(run_id, status=RunStatus.FAILED, message=str(error).split("\n", 1)[0][:500])
        raise
    finally:
        loader.close()
        # The process may go on with another trial, and this one's state must not stay in it.
        store.close()
    finished = finish_run(storage, project, run_id, dataset, model, register_as=None)
    runs.update(
        run_id,
        status=RunStatus.FINISHED,
        step=done,
        results={"eval_loss": finished.eval_loss, "record": finished.record},
    )
    if not reporter.has_told and finished.eval_loss is not None:
        # Resumed after its last step: what the sweep did not hear before the driver died.
        tune.report({METRIC: finished.eval_loss, STEPS: done})


class _Source:
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def batch(self, step: int, rank: int, world_size: int, mixture: Mixture | None) -> Any:
        return self._loader.batch(step, mixture)

    def eval_batch(self, index: int) -> Any:
        return self._loader.eval_batch(index).tokens


class _Sink:
    def __init__(self, store: CheckpointStore) -> None:
        self._store = store

    def begin(self, attempt: int) -> Checkpoint | None:
        return self._store.begin(attempt)

    def renew(self, attempt: int) -> int:
        return self._store.renew(attempt)

    def submit(self, snapshot: Snapshot) -> int:
        return self._store.submit(snapshot)

    def settle(self) -> None:
        """Parts are taken at once."""

    def flush(self) -> None:
        self._store.flush()


class _Reporter:
    def __init__(self, recorder: RunRecorder) -> None:
        self._recorder = recorder
        self.has_told = False

    def begin(self, rank: int, world_size: int) -> int:
        return self._recorder.begin(world_size, uuid.uuid4().hex)

    def join(self, attempt: int, rank: int) -> None:
        """Tune knows where its trials run."""

    def started(self, attempt: int, step: int) -> None:
        self._recorder.event("start", {"attempt": attempt, "step": step})

    def skipped(self, poison: Poison) -> None:
        self._recorder.skipped(poison)

    def rewound(self, poison: Poison, to_step: int) -> None:
        self._recorder.rewound(poison, to_step)

    def rewinds(self) -> list[Poison]:
        return self._recorder.rewinds()

    def report(self, row: StepRow) -> str | None:
        reason = self._recorder.report(row)
        if row.eval_loss is not None:
            self.has_told = True
            # Returns when Tune has taken it; a pruned trial does not come back from here.
            tune.report({METRIC: row.eval_loss, STEPS: row.step})
        return reason
