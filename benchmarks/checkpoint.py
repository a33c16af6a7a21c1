"""What checkpoints cost training: ours beside torch.save, DCP's async_save and Ray Train's upload.

    python -m benchmarks.checkpoint [--quick] [--json FILE]

A decoder of 110 million parameters in fp32 with AdamW (1.3 GB of state) trains on two threads; a
step takes one to two seconds on two free cores. Each way has a process of its own, which trains
segments with one checkpoint and segments without, in turns (A B B A); one with a checkpoint ends
when that is on storage.

    eagleray      the trainer's own Snapshotter, and a store in a process of its own, which digests,
                  syncs and commits what it writes
    torch.save    blocking, as is; nothing is synced
    DCP async     async_save by a thread, DefaultStager with staging beside the next step, awaited
                  before its update as it must be: else the checkpoint is torn
    Ray Train async  torch.save to a local folder, which Ray Train uploads beside the training; CPU
                  and memory of its worker alone

    blocked    seconds in which training stands still for a checkpoint
    lost       how much longer a segment with a checkpoint takes than one without, all that it costs
               in the background included; slowdown is that by the interval
    CPU        the same in CPU time of all processes, which other work on the machine disturbs less
    memory     most memory (PSS, all processes) in three checkpoints, above that of training alone;
               in a pass of its own, for looking costs time as well

Figures are medians over the segments and, in brackets, half the range between their quartiles.
Ten minutes; --quick: 8 million parameters.
"""

import argparse
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch
from benchmarks.checkpoint_ways import OURS, RAY, WAYS, Way, inside_ray_train, state_of
from benchmarks.record import Figure, console, middle, run

from eagleray.actors.trainer.stepper import Stepper
from eagleray.platform.config import ProjectConfig, with_overrides
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder

_BLOCKED_GOAL, _SLOWDOWN_GOAL, _PEERS_GOAL = 0.005, 0.01, 0.25
_SHORT, _LONG = 10, 50
_THREADS = 2
_MEMORY_CHECKPOINTS = 3
_PAUSE_S = 0.05
_FOUND = "found"


@dataclass(frozen=True)
class Plan:
    """How much is trained."""

    model: DecoderConfig
    seq_len: int
    pairs: int
    """Of segments, per way."""


_LARGE = Plan(
    DecoderConfig(
        vocab_size=32_000, dim=768, num_layers=12, num_heads=12, num_kv_heads=12, head_dim=64,
        ffn_dim=2048, max_seq_len=512,
    ),
    seq_len=64, pairs=3,
)  # fmt: skip
_SMALL = Plan(
    DecoderConfig(
        vocab_size=8_000, dim=256, num_layers=8, num_heads=8, num_kv_heads=8, head_dim=32,
        ffn_dim=704, max_seq_len=512,
    ),
    seq_len=64, pairs=4,
)  # fmt: skip


@dataclass
class Found:
    """What was measured of one way."""

    step_s: float
    """Median of steps without checkpoints."""
    blocked_s: list[float]
    lost_s: list[float]
    """How much longer a segment with a checkpoint takes, per pair."""
    step_cpu_s: float
    """Median of steps without checkpoints, of all processes."""
    lost_cpu_s: list[float]
    """How much more CPU time a segment with a checkpoint takes, per pair."""
    memory_bytes: int
    state_bytes: int


class _Trainer:
    """A model that is trained in segments."""

    def __init__(self, plan: Plan, folder: Path, name: str) -> None:
        torch.set_num_threads(_THREADS)
        overrides = {"train.steps": 100_000, "train.batch_size": 1, "train.micro_batch_size": 1}
        model = Decoder(plan.model)
        model.init_weights(torch.Generator().manual_seed(0))
        self.stepper = Stepper(model, with_overrides(ProjectConfig(name="bench"), overrides).train)
        self.stepper.before_update = self._before_update
        self._draw = np.random.default_rng(0)
        self._shape = plan.model.vocab_size, (1, plan.seq_len + 1)
        self._step = 0
        self._held_s = 0.0
        self.way: Way | None = None
        self.train(2)
        self.plain_bytes = _family_bytes()
        self.way = WAYS[name](self.stepper, folder)

    def train(self, steps: int) -> float:
        """Seconds of some steps."""
        started = time.perf_counter()
        for _ in range(steps):
            vocab, shape = self._shape
            tokens = self._draw.integers(0, vocab, shape, dtype=np.int32)
            self.stepper.step(self._step, tokens)
            self._step += 1
        return time.perf_counter() - started

    def checkpointed(self, steps: int) -> tuple[float, float]:
        """Seconds of a checkpoint and the steps after it, until it is on storage; and blocked."""
        assert self.way is not None
        started, self._held_s = time.perf_counter(), 0.0
        self.way.begin(self._step)
        self._held_s += time.perf_counter() - started
        self.train(steps)
        self.way.settle()
        return time.perf_counter() - started, self._held_s

    def _before_update(self) -> None:
        if self.way is not None:
            started = time.perf_counter()
            self.way.before_update()
            self._held_s += time.perf_counter() - started


def _measure(name: str, is_quick: bool, folder: Path, talk: Connection) -> None:
    """One way in a process of its own."""
    if name == RAY:
        # Its worker knows this module by its name alone.
        from benchmarks import checkpoint as by_name

        inside_ray_train(partial(by_name.measure_into, name, is_quick), folder)
    else:
        measure_into(name, is_quick, folder)
    talk.send((folder / _FOUND).read_bytes())


def measure_into(name: str, is_quick: bool, folder: Path) -> None:
    """Measure a way, and write down what was found."""
    (folder / _FOUND).write_bytes(
        pickle.dumps(_found(name, _SMALL if is_quick else _LARGE, folder))
    )


def _found(name: str, plan: Plan, folder: Path) -> Found:
    trainer = _Trainer(plan, folder, name)
    with _Peak() as peak:
        for _ in range(_MEMORY_CHECKPOINTS):
            trainer.checkpointed(1)
    pairs = [_pair(trainer, is_plain_first=number % 2 == 0) for number in range(plan.pairs)]
    assert trainer.way is not None
    trainer.way.close()
    state = state_of(trainer.stepper)
    state_bytes = 4 * sum(t.numel() for t in state["model"].values()) * 3
    return Found(
        middle([pair.plain_s for pair in pairs])[0] / _SHORT,
        [pair.blocked_s for pair in pairs],
        [pair.taken_s - pair.plain_s for pair in pairs],
        middle([pair.plain_cpu_s for pair in pairs])[0] / _SHORT,
        [pair.taken_cpu_s - pair.plain_cpu_s for pair in pairs],
        peak.num_bytes - trainer.plain_bytes, state_bytes,
    )  # fmt: skip


class _Pair(NamedTuple):
    """A segment without a checkpoint and one with it."""

    plain_s: float
    plain_cpu_s: float
    taken_s: float
    taken_cpu_s: float
    blocked_s: float


def _pair(trainer: _Trainer, *, is_plain_first: bool) -> _Pair:
    plain_s = plain_cpu_s = taken_s = taken_cpu_s = blocked_s = 0.0
    for is_plain in (is_plain_first, not is_plain_first):
        before = _family_cpu_s()
        if is_plain:
            plain_s = trainer.train(_SHORT)
            plain_cpu_s = _family_cpu_s() - before
        else:
            taken_s, blocked_s = trainer.checkpointed(_SHORT)
            taken_cpu_s = _family_cpu_s() - before
    return _Pair(plain_s, plain_cpu_s, taken_s, taken_cpu_s, blocked_s)


class _Peak:
    """The most memory that this process and its children take together inside the context."""

    num_bytes = 0

    def __enter__(self) -> "_Peak":
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(_PAUSE_S):
            self.num_bytes = max(self.num_bytes, _family_bytes())


def _family_bytes() -> int:
    return sum(_pss(process.pid) for process in _family())


def _family_cpu_s() -> float:
    return sum(sum(process.cpu_times()[:2]) for process in _family())


def _family() -> list[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def _pss(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """All figures."""
    # Threads that wait do not spin: on a machine that does other work as well, that would be most
    # of what is measured.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    context = multiprocessing.get_context("spawn")
    found: dict[str, Found] = {}
    for name in WAYS:
        with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=arguments.folder) as place:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_measure, args=(name, arguments.quick, Path(place), theirs)
            )
            process.start()
            theirs.close()
            try:
                found[name] = pickle.loads(ours.recv())
            except EOFError:
                raise SystemExit(f"the process of {name} died") from None
            finally:
                process.join()
        console.print(f"{name} done", style="dim")
    states = {f"{way.state_bytes / 1e9:.2f} GB" for way in found.values()}
    steps = ", ".join(f"{way.step_s:.2f}" for way in found.values())
    console.print(f"state {states.pop()}, steps of {steps} s without checkpoints", style="dim")
    return list(_figures(found))


def _figures(found: dict[str, Found]) -> Iterator[Figure]:
    ours = found[OURS]
    blocked = {name: middle(way.blocked_s)[0] for name, way in found.items()}
    peer = min((name for name in found if name != OURS), key=lambda name: blocked[name])
    yield Figure(
        "blocked per checkpoint", blocked[OURS], "s", peer, blocked[peer],
        f"at most {_PEERS_GOAL:g} x", blocked[OURS] <= _PEERS_GOAL * blocked[peer],
    )  # fmt: skip
    share = blocked[OURS] / (_SHORT * ours.step_s)
    yield Figure(
        f"blocked, every {_SHORT} steps", 100 * share, "% of training",
        goal=f"at most {100 * _BLOCKED_GOAL:g}", holds=share <= _BLOCKED_GOAL,
    )  # fmt: skip
    lost_s, spread_s = middle(ours.lost_s)
    share, spread = (value / (_LONG * ours.step_s) for value in (lost_s, spread_s))
    # On a busy machine chance may be larger than what is looked for: then nothing is known.
    is_known = spread <= _SLOWDOWN_GOAL
    yield Figure(
        f"slowdown, every {_LONG} steps (+- {100 * spread:.2f})", 100 * share, "%",
        goal=f"at most {100 * _SLOWDOWN_GOAL:g}" + ("" if is_known else ": too noisy to tell"),
        holds=share <= _SLOWDOWN_GOAL if is_known else None,
    )  # fmt: skip
    for name, way in found.items():
        blocked_s, width_s = middle(way.blocked_s)
        yield Figure(f"{name}: blocked per checkpoint (+- {width_s:.3f})", blocked_s, "s")
        part = 100 * blocked_s / (_SHORT * way.step_s)
        yield Figure(f"{name}: blocked, every {_SHORT} steps", part, "% of training")
        lost_s, spread_s = middle(way.lost_s)
        yield Figure(f"{name}: lost per checkpoint (+- {spread_s:.2f})", lost_s, "s")
        for steps in (_SHORT, _LONG):
            share = 100 * lost_s / (steps * way.step_s)
            yield Figure(f"{name}: slowdown, every {steps} steps", share, "%")
        cpu_s, spread_s = middle(way.lost_cpu_s)
        yield Figure(f"{name}: CPU per checkpoint (+- {spread_s:.2f})", cpu_s, "s")
        share = 100 * cpu_s / (_LONG * way.step_cpu_s)
        yield Figure(f"{name}: CPU, every {_LONG} steps", share, "% of training")
        yield Figure(f"{name}: memory above training", way.memory_bytes / 1e6, "MB")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", default=os.environ.get("TMPDIR", "/tmp"),
        help="where checkpoints are written",
    )  # fmt: skip


if __name__ == "__main__":
    run(__doc__ or "", measure, _add_options)
