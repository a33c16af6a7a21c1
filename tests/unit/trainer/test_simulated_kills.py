"""Runs whose ranks die at drawn places: the same bits, each sample exactly once.

SCHEDULES=1000 pytest tests/unit/trainer/test_simulated_kills.py tries more of them.
"""

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.trainer.simulator import (
    SIZES,
    AtOnce,
    PoisonableStepper,
    Run,
    Schedule,
    SimulatedSnapshotter,
)

from eagleray.actors.checkpoint import dcp, snapshot
from eagleray.actors.checkpoint.samples import SampleLog, audit
from eagleray.actors.checkpoint.shard_file import Pacer, WrittenFile
from eagleray.actors.checkpoint.state import Checkpoint
from eagleray.actors.data.mixer import MixerSpec
from eagleray.actors.trainer import loop
from eagleray.actors.trainer.seams import LoopSpec
from eagleray.platform.config import BanditMixtureConfig, ProjectConfig, with_overrides
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.storage import Storage, digest_file

STEPS, WORLD_SIZE = 12, 3
SCHEDULES = int(os.environ.get("SCHEDULES", "15"))
# The first step, two in a row of which a snapshot lies between, the last but one.
POISONED = frozenset({0, 5, 6, 10})
MODEL = DecoderConfig(
    vocab_size=51, dim=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, ffn_dim=16,
    max_seq_len=8,
)  # fmt: skip


class Threading:
    """What a snapshotter uses of it."""

    Thread, Condition, Event = AtOnce, threading.Condition, threading.Event


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Without what takes longer than a whole run: the yardstick, and DCP's way of writing."""

    def write(arrays: Mapping[str, np.ndarray], folder: Path, _: Pacer) -> dict[str, WrittenFile]:
        path = folder / "arrays.npz"
        np.savez(path, **arrays)
        return {path.name: WrittenFile(path.stat().st_size, digest_file(path))}

    def read(folder: Path) -> dict[str, np.ndarray]:
        with np.load(folder / "arrays.npz") as arrays:
            return dict(arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "measure_peak_flops", lambda *_: 1e9)
        patch.setattr(loop, "Snapshotter", SimulatedSnapshotter)
        patch.setattr(loop, "Stepper", PoisonableStepper)
        patch.setattr(snapshot, "threading", Threading)
        patch.setattr(dcp, "write_arrays", write)
        patch.setattr(dcp, "read_arrays", read)
        yield


def spec(action: str = "stop") -> LoopSpec:
    train = with_overrides(
        ProjectConfig(name="t"),
        {
            "train.non_finite.action": action,
            "train.steps": STEPS, "train.batch_size": 6, "train.micro_batch_size": 2,
            "train.checkpoint.every_steps": 3, "train.log_every_steps": 2,
            "train.eval.every_steps": 4, "train.eval.num_batches": 3, "train.optimizer.lr": 0.01,
        },
    ).train  # fmt: skip
    mixture = BanditMixtureConfig(kind="bandit", every_steps=4, decay=0.5, temperature=0.01)
    return LoopSpec(train, MODEL, 4, MixerSpec(mixture, ("a", "b"), SIZES))


def trained(
    folder: Path,
    seed: int,
    kills: int,
    store_loss: float = 0.0,
    action: str = "stop",
    pause_rate: float = 0.0,
    sizes: tuple[int, ...] = (),
) -> tuple[Run, Checkpoint]:
    schedule = Schedule(seed, kill_rate=0.01, max_kills=kills)
    SimulatedSnapshotter.draw = schedule.draw
    poisoned = POISONED if action != "stop" else frozenset()
    run = Run(
        spec(action), Storage(folder), schedule, WORLD_SIZE, store_loss, poisoned, pause_rate, sizes
    )
    return run, run.train()


@contextmanager
def scheduled(seed: int, kills: int, **options: Any) -> Iterator[tuple[Run, Checkpoint]]:
    """A run by a seed, which is named if something is wrong with it."""
    # Memory, as each run syncs its files some hundred times.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        try:
            yield trained(Path(folder), seed, kills, **options)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def assert_same(run: Run, found: Checkpoint, undisturbed: tuple[Run, Checkpoint]) -> None:
    whole_run, whole = undisturbed
    assert found.step == whole.step == STEPS
    for name, array in whole.arrays.items():
        if not name.startswith("rng."):  # One generator for all ranks, in a simulation.
            assert np.array_equal(array, found.arrays[name]), name
    assert found.meta["mixer"] == whole.meta["mixer"]
    assert found.meta["eval_loss"] == whole.meta["eval_loss"]
    assert_exact(run, found)
    assert found.meta.get("skipped") == whole.meta.get("skipped")
    assert run.skipped == run.poisoned
    # Figures that a death fell into may span less; the last ones are never in doubt.
    last, whole_last = run.rows[STEPS], whole_run.rows[STEPS]
    assert (last.grad_norm, last.eval_loss) == (whole_last.grad_norm, whole_last.eval_loss)


def assert_exact(run: Run, found: Checkpoint) -> None:
    """Each sample exactly once."""
    log = SampleLog(run.storage, "run").chain(found.samples)
    result = audit(log, SIZES)
    assert (result.steps, result.samples, result.is_exact) == (STEPS, STEPS * 6, True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Checkpoint]:
    run, found = trained(tmp_path_factory.mktemp("whole"), seed=0, kills=0)
    assert (run.attempts, run.schedule.kills) == (1, 0)
    return run, found


def assert_all_the_same(action: str, undisturbed: tuple[Run, Checkpoint]) -> list[Run]:
    """Try all schedules; the runs."""
    torch.manual_seed(0)
    runs = []
    for seed in range(1, SCHEDULES + 1):
        # Every second one pauses at times.
        options = {"store_loss": 0.1 * (seed % 3), "pause_rate": 0.05 * (seed % 2)}
        with scheduled(seed, 4, action=action, **options) as (run, found):
            assert_same(run, found, undisturbed)
        runs.append(run)
    assert sum(run.schedule.kills for run in runs) > 2 * SCHEDULES
    assert sum(run.attempts for run in runs) > 2 * SCHEDULES
    return runs


@pytest.mark.no_cover
@pytest.mark.timeout(60 + 5 * SCHEDULES)
def test_all_schedules_of_kills_and_pauses_end_with_the_same_bits(
    undisturbed: tuple[Run, Checkpoint],
) -> None:
    runs = assert_all_the_same("stop", undisturbed)
    assert sum(len(run.pauses) for run in runs) > SCHEDULES // 4


@pytest.fixture(scope="module")
def skipping(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Checkpoint]:
    run, found = trained(tmp_path_factory.mktemp("skip"), seed=0, kills=0, action="skip")
    assert (run.attempts, run.schedule.kills) == (1, 0)
    return run, found


@pytest.mark.no_cover
@pytest.mark.timeout(60 + 5 * SCHEDULES)
def test_all_schedules_of_resizes_and_kills_see_each_sample_once_and_come_to_the_same_loss(
    undisturbed: tuple[Run, Checkpoint],
) -> None:
    torch.manual_seed(0)
    resizes = 0
    for seed in range(1, SCHEDULES + 1):
        kills = 2 * (seed % 2)
        with scheduled(seed, kills, pause_rate=0.1, sizes=(1, 2, 3, 6)) as (run, found):
            assert_exact(run, found)
            # The sums over ranks round otherwise, and Adam makes the most of it.
            assert found.meta["eval_loss"] == pytest.approx(
                undisturbed[1].meta["eval_loss"], rel=2e-3
            )
            # Nothing that was trained before a pause is lost.
            for attempt, step in run.pauses if not kills else ():
                assert run.starts[attempt + 1] == step
        resizes += len(run.pauses)
    assert resizes > SCHEDULES // 2


@pytest.mark.no_cover
@pytest.mark.timeout(60 + 5 * SCHEDULES)
def test_skipped_steps_leave_the_same_bits_through_all_schedules_of_kills(
    skipping: tuple[Run, Checkpoint], undisturbed: tuple[Run, Checkpoint]
) -> None:
    run, found = skipping
    assert found.meta["skipped"]["count"] == run.rows[STEPS].skipped_steps == len(POISONED)
    assert all(np.isfinite(array).all() for array in found.arrays.values())
    name = "model.norm.weight"
    assert not np.array_equal(found.arrays[name], undisturbed[1].arrays[name])
    # The bandit saw what the undisturbed run saw, without the poison.
    assert all(np.isfinite(found.meta["mixer"]["losses"]))
    assert_all_the_same("skip", skipping)


@pytest.mark.no_cover
@pytest.mark.timeout(60 + 8 * SCHEDULES)
def test_a_rewind_ends_with_the_bits_of_a_skip_through_all_schedules_of_kills(
    skipping: tuple[Run, Checkpoint],
) -> None:
    runs = assert_all_the_same("rewind", skipping)
    for run in runs:
        steps = [poison.step for poison in run.rewound]
        # A rank that is killed while it goes back may have told nobody.
        assert len(steps) == len(set(steps)) <= len(POISONED)
        assert all(to_step <= poison.step for poison, to_step in run.rewound.items())
    assert sum(len(run.rewound) for run in runs) > 3 * SCHEDULES
