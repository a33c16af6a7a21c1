"""Seconds from the death of a training process to the next optimizer step, beside peers.

    python -m benchmarks.recovery [--quick] [--json FILE] [--peers FOLDER]
                                  [--only eagleray torchrun ray torchft nodes]

Two ranks on this machine train a decoder of 1.6 million parameters; one of them is killed by
SIGKILL, again and again: 10 times, with --quick 3. Each way runs by itself, with nothing beside it.
Before each kill it has trained for 8 seconds since the last recovery.

    step       to the first optimizer step of any rank that was not done before the kill
    both       to the first step after which both ranks have trained
    redone     steps that were done before the kill and had to be done again
    worker     eagleray: Ray Train's worker is killed; the longest pause in the 15 s that follow
    stopped    eagleray: a rank gets SIGSTOP
    nodes      one of two nodes is lost, twice: to the first new step of who is left, beside
               Ray Train's elastic training

Peers: torchrun (restarts all, with a store of their own), Ray Train (restarts all; its health check
is tightened to 0.2 s); each writes a checkpoint every 10 steps. torchft 0.2 (goes on with the
survivor, heartbeat 1 s; a replica that died is started again at once), if it is there:
`pip install --target FOLDER --no-deps torchft opentelemetry-exporter-otlp-proto-http
opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-common
opentelemetry-exporter-http-transport opentelemetry-proto`, and --peers FOLDER.
Half an hour; with --quick a third of that.
"""

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from benchmarks.leftovers import end_family
from benchmarks.record import Figure, console, run
from benchmarks.recovery_common import Step, steps_of, write_project
from benchmarks.recovery_nodes import lose_nodes
from benchmarks.recovery_peers import LIGHTHOUSE

from eagleray.actors.chaos import ChaosPlan, Injector
from eagleray.project import Project

_SETTLE_S = 8.0
_LIMIT_S = 150.0
_START_S = 60.0
_GOAL_S = 3.0
_NODES_GOAL_S = 20.0
_NODES = "nodes"
_WAYS = ("eagleray", "torchrun", "ray", "torchft", _NODES)


@dataclass(frozen=True)
class Recovery:
    """What one kill cost."""

    step_s: float
    both_s: float
    redone: int


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """All figures."""
    kills = 3 if arguments.quick else 10
    found: dict[str, list[Recovery]] = {}
    figures: list[Figure] = []
    for way in arguments.only:
        if way == _NODES:
            with _skipped(way):
                figures += _of_nodes(1 if arguments.quick else 2)
            continue
        with tempfile.TemporaryDirectory(prefix="bench-recovery-") as folder:
            if way == "eagleray":
                found[way], more = _ours(Path(folder), kills)
                figures += more
            else:
                with _skipped(way):
                    found[way] = _peer(way, Path(folder), kills, arguments.peers)
        if recoveries := found.get(way):
            medians = ", ".join(f"{n} {_median(recoveries, p):.2f} s" for n, p in _PARTS.items())
            console.print(f"{way}: {len(recoveries)} kills, {medians}", style="dim")
    ours = found.get("eagleray", [])
    for way, recoveries in found.items():
        if way == "eagleray" or not recoveries or not ours:
            continue
        goal = "a tenth of Ray Train's" if way == "ray" else ""
        for name, pick in _PARTS.items():
            mine, theirs = _median(ours, pick), _median(recoveries, pick)
            is_goal = bool(goal) and name == "step"
            figures.append(
                Figure(
                    f"killed: {name}, median", mine, "s", way, theirs,
                    goal if is_goal else "", mine <= theirs / 10 if is_goal else None,
                )
            )  # fmt: skip
            figures.append(
                Figure(f"killed: {name}, p95", _p95(ours, pick), "s", way, _p95(recoveries, pick))
            )
        figures.append(
            Figure(
                "killed: redone, most",
                max(r.redone for r in ours),
                "steps",
                way,
                max(r.redone for r in recoveries),
            )
        )
    if ours:
        step_s = _median(ours, _PARTS["step"])
        figures.insert(
            0, Figure("killed: step, median", step_s, "s", goal="below 3 s", holds=step_s < _GOAL_S)
        )
        most = max(recovery.redone for recovery in ours)
        figures.insert(
            1, Figure("killed: redone, most", most, "steps", goal="at most 1", holds=most <= 1)
        )
    return figures


def _of_nodes(losses: int) -> list[Figure]:
    ours, theirs = lose_nodes(losses)
    ours_s, theirs_s = median(ours), median(theirs)
    return [
        Figure(
            "node lost: step, median", ours_s, "s", "ray", theirs_s, "a third of Ray Train's",
            ours_s <= theirs_s / 3,
        ),
        Figure(
            "node lost: step, worst", max(ours), "s", "ray", max(theirs),
            f"below {_NODES_GOAL_S:g} s", max(ours) < _NODES_GOAL_S,
        ),
    ]  # fmt: skip


_PARTS: dict[str, Callable[[Recovery], float]] = {
    "step": lambda recovery: recovery.step_s,
    "both": lambda recovery: recovery.both_s,
}


def _ours(folder: Path, kills: int) -> tuple[list[Recovery], list[Figure]]:
    """Ours, by the product's own injector."""
    write_project(folder)
    project = Project.load(folder)
    recoveries: list[Recovery] = []
    figures: list[Figure] = []
    striker = _Striker(
        [*[("kill", "process")] * kills, *[("kill", "worker")] * 3, *[("stop", "process")] * 3],
        lambda kind, role: Injector(
            ChaosPlan.model_validate({"faults": [{"kind": kind, "role": role}]})
        ),
    )
    with contextlib.suppress(_EnoughError):
        project.train(striker)
    rows = project.runs.metrics(striker.run_id)
    steps = [(row["time_s"], row["step"]) for row in rows]
    pauses: dict[str, list[float]] = {"worker": [], "stopped": []}
    for kind, role, time_s in striker.struck:
        before = max(step for at, step in steps if at <= time_s)
        if role == "worker":
            near = [at for at, _ in steps if time_s - 1 <= at <= time_s + 15]
            pauses["worker"].append(max(b - a for a, b in itertools.pairwise(near)))
            continue
        after = [(at, step) for at, step in steps if at > time_s and step > before]
        took_s = after[0][0] - time_s
        if kind == "stop":
            pauses["stopped"].append(took_s)
            continue
        # Figures come once a step, and of all ranks together.
        again = [step for at, step in steps if at > time_s and step <= before]
        recoveries.append(Recovery(took_s, took_s, len(set(again))))
    events = [e for e in project.runs.events(striker.run_id) if e["event"] == "recovery"]
    for phase in ("gathered", "seated", "met", "restored", "stepped"):
        seconds = sorted(event.get(f"{phase}_s", 0.0) for event in events[:kills])
        figures.append(Figure(f"killed: {phase}", seconds[len(seconds) // 2], "s"))
    figures.append(
        Figure(
            "worker: longest pause",
            max(pauses["worker"]),
            "s",
            goal="below 10 s",
            holds=max(pauses["worker"]) < 10,
        )
    )
    stopped = sorted(pauses["stopped"])[len(pauses["stopped"]) // 2]
    figures.append(
        Figure("stopped: step, median", stopped, "s", goal="below 10 s", holds=stopped < 10)
    )
    return recoveries, figures


class _EnoughError(Exception):
    """All faults have happened, and been recovered from."""


class _Striker:
    """Carries one fault out after the other, each when the one before is long over."""

    def __init__(self, faults: list[tuple[str, str]], make: Callable[[str, str], Any]) -> None:
        self._faults, self._make = faults, make
        self._injector: Any = None
        self._ready_at = float("inf")
        self._seen = 0
        self.struck: list[tuple[str, str, float]] = []
        self.run_id = ""

    def __call__(self, run_id: str, progress: Any) -> None:
        self.run_id = run_id
        now = time.time()
        if progress.rows:
            step = progress.rows[-1].step
            if step > self._seen:
                if self._ready_at == float("inf"):
                    self._ready_at = now + _SETTLE_S
                self._seen = step
        if now < self._ready_at or not progress.rows:
            return
        if len(self.struck) == len(self._faults):
            raise _EnoughError
        kind, role = self._faults[len(self.struck)]
        injector = self._make(kind, role)
        injector(run_id, progress)
        if injector.fired:
            self.struck.append((kind, role, injector.fired[0].time_s))
            # Known to be over by a step of after it.
            self._ready_at, self._seen = float("inf"), progress.rows[-1].step + 2


def _peer(way: str, folder: Path, kills: int, installed: Path | None) -> list[Recovery]:
    """A peer, killed as often."""
    recoveries: list[Recovery] = []
    with _running(way, folder, installed), _told(way, recoveries):
        for _ in range(kills):
            _wait(folder, lambda steps: {step.rank for step in steps} == {0, 1})
            time.sleep(_SETTLE_S)
            newest = {step.rank: step for step in steps_of(folder)}
            victim = newest[1]
            os.kill(victim.pid, signal.SIGKILL)
            killed_s = time.time()
            before = max(step.step for step in steps_of(folder) if step.time_s <= killed_s)

            def later(steps: list[Step], killed_s: float = killed_s) -> list[Step]:
                return [step for step in steps if step.time_s > killed_s + 0.05]

            def is_over(steps: list[Step], before: int = before, victim: Step = victim) -> bool:
                return {s.rank for s in later(steps) if s.step > before} == {0, 1} and any(
                    s.pid != victim.pid and s.rank == 1 for s in later(steps)
                )

            steps = _wait(folder, is_over)
            after = [step for step in later(steps) if step.step > before]
            first = min(step.time_s for step in after)
            both = min(step.time_s for step in after if step.rank == 1 and step.pid != victim.pid)
            redone = {step.step for step in later(steps) if step.step <= before}
            recoveries.append(Recovery(first - killed_s, both - killed_s, len(redone)))
            (folder / "steps").unlink()
    return recoveries


@contextlib.contextmanager
def _running(way: str, folder: Path, installed: Path | None) -> Iterator[None]:
    """A peer at work."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # Else its restarts may meet the addresses of the dead, and are burnt (pytorch #167288).
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if installed is not None:
        # Behind our own, so that peers run on the packages that we run on.
        paths = [os.environ.get("PYTHONPATH", ""), str(installed.resolve())]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    module = ["-m", "benchmarks.recovery_peers", way, str(folder)]
    with contextlib.ExitStack() as stack:

        def start(*command: str, restarts: bool = False) -> None:
            kept = _Supervised([sys.executable, *command], environment, folder / "log", restarts)
            stack.callback(kept.end)

        if way == "torchrun":
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            start(*launcher, "--max-restarts", "1000", *module)
        elif way == "torchft":
            start("-m", "benchmarks.recovery_peers", "lighthouse", str(folder))
            _wait_for(folder / LIGHTHOUSE, folder)
            for rank in (0, 1):
                start(*module, str(rank), restarts=True)
        else:
            start(*module)
        yield


class _Supervised:
    """A process of a peer; started again whenever it ends, if `restarts`."""

    def __init__(
        self, command: list[str], environment: dict[str, str], log: Path, restarts: bool
    ) -> None:
        self._command, self._environment, self._log = command, environment, log
        self._is_over = not restarts
        self._process = self._started()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End it, and what it started."""
        self._is_over = True
        with contextlib.suppress(psutil.NoSuchProcess):
            end_family(self._process.pid)
        self._process.kill()
        self._thread.join()

    def _keep(self) -> None:
        self._process.wait()
        while not self._is_over:
            self._process = self._started()
            self._process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)


@contextlib.contextmanager
def _told(way: str, recoveries: list[Recovery]) -> Iterator[None]:
    """One that does not come back is left with what it has shown."""
    try:
        yield
    except TimeoutError as error:
        if not recoveries:
            raise
        console.print(f"{way}, kill {len(recoveries) + 1}: {str(error)[:200]}")


def _wait(folder: Path, condition: Callable[[list[Step]], bool]) -> list[Step]:
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        steps = steps_of(folder)
        if condition(steps):
            return steps
        time.sleep(0.02)
    raise TimeoutError(f"not back within {_LIMIT_S:g} s; last words: {_last_words(folder)}")


def _wait_for(path: Path, folder: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not there within {_START_S:g} s; {_last_words(folder)}")
        time.sleep(0.1)


def _last_words(folder: Path) -> str:
    log = (folder / "log").read_text(errors="replace").splitlines()
    return log[-1] if log else ""


def _median(recoveries: list[Recovery], pick: Callable[[Recovery], float]) -> float:
    ordered = sorted(map(pick, recoveries))
    return ordered[len(ordered) // 2]


def _p95(recoveries: list[Recovery], pick: Callable[[Recovery], float]) -> float:
    ordered = sorted(map(pick, recoveries))
    return ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]


@contextlib.contextmanager
def _skipped(name: str) -> Iterator[None]:
    """Tell why a peer is not measured, and go on."""
    try:
        yield
    except (ImportError, TimeoutError, KeyError) as error:
        console.print(f"not measured: {name}: {type(error).__name__}: {str(error)[:300]}")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=_WAYS, default=list(_WAYS))
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="where pip put torchft")


if __name__ == "__main__":
    run(__doc__.partition("\n")[0], measure, _add_options)
