"""A sweep on Ray Tune: who is suggested, who goes on, what is kept, how it is resumed.

Ray must be connected. Tune runs the trials; our searcher and scheduler are thin: both read and
write one `SweepHistory`, and the decisions are pure functions of it. After the driver's death the
same sweep id goes on: unfinished trials are resumed first, from their checkpoints.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from ray import tune
from ray.tune import Callback, FailureConfig, RunConfig
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from eagleray.actors.data.dataset import Dataset
from eagleray.actors.trainer.finish import finish_run, record_dataset
from eagleray.platform.code import code_identity
from eagleray.platform.config import AshaConfig, ProjectConfig, config_digest, resolved_json
from eagleray.platform.errors import IntegrityError, NotFoundError, RunFailedError
from eagleray.platform.ledger import Ledger
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.runs import RunStatus, RunStore
from eagleray.platform.storage import Storage
from eagleray.tune.history import SweepHistory, Trial, TrialStatus
from eagleray.tune.pruning import rungs, should_stop
from eagleray.tune.search import GpSearch
from eagleray.tune.space import trial_config
from eagleray.tune.trial import METRIC, STEPS, TrialSpec, run_trial

logger = logging.getLogger(__name__)

_ENDS = {
    TrialStatus.FINISHED: RunStatus.FINISHED,
    TrialStatus.PRUNED: RunStatus.STOPPED,
    TrialStatus.DIVERGED: RunStatus.FAILED,
    TrialStatus.FAILED: RunStatus.FAILED,
}
Observer = Callable[[SweepHistory], None]


@dataclass(frozen=True)
class SweepResult:
    """A sweep that reached its end."""

    sweep_id: str
    record: str
    best: Trial
    trials: tuple[Trial, ...]


_TELL_S = 1.0


class _Searcher(Searcher):
    """Hands Tune the next trial: a left-behind one first, then what the model suggests."""

    def __init__(
        self,
        history: SweepHistory,
        runs: RunStore,
        config: ProjectConfig,
        search: GpSearch,
        observe: Observer,
    ) -> None:
        super().__init__(metric=METRIC, mode="min")
        self._observe = observe
        self._history, self._runs, self._config, self._search = history, runs, config, search
        self._left_behind = history.unfinished()
        self.numbers: dict[str, int] = {}

    def suggest(self, trial_id: str) -> Any:
        if self._left_behind:
            trial = self._left_behind.pop(0)
        elif len(self._history.trials) >= self._config.tune.num_trials:
            return Searcher.FINISHED
        else:
            params = self._search.suggest(self._history)
            config = trial_config(self._config, params)
            run_id = self._runs.create(
                self._config.name, "trial", resolved_json(config), config.train.steps
            )
            trial = self._history.suggest(run_id, params)
        self.numbers[trial_id] = trial.number
        return {"run_id": trial.run_id, "params": trial.params}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        if trial_id in self.numbers:
            status = TrialStatus.FAILED if error else TrialStatus.FINISHED
            self._history.end(self.numbers[trial_id], status)
            self._observe(self._history)

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles what it is given, for a restore that we never use; an observer may hold a
        # screen.
        return {**vars(self), "_observe": None}

    # The history is on storage already, so there is nothing to save for Tune.
    def save(self, checkpoint_path: str) -> None:
        pass

    def restore(self, checkpoint_path: str) -> None:
        pass


class _Scheduler(FIFOScheduler):
    """Stops trials by `should_stop`."""

    def __init__(
        self,
        history: SweepHistory,
        numbers: dict[str, int],
        asha: AshaConfig | None,
        max_steps: int,
        observe: Observer,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._history, self._numbers, self._asha = history, numbers, asha
        self._max_steps, self._observe = max_steps, observe

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_observe": None}

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        number = self._numbers[trial.trial_id]
        self._history.report(number, result[STEPS], result[METRIC])
        decision = self._decide(number)
        self._observe(self._history)
        return decision

    def _decide(self, number: int) -> str:
        if self._history.trials[number].status is TrialStatus.DIVERGED:
            return str(self.STOP)
        if self._asha and should_stop(self._history, number, self._asha, self._max_steps):
            self._history.end(number, TrialStatus.PRUNED)
            return str(self.STOP)
        return str(self.CONTINUE)


class _SafePlace(Callback):
    """Between two steps of Tune's loop, several times a second: there an interruption may raise.

    Elsewhere it might hit a C function of the search, which drops it. The observer is told here
    too, as trials may train long between two reports.
    """

    def __init__(self, raise_waiting: Callable[[], None], observe: Callable[[], None]) -> None:
        self._raise_waiting, self._observe = raise_waiting, observe
        self._told_s = time.monotonic()

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._raise_waiting()
        if time.monotonic() - self._told_s > _TELL_S:
            self._told_s = time.monotonic()
            self._observe()

    def __getstate__(self) -> dict[str, Any]:
        return {}


def run_sweep(
    storage: Storage,
    config: ProjectConfig,
    dataset: Dataset,
    sweep_id: str,
    observe: Observer = lambda _: None,
    raise_waiting: Callable[[], None] = lambda: None,
) -> SweepResult:
    """Run a sweep to its end, or the rest of one that was interrupted.

    Args:
        storage: The project's storage.
        config: The resolved project; `tune.space` says what varies.
        dataset: What the trials train on.
        sweep_id: A run that `RunStore.create` made for the sweep.
        observe: Told at the start and after each report.
        raise_waiting: From `interruption_deferred`; called where an interruption does no harm.

    Raises:
        RunFailedError: No trial brought a value, or Tune ended before all of them had.
    """
    runs = RunStore(storage)
    history = SweepHistory(runs, sweep_id)
    full = trial_config(config, {}).train.steps
    asha = config.tune.asha
    levels = [*(rungs(asha, full) if asha else []), full]
    first = {path: _value(config, path) for path in config.tune.space}
    search = GpSearch(
        config.tune.space, config.tune.startup_trials, config.tune.seed, levels, first
    )
    searcher = _Searcher(history, runs, config, search, observe)
    remaining = config.tune.num_trials - len(history.trials) + len(history.unfinished())
    runs.update(sweep_id, status=RunStatus.RUNNING)
    observe(history)
    if remaining > 0:
        spec = TrialSpec(storage.root, config, dataset.digest)
        _fit(storage, config, sweep_id, searcher, remaining, spec,
             _Scheduler(history, searcher.numbers, asha, full, observe),
             _SafePlace(raise_waiting, lambda: observe(history)))  # fmt: skip
    ended = len(history.trials) - len(history.unfinished())
    if ended < config.tune.num_trials:
        raise RunFailedError(
            f"sweep {sweep_id} stopped after {ended} of {config.tune.num_trials} trials",
            f"go on with: eagleray tune --resume {sweep_id}",
        )
    best = history.best()
    if best is None:
        failed = ", ".join(f"{t.run_id} {t.status.value}" for t in history.trials)
        raise RunFailedError(
            f"no trial of sweep {sweep_id} brought a value: {failed}", "see its runs"
        )
    record = _record(storage, config, dataset, history, best)
    runs.update(
        sweep_id,
        status=RunStatus.FINISHED,
        results={"best": best.params, "value": best.value, "run": best.run_id, "record": record},
    )
    return SweepResult(sweep_id, record, best, tuple(history.trials))


def _fit(
    storage: Storage,
    config: ProjectConfig,
    sweep_id: str,
    searcher: _Searcher,
    remaining: int,
    spec: TrialSpec,
    scheduler: _Scheduler,
    safe_place: "_SafePlace",
) -> None:
    train = config.train
    resources = {"cpu": train.cpus_per_worker, "gpu": train.gpus_per_worker}
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(run_trial, spec=spec), resources),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=scheduler,
            num_samples=remaining,
            max_concurrent_trials=config.tune.max_concurrent,
            # A trial's process starts in seconds, most of it imports: the next trial takes it over.
            reuse_actors=True,
        ),
        run_config=RunConfig(
            name=f"tune-{int(time.time())}",
            storage_path=str(storage.path("runs", sweep_id, "ray")),
            failure_config=FailureConfig(max_failures=0),
            callbacks=[safe_place],
            verbose=0,
        ),
    )
    # Tune's own tables would break the progress bar; the newer printer ignores `verbose`. Its
    # handler of Ctrl-C would let `fit` return as if the sweep were over.
    os.environ.update(RAY_AIR_NEW_OUTPUT="0", TUNE_DISABLE_SIGINT_HANDLER="1")
    tuner.fit()


def _record(
    storage: Storage,
    config: ProjectConfig,
    dataset: Dataset,
    history: SweepHistory,
    best: Trial,
) -> str:
    runs, ledger = RunStore(storage), Ledger(storage)
    inputs = {
        "dataset": record_dataset(storage, dataset),
        "config": ledger.put("config", {"digest": config_digest(config), **resolved_json(config)}),
        "code": ledger.put("code", code_identity()),
    }
    for trial in history.trials:
        record = _trial_record(storage, config, dataset, trial, runs)
        if record is not None:
            inputs[f"trial-{trial.number:04d}"] = record
    body = {
        "sweep_id": history.sweep_id,
        "best": {"number": best.number, "params": best.params, "value": best.value},
        "trials": [
            {"number": t.number, "run": t.run_id, "params": t.params, "status": t.status.value,
             "values": {str(steps): value for steps, value in sorted(t.values.items())}}
            for t in history.trials
        ],
    }  # fmt: skip
    return ledger.put("sweep", body, inputs)


def _trial_record(
    storage: Storage, config: ProjectConfig, dataset: Dataset, trial: Trial, runs: RunStore
) -> str | None:
    """The record of a trial's run; one without an intact checkpoint has none."""
    state = runs.state(trial.run_id)
    if "record" in state.results:
        return str(state.results["record"])
    project = trial_config(config, trial.params)
    model = DecoderConfig.from_section(project.model, dataset.vocab_size)
    # A trial that was cut, or whose process died, could not say so itself.
    message = state.message or trial.status.value
    runs.update(trial.run_id, status=_ENDS[trial.status], message=message)
    try:
        finished = finish_run(storage, project, trial.run_id, dataset, model, register_as=None)
    except (RunFailedError, NotFoundError, IntegrityError) as error:
        # One that was cut may have ended before its first checkpoint.
        level = logging.WARNING if trial.status is TrialStatus.FINISHED else logging.INFO
        logger.log(level, "trial has no record number=%d: %s", trial.number, error.what)
        return None
    runs.update(trial.run_id, results={"record": finished.record})
    return finished.record


def _value(config: ProjectConfig, path: str) -> Any:
    try:
        return reduce(getattr, path.split("."), config)
    except AttributeError:
        return None
