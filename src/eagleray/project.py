"""The Python API: a project, and what can be done with it.

    project = eagleray.Project.load("my-project", ["train.steps=500"])
    run = project.train()
    print(run.model.spec, run.eval_loss)

Every method that needs a cluster uses the one in reach (see platform/cluster.py), or starts a
private one and stops it after. The command line is a thin layer over this class.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagleray.platform.config import (
    CONFIG_NAME,
    LoadedConfig,
    ProjectConfig,
    load_config,
    resolved_json,
    validated,
)
from eagleray.platform.errors import DataError, NotFoundError, UsageError
from eagleray.platform.gate import judge
from eagleray.platform.interruption import interruption_deferred
from eagleray.platform.ledger import Ledger
from eagleray.platform.registry import DEFAULT_ALIAS, ModelVersion, Registry
from eagleray.platform.runs import RunState, RunStatus, RunStore
from eagleray.platform.storage import Storage

if TYPE_CHECKING:
    from eagleray.actors.data.dataset import Dataset
    from eagleray.actors.data.recipe import BuildProgress
    from eagleray.actors.trainer.progress import Progress
    from eagleray.tune.history import SweepHistory
    from eagleray.tune.sweep import SweepResult


@dataclass(frozen=True)
class TrainedRun:
    """A training run that reached its end."""

    run_id: str
    steps: int
    model: ModelVersion | None
    eval_loss: float | None
    samples: int
    missing: int
    doubled: int
    attempts: int
    seconds: float
    skipped_steps: int = 0
    """Steps whose update was skipped, as loss or gradient was not finite."""


class Project:
    """A project's file, its storage, and the acts on it."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self.loaded = loaded
        self.storage = Storage(loaded.storage_path)

    @classmethod
    def load(cls, path: Path | str = CONFIG_NAME, overrides: Sequence[str] = ()) -> Project:
        """Read eagleray.yaml and lay `a.b=value` overrides over it.

        `tune.best=last` (or a sweep's id) lays that sweep's best trial over the file, beneath the
        other overrides.

        Raises:
            ConfigError: The file or an override breaks rules; all are listed.
        """
        project = cls(load_config(path, overrides))
        best = project.config.tune.best
        if best is None:
            return project
        from eagleray.tune.history import best_overrides

        # JSON is YAML, and keeps null, texts and lists what they are.
        chosen = [
            f"{key}={json.dumps(value)}"
            for key, value in best_overrides(project.storage, best).items()
        ]
        return cls(load_config(path, [*chosen, *overrides]))

    @property
    def config(self) -> ProjectConfig:
        """The validated configuration."""
        return self.loaded.config

    @property
    def runs(self) -> RunStore:
        """The project's runs."""
        return RunStore(self.storage)

    @property
    def registry(self) -> Registry:
        """The project's models."""
        return Registry(self.storage)

    @property
    def ledger(self) -> Ledger:
        """The project's records."""
        return Ledger(self.storage)

    def build_data(self, on_progress: Callable[[BuildProgress], None] | None = None) -> Dataset:
        """Turn the raw files into verified shards; at once if that was done before.

        A build that was interrupted goes on where it stopped. A large corpus takes a cluster.

        Raises:
            DataError: The data cannot be used; the message names file and line.
        """
        from eagleray.actors.data.build import build_dataset
        from eagleray.platform.cluster import session

        if not self.config.data.sources:
            raise UsageError(
                "data.sources is empty", "name a file, folder or glob in eagleray.yaml"
            )
        self.storage.probe()
        return build_dataset(
            self.config.data,
            self.loaded.resolve,
            self.storage,
            on_progress,
            lambda: session(self.loaded),
        )

    def train(
        self,
        on_progress: Callable[[str, Progress], None] | None = None,
        on_data: Callable[[BuildProgress], None] | None = None,
    ) -> TrainedRun:
        """Build the data if need be, train, and register the model.

        Raises:
            UsageError: The data are rows of numbers.
            RunFailedError: The run failed; it can be resumed.
            InfeasibleError: The cluster cannot hold the workers.
        """
        from eagleray.actors.data.mixing import mixture_for

        self._check_is_text("train")
        dataset, train = self.build_data(on_data), self.config.train
        # What the mixture cannot give is refused before there is a run.
        mixture_for(self.config.data, dataset, train.batch_size, train.steps)
        run_id = self.runs.create(
            self.config.name, "train", resolved_json(self.config), self.config.train.steps
        )
        return self._run(run_id, dataset, on_progress)

    def resume(
        self, run_id: str, on_progress: Callable[[str, Progress], None] | None = None
    ) -> TrainedRun:
        """Go on with a run from its newest intact checkpoint, with the configuration it had.

        Raises:
            NotFoundError: There is no such run.
            UsageError: It is finished, is not a training run, or another process drives it.
            DataError: Its data set is gone, and the raw files are no longer what they were.
        """
        resumed = self._resumable(run_id, "train")
        return resumed._run(run_id, resumed._dataset_of(run_id), on_progress)

    def check_resumable(self, run_id: str) -> None:
        """Refuse what `resume` would refuse at once; raises as it does."""
        self._resumable(run_id, "train")

    def tune(
        self,
        on_progress: Callable[[SweepHistory], None] | None = None,
        on_data: Callable[[BuildProgress], None] | None = None,
        *,
        resume: str | None = None,
    ) -> SweepResult:
        """Search `tune.space`; every trial is a run. `resume` is the id of an interrupted sweep.

        Raises:
            UsageError: The space is empty, there is nothing to resume, or the data are rows of
                numbers.
            InfeasibleError: The cluster cannot hold a trial.
            RunFailedError: No trial brought a value.
        """
        from eagleray.platform.cluster import Demand, session
        from eagleray.tune.history import SweepHistory
        from eagleray.tune.space import check_space

        project = self if resume is None else self._resumable(resume, "sweep")
        project._check_is_text("tune")
        check_space(project.config)
        dataset = project.build_data(on_data) if resume is None else project._dataset_of(resume)
        sweep_id = resume or self.runs.create(
            f"{self.config.name}-sweep", "sweep", resolved_json(project.config)
        )
        train = project.config.train
        need = Demand(1, train.cpus_per_worker, train.gpus_per_worker, "trial")
        observe = on_progress or (lambda _: None)
        with (
            self.runs.claim(sweep_id),
            _recorded(self.runs, sweep_id),
            _trials_ended(self.runs, sweep_id),
        ):
            observe(SweepHistory(self.runs, sweep_id))  # So that it is known which sweep starts.
            with session(self.loaded, need, meanwhile=_import_sweep) as cluster:
                from eagleray.tune.sweep import run_sweep

                # Tune itself waits without end for what is never free.
                cluster.wait_for_resources(need)
                self._note_dataset(sweep_id, dataset)
                with interruption_deferred() as raise_waiting:
                    return run_sweep(
                        self.storage, project.config, dataset, sweep_id, observe, raise_waiting
                    )

    def promote(self, version: ModelVersion, alias: str = DEFAULT_ALIAS) -> None:
        """Point an alias at a model, if the gate that `eval` describes lets it through.

        Raises:
            GateRefusedError: It does not; nothing changed.
        """
        rules = self.config.eval
        self.registry.promote(
            version,
            alias,
            lambda new, old: judge(new.metrics, old.metrics if old else None, rules),
        )

    def state(self, run_id: str) -> RunState:
        """Where a run stands."""
        return self.runs.state(run_id)

    def _check_is_text(self, verb: str) -> None:
        if self.config.data.features is not None:
            raise UsageError(
                f"`eagleray {verb}` trains a language model on tokens, and data.features makes "
                "rows of numbers",
                "train a model of your own on them through eagleray.actors.data.BatchStream "
                "(docs/data.md#numbers-instead-of-text), or remove data.features",
            )

    def _resumable(self, run_id: str, kind: str) -> Project:
        state = self.runs.state(run_id)
        if state.kind != kind:
            raise UsageError(f"run {run_id} is a {state.kind}, not a {kind}", "see `eagleray ps`")
        if state.status is RunStatus.FINISHED:
            verb = "tune" if kind == "sweep" else kind
            raise UsageError(f"run {run_id} is finished", f"start a new one: eagleray {verb}")
        return self._as_saved(run_id)

    def _note_dataset(self, run_id: str, dataset: Dataset) -> None:
        if self._noted_dataset(run_id) is None:
            self.runs.add_event(run_id, "dataset", digest=dataset.digest)

    def _noted_dataset(self, run_id: str) -> str | None:
        events = (e for e in self.runs.events(run_id) if e["event"] == "dataset")
        return next((str(event["digest"]) for event in events), None)

    def _dataset_of(self, run_id: str) -> Dataset:
        """The data set that a run began with, whatever became of the raw files since."""
        from eagleray.actors.data.dataset import Dataset

        digest = self._noted_dataset(run_id)
        if digest is not None:
            with suppress(NotFoundError):
                return Dataset.open(self.storage, digest)
        built = self.build_data()
        if digest not in (None, built.digest):
            raise DataError(
                f"run {run_id} began with data set {digest}, which is gone, and data.sources now "
                f"give {built.digest}",
                "restore the raw files or the data set, or start a new run",
            )
        return built

    def _as_saved(self, run_id: str) -> Project:
        saved = self.runs.config(run_id)
        # Addresses and secrets are this machine's, not the run's.
        saved.update(
            redis=self.config.redis.model_dump(), cluster=self.config.cluster.model_dump(),
            storage=self.config.storage.model_dump(),
        )  # fmt: skip
        config = validated(saved, f"the saved configuration of run {run_id}")
        return Project(LoadedConfig(config, self.loaded.root))

    def _run(
        self,
        run_id: str,
        dataset: Dataset,
        on_progress: Callable[[str, Progress], None] | None,
    ) -> TrainedRun:
        from eagleray.actors.trainer.progress import Progress
        from eagleray.platform.cluster import Demand, session
        from eagleray.platform.model.config import DecoderConfig

        train, started = self.config.train, time.monotonic()
        model = DecoderConfig.from_section(self.config.model, dataset.vocab_size)
        attempts = 0

        def follow(progress: Progress) -> None:
            nonlocal attempts
            attempts = max(attempts, progress.attempt)
            if on_progress is not None:
                on_progress(run_id, progress)

        need = Demand(
            train.worker_range[0], train.cpus_per_worker, train.gpus_per_worker, "training worker"
        )
        with ExitStack() as stack:
            stack.enter_context(self.runs.claim(run_id))
            stack.enter_context(_recorded(self.runs, run_id))
            follow(Progress.none())  # So that it is known which run starts.
            cluster = stack.enter_context(session(self.loaded, need, meanwhile=_import_trainer))
            redis_url = stack.enter_context(self._redis())
            from eagleray.actors.data.mixing import mixer_spec
            from eagleray.actors.trainer.finish import finish_run
            from eagleray.actors.trainer.seams import LoopSpec
            from eagleray.actors.trainer.trainer import Training

            spec = LoopSpec(train, model, dataset.seq_len, mixer_spec(self.config.data, dataset))
            cluster.wait_for_resources(need)
            self._note_dataset(run_id, dataset)
            training = Training(self.config, self.storage, run_id, spec, dataset, redis_url)
            try:
                training.start()
                training.wait(follow)
            finally:
                training.close()
            name = train.register_as or self.config.name
            finished = finish_run(
                self.storage, self.config, run_id, dataset, model, register_as=name
            )
        seen = finished.audit
        run = TrainedRun(
            run_id, seen.steps, finished.model, finished.eval_loss, seen.samples, seen.missing,
            seen.doubled, attempts, time.monotonic() - started, finished.skipped_steps,
        )  # fmt: skip
        self.runs.update(
            run_id,
            status=RunStatus.FINISHED,
            step=run.steps,
            results=_results(run, finished.record),
        )
        return run

    @contextmanager
    def _redis(self) -> Iterator[str | None]:
        from eagleray.platform.redis_server import RedisServer

        folder = self.storage.path("redis")
        server = (
            RedisServer.start(self.config.redis, folder) if self.config.data.cache.enabled else None
        )
        try:
            yield server.url if server else None
        finally:
            if server:
                server.stop()


def _import_trainer() -> None:
    """Seconds, most of them torch's and Ray Train's."""
    importlib.import_module("eagleray.actors.trainer.trainer")


def _import_sweep() -> None:
    importlib.import_module("eagleray.tune.sweep")


@contextmanager
def _recorded(runs: RunStore, run_id: str) -> Iterator[None]:
    """Let a run's state say how it ended, whatever happens."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        runs.update(run_id, status=RunStatus.STOPPED, message="interrupted")
        raise
    except BaseException as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        runs.update(run_id, status=RunStatus.FAILED, message=reason[:500])
        raise


@contextmanager
def _trials_ended(runs: RunStore, sweep_id: str) -> Iterator[None]:
    """Let no trial's state say that it runs once the cluster that it ran on is gone."""
    from eagleray.tune.history import SweepHistory

    try:
        yield
    except BaseException:  # Raised on below; also at Ctrl-C, which is what this is for.
        for trial in SweepHistory(runs, sweep_id).unfinished():
            if runs.state(trial.run_id).status is RunStatus.RUNNING:
                message = f"go on with: eagleray tune --resume {sweep_id}"
                runs.update(trial.run_id, status=RunStatus.STOPPED, message=message)
        raise


def _results(run: TrainedRun, record: str) -> dict[str, Any]:
    return {
        "eval_loss": run.eval_loss,
        "model": run.model.spec if run.model else None,
        "record": record,
        "samples": run.samples,
        "missing": run.missing,
        "doubled": run.doubled,
        "attempts": run.attempts,
        "seconds": run.seconds,
        "skipped_steps": run.skipped_steps,
    }
