"""The whole way on real text: speeches to shards, sweep, training through a kill, served, asked.

    python -m examples.sotu.demo          # minutes on two cores; leaves nothing running
    python -m examples.sotu.demo --keep   # leaves the endpoint up and prints how to ask it

Everything it makes is under `.demo/` beside where it is started; an earlier run's is replaced.
"""

import argparse
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from examples.sotu.corpus import write_corpus
from openai import OpenAI
from rich.table import Table

from eagleray.actors.data.dataset import Dataset
from eagleray.actors.data.loader import Loader
from eagleray.actors.trainer.progress import Progress
from eagleray.actors.trainer.stepper import Stepper
from eagleray.cli.console import console, run_app
from eagleray.cli.train import RunFollower
from eagleray.cli.tune import SweepFollower
from eagleray.platform.cluster import down, session, up
from eagleray.platform.errors import EagleRayError
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder
from eagleray.platform.report import write_report
from eagleray.project import Project, TrainedRun
from eagleray.serve.api.keys import KeyStore
from eagleray.serve.deployment import Endpoint, deploy, undeploy

FOLDER = Path(".demo")
TEMPLATE = Path(__file__).parent.parent.parent / "conf" / "tiny.yaml"
PROMPTS = ("Fellow citizens of the Senate", "The people of the United States", "Our economy")
NUM_CONCURRENT, MAX_TOKENS = 16, 48


@dataclass
class Summary:
    """Stage, seconds, key figure."""

    rows: list[tuple[str, float, str]] = field(default_factory=list)
    figure: str = ""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; it sets `figure` on the way."""
        console.rule(name, align="left")
        started, self.figure = time.monotonic(), ""
        yield
        self.rows.append((name, time.monotonic() - started, self.figure))
        if self.figure:
            console.print(self.figure, markup=False, soft_wrap=True)

    def table(self) -> Table:
        """What the user came for."""
        made = Table(title="Eagleray demo", title_justify="left", box=None, pad_edge=False)
        made.add_column("stage", style="bold")
        made.add_column("seconds", justify="right")
        made.add_column("figure")
        for name, seconds, figure in self.rows:
            made.add_row(name, f"{seconds:.1f}", figure)
        made.add_row("total", f"{sum(row[1] for row in self.rows):.1f}", "")
        return made


class Killer:
    """Kills one training worker with SIGKILL midway, and times the way back."""

    def __init__(self, at_step: int, show: Callable[[str, Progress], None]) -> None:
        self._at_step, self._show = at_step, show
        self._killed_at: float | None = None
        self.recovery_s: float | None = None

    def __call__(self, run_id: str, progress: Progress) -> None:
        """Follow the run."""
        self._show(run_id, progress)
        if self._killed_at is None:
            if progress.rows and progress.rows[-1].step >= self._at_step and progress.workers:
                victim = progress.workers[-1]
                console.print(f"SIGKILL to worker {victim.rank} (pid {victim.pid})")
                os.kill(victim.pid, signal.SIGKILL)
                self._killed_at = time.time()
        elif self.recovery_s is None and progress.attempt in progress.first_row_at:
            first = progress.first_row_at[progress.attempt]
            if first > self._killed_at and progress.attempt > 1:
                self.recovery_s = first - self._killed_at


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the endpoint up")
    arguments = parser.parse_args()
    run_app(lambda: _demo(arguments.keep))


def _demo(keep: bool) -> None:
    _fresh_folder()
    summary = Summary()
    with summary.stage("corpus"):
        path = write_corpus(FOLDER)
        summary.figure = f"{path.stat().st_size / 1e6:.1f} MB of speeches"
    project = Project.load(FOLDER)
    if keep:
        up(project.loaded)
    try:
        _walk(project, summary, keep)
    except BaseException:  # Also at Ctrl-C: a demo that did not end well leaves no cluster.
        if keep:
            down(project.loaded)
        raise


def _walk(project: Project, summary: Summary, keep: bool) -> None:
    with ExitStack() as stack:
        with summary.stage("cluster"):
            cluster = stack.enter_context(session(project.loaded))
            cpus = sum(node.cpus for node in cluster.nodes())
            summary.figure = f"{cpus:g} CPUs at {cluster.address}"
        with summary.stage("data"):
            dataset = project.build_data()
            counts = dataset.num_samples("train"), dataset.num_samples("eval")
            summary.figure = f"{counts[0]:,} + {counts[1]:,} samples of {dataset.seq_len} tokens"
        with summary.stage("sweep"):
            with SweepFollower(project.config.tune.num_trials) as sweep:
                result = project.tune(sweep.show)
            lr = result.best.params["train.optimizer.lr"]
            summary.figure = f"best of {len(result.trials)}: {result.best.value:.3f} at lr {lr:.2g}"
        tuned = Project.load(FOLDER, ["tune.best=last"])
        before = _loss_before(tuned, dataset)
        with summary.stage("train"):
            run = _train(tuned, summary)
        with summary.stage("evaluate"):
            summary.figure = f"held-out loss {before:.3f} before, {run.eval_loss:.3f} after"
        with summary.stage("promote"):
            assert run.model is not None, "the demo registers its model"
            tuned.promote(run.model)
            summary.figure = f"{run.model.spec} is prod"
        with summary.stage("deploy"):
            endpoint = deploy(tuned.loaded)
            summary.figure = endpoint.url
        key = KeyStore(tuned.storage).create("demo")
        with summary.stage("ask"):
            summary.figure = _ask(tuned, endpoint, key)
        with summary.stage("report"):
            summary.figure = str(write_report(tuned.storage, run.run_id))
        if not keep:
            with summary.stage("stop"):
                undeploy()
    console.print()
    console.print(summary.table())
    if keep:
        _say_how_to_ask(endpoint, key)


def _train(project: Project, summary: Summary) -> TrainedRun:
    steps = project.config.train.steps
    with RunFollower(steps) as follower:
        killer = Killer(steps // 2, follower.show)
        run = project.train(killer)
    if killer.recovery_s is None:
        raise EagleRayError("the worker that was to die lived on", "run the demo again")
    summary.figure = (
        f"killed and back in {killer.recovery_s:.1f} s; "
        f"samples missing {run.missing} / doubled {run.doubled}"
    )
    return run


def _loss_before(project: Project, dataset: Dataset) -> float:
    """Held-out loss of the untrained model, on the batches that training evaluates on."""
    train = project.config.train
    model = Decoder(DecoderConfig.from_section(project.config.model, dataset.vocab_size))
    model.init_weights(torch.Generator().manual_seed(train.seed))
    stepper = Stepper(model, train)
    with Loader(dataset, "train", 0, train.batch_size, prefetch_batches=0) as loader:
        batches = [loader.eval_batch(index).tokens for index in range(train.eval.num_batches)]
    loss, tokens = stepper.evaluate(np.concatenate(batches))
    return loss / tokens


def _ask(project: Project, endpoint: Endpoint, key: str) -> str:
    client = OpenAI(base_url=f"{endpoint.url}/v1", api_key=key, timeout=120)
    console.print("1 M parameters after 500 steps: expect the words and the cadence, not sense.")
    console.print(f"> {PROMPTS[0]}", style="bold", markup=False)
    stream = client.completions.create(
        model=endpoint.model, prompt=PROMPTS[0], max_tokens=MAX_TOKENS, temperature=0.7,
        stream=True, seed=1,
    )  # fmt: skip
    for chunk in stream:
        if chunk.choices:
            console.print(chunk.choices[0].text, end="", markup=False)
    console.print()

    def one(index: int) -> tuple[int, str, str]:
        answer = client.completions.with_raw_response.create(
            model=endpoint.model, prompt=PROMPTS[index % len(PROMPTS)], max_tokens=MAX_TOKENS,
            temperature=0.7, seed=index,
        )  # fmt: skip
        parsed = answer.parse()
        assert parsed.usage is not None, "an answer that is not streamed has its usage"
        return (
            parsed.usage.completion_tokens,
            answer.headers["x-model-digest"],
            parsed.choices[0].text,
        )

    started = time.monotonic()
    with ThreadPoolExecutor(NUM_CONCURRENT) as pool:
        answers = list(pool.map(one, range(NUM_CONCURRENT)))
    seconds = time.monotonic() - started
    for index in (1, 2):
        console.print(f"> {PROMPTS[index]}", style="bold", markup=False)
        console.print(answers[index][2].rstrip(), markup=False)
    version = project.registry.resolve(endpoint.model)
    lineage = project.ledger.lineage(version.record)
    digests = {*(answer[1] for answer in answers), version.record, lineage.record.digest}
    if len(digests) != 1:
        raise EagleRayError(f"the served answers do not lead to the registry: {sorted(digests)}")
    tokens = sum(answer[0] for answer in answers)
    rate = f"{tokens / seconds:.0f} tokens/s for {NUM_CONCURRENT} at once"
    return f"{rate}; digest {version.record[:12]} in header, registry and lineage"


def _say_how_to_ask(endpoint: Endpoint, key: str) -> None:
    console.print("\nThe endpoint is up. Ask it:", markup=False)
    console.print(
        f"curl {endpoint.url}/v1/completions -H 'authorization: Bearer {key}' "
        f"-H 'content-type: application/json' "
        f"-d '{{\"model\": \"{endpoint.model}\", \"prompt\": \"{PROMPTS[0]}\"}}'",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    stop = shlex.join([_eagleray(), "down", "--config", str(FOLDER)])
    console.print(f"Stop it: {stop}", markup=False, soft_wrap=True)


def _eagleray() -> str:
    """The command as it can be typed from here."""
    command = Path(sys.executable).with_name("eagleray")
    with suppress(ValueError):
        command = command.relative_to(Path.cwd())
    return str(command)


def _fresh_folder() -> None:
    config = FOLDER / "eagleray.yaml"
    if config.exists():
        if down(Project.load(FOLDER).loaded) is not None:
            console.print("stopped the endpoint that the demo before this one had left up")
        # Away at once, so that an interrupted removal leaves no half of a project behind.
        old = FOLDER.with_name(f"{FOLDER.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        FOLDER.rename(old)
        shutil.rmtree(old)
    FOLDER.mkdir(exist_ok=True)
    shutil.copyfile(TEMPLATE, config)


if __name__ == "__main__":
    main()
