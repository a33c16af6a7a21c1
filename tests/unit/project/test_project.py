"""The project: what a run goes on with when it is resumed, and how it is told that it ended."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from eagleray.platform.config import ConfigError, resolved_json
from eagleray.platform.errors import DataError, UsageError
from eagleray.platform.runs import RunStatus
from eagleray.project import Project, _recorded

CONFIG = """\
name: tiny
storage: {uri: store}
data: {sources: [{path: docs.jsonl}], tokenizer: {vocab_size: 300}, seq_len: 16, eval_fraction: 0.2}
"""


def write_documents(folder: Path, seed: int) -> None:
    draw = random.Random(seed)
    texts = (" ".join(draw.choices(["union", "states", "people"], k=60)) for _ in range(40))
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "eagleray.yaml").write_text(CONFIG)
    write_documents(tmp_path, 1)
    return Project.load(tmp_path)


def test_a_resumed_run_keeps_its_data_when_the_raw_files_changed(project: Project) -> None:
    began = project.build_data()
    run_id = project.runs.create("tiny", "train", {})
    project._note_dataset(run_id, began)
    write_documents(project.loaded.root, 2)
    assert project.build_data().digest != began.digest
    assert project._dataset_of(run_id).digest == began.digest
    project.storage.remove("datasets", began.digest)
    with pytest.raises(DataError, match=f"began with data set {began.digest}"):
        project._dataset_of(run_id)
    write_documents(project.loaded.root, 1)
    assert project._dataset_of(run_id).digest == began.digest


def test_only_unfinished_runs_of_the_kind_are_resumed(project: Project) -> None:
    sweep, run = (project.runs.create("tiny", kind, {}) for kind in ("sweep", "train"))
    with pytest.raises(UsageError, match="is a sweep, not a train"):
        project.resume(sweep)
    with pytest.raises(UsageError, match="is a train, not a sweep"):
        project.tune(resume=run)
    project.runs.update(run, status=RunStatus.FINISHED)
    with pytest.raises(UsageError, match="is finished"):
        project.resume(run)


def test_a_run_that_another_version_saved_is_refused_with_what_it_does_not_know(
    project: Project,
) -> None:
    saved = {**resolved_json(project.config), "quantum": True}
    run_id = project.runs.create("tiny", "train", saved)
    with pytest.raises(ConfigError, match=f"(?s)saved configuration of run {run_id}.*quantum"):
        project.resume(run_id)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), RunStatus.STOPPED, "interrupted"),
        (SystemExit(143), RunStatus.STOPPED, "interrupted"),
        (AssertionError(), RunStatus.FAILED, "AssertionError"),
        (UsageError("a", "b"), RunStatus.FAILED, "a"),
    ],
)
def test_a_run_says_how_it_ended(
    project: Project, error: BaseException, status: RunStatus, message: str
) -> None:
    run_id = project.runs.create("tiny", "train", {})
    with pytest.raises(type(error)), _recorded(project.runs, run_id):
        raise error
    state = project.runs.state(run_id)
    assert (state.status, state.message) == (status, message)


@pytest.mark.parametrize("value", [None, "1e-3", "adamw", 3e-4, 7])
def test_the_best_of_a_sweep_keeps_its_type(project: Project, value: Any) -> None:
    sweep = project.runs.create("tiny-sweep", "sweep", {})
    best = {"train.register_as": value} if isinstance(value, str) else {}
    best |= {"train.optimizer.lr": value} if isinstance(value, float) else {}
    best |= {"train.steps": value} if isinstance(value, int) else {}
    best |= {"train.schedule.warmup_steps": value} if value is None else {}
    project.runs.update(sweep, status=RunStatus.FINISHED, results={"best": best})
    train = Project.load(project.loaded.root, ["tune.best=last"]).config.train
    found = {
        "train.register_as": train.register_as, "train.optimizer.lr": train.optimizer.lr,
        "train.steps": train.steps, "train.schedule.warmup_steps": train.schedule.warmup_steps,
    }  # fmt: skip
    assert {key: found[key] for key in best} == best
