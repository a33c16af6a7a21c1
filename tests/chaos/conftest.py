"""A small project to train and to disturb."""

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from eagleray.actors.trainer.progress import Progress
from eagleray.project import Project, TrainedRun

WORDS = ("union", "states", "congress", "people", "year", "of", "the", "and", "to", "our")
CONFIG = """\
name: tiny
storage: {uri: store}
data:
  sources:
    - {path: docs.jsonl, domain: short, where: {words: {max: 99}}}
    - {path: docs.jsonl, domain: long, where: {words: {min: 100}}}
  mixture: {kind: bandit, every_steps: 8, temperature: 0.01}
  tokenizer: {vocab_size: 300}
  seq_len: 16
  eval_fraction: 0.1
model: {dim: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, max_seq_len: 32}
train:
  num_workers: 2
  spares: 0
  steps: 200
  batch_size: 8
  micro_batch_size: 4
  optimizer: {lr: 0.01}
  checkpoint: {every_steps: 10, keep: 2}
  eval: {every_steps: 100, num_batches: 2}
  log_every_steps: 2
tune:
  num_trials: 4
  startup_trials: 2
  overrides: {train.steps: 20}
  asha: {grace_steps: 5}
  space:
    train.optimizer.lr: {kind: float, low: 1e-3, high: 3e-2, log: true}
"""


def write_project(folder: Path) -> Path:
    """A project with 120 documents of a few words each, in two domains by their length."""
    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(50, 150))) for _ in range(120)]
    lines = [json.dumps({"text": text, "words": len(text.split())}) + "\n" for text in texts]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "docs.jsonl").write_text("".join(lines))
    (folder / "eagleray.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="session")
def make_project(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Project]:
    """Makes projects over equal data, each with a storage of its own."""

    def make(*overrides: str) -> Project:
        folder = write_project(tmp_path_factory.mktemp("project"))
        return Project.load(folder, overrides)

    return make


@dataclass
class Watched:
    """A run that nothing disturbs, and what was seen of it."""

    run: TrainedRun
    addresses: set[str]
    """What its processes listened on."""
    weights: list[dict[str, float]]
    """What its mixture decided."""


@pytest.fixture(scope="session")
def watched(make_project: Callable[..., Project]) -> Watched:
    """One run for all tests that need an undisturbed one."""
    project, addresses, next_look = make_project(), set[str](), 0

    def look(_: str, progress: Progress) -> None:
        nonlocal next_look
        if progress.rows and progress.rows[-1].step >= next_look:
            next_look += 50
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    connections = process.net_connections("inet")
                    addresses.update(c.laddr.ip for c in connections if c.status == "LISTEN")

    run = project.train(look)
    assert (run.attempts, run.steps, run.missing, run.doubled) == (1, 200, 0, 0)
    rows = project.runs.metrics(run.run_id)
    return Watched(run, addresses, [row["weights"] for row in rows if row.get("weights")])


@pytest.fixture(scope="session")
def undisturbed(watched: Watched) -> TrainedRun:
    """The run that the disturbed ones must equal."""
    return watched.run
