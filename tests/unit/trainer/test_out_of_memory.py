"""A process that runs out of memory is told apart from others, and its error says what it needs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from eagleray.actors.trainer.collectives import PeerLostError, peers_needed
from eagleray.actors.trainer.memory_needs import (
    MemoryNeeds,
    asked_for,
    is_out_of_memory,
    out_of_memory,
)
from eagleray.actors.trainer.oom_kills import OomKills
from eagleray.actors.trainer.seams import LoopSpec
from eagleray.actors.trainer.worker import Watch
from eagleray.platform.config import ProjectConfig, with_overrides
from eagleray.platform.model.config import DecoderConfig

MODEL = DecoderConfig(
    vocab_size=1000, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_dim=128,
    max_seq_len=64,
)  # fmt: skip
_PEBIBYTE = 2**50


def spec(**changes: object) -> LoopSpec:
    base = {f"train.{key}": value for key, value in changes.items()}
    return LoopSpec(with_overrides(ProjectConfig(name="t"), base).train, MODEL, 64)


def failure(allocate: object) -> BaseException:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()  # type: ignore[operator]
    return caught.value


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(_PEBIBYTE, dtype=torch.uint8),
        lambda: np.empty(_PEBIBYTE, dtype=np.uint8),
        lambda: bytearray(_PEBIBYTE),
    ],
    ids=["torch", "numpy", "python"],
)
def test_a_real_allocation_that_fails_is_recognized(allocate: object) -> None:
    assert is_out_of_memory(failure(allocate))


def test_what_an_allocator_was_asked_for_is_read_from_its_words() -> None:
    torchs = failure(lambda: torch.empty(3 * _PEBIBYTE, dtype=torch.uint8))
    numpys = failure(lambda: np.empty(_PEBIBYTE, dtype=np.uint8))
    assert asked_for(str(torchs)) == f"{3 * _PEBIBYTE / 1e9:.3g} GB"
    assert asked_for(str(numpys)) == "1.00 PiB"
    assert asked_for("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0") == "2.50 GiB"
    assert asked_for("") == ""


def test_errors_of_torch_on_a_gpu_are_recognized_and_others_are_not() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(PeerLostError("a collective failed: connection closed"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_lack_of_memory_within_a_collective_is_no_lost_peer() -> None:
    with pytest.raises(torch.OutOfMemoryError), peers_needed():
        raise torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(PeerLostError), peers_needed():
        raise RuntimeError("Connection closed by peer")


def test_the_error_says_what_is_needed_and_what_to_lower() -> None:
    error = out_of_memory("RuntimeError when it asked for 5 GB", spec(micro_batch_size=8))
    assert "it asked for 5 GB" in error.what
    for part in ("weights", "gradients", "AdamW", "activations", "micro_batch_size 8"):
        assert part in error.what
    assert "lower train.micro_batch_size (now 8)" in error.fix
    assert "train.spares: 0" in error.fix
    least = out_of_memory("x", spec(micro_batch_size=1, spares=0))
    assert "train.micro_batch_size" not in least.fix
    assert "spares" not in least.fix


def test_needs_grow_with_what_they_depend_on() -> None:
    one, two = (MemoryNeeds.of(spec(micro_batch_size=n, batch_size=32)) for n in (4, 8))
    assert two.activations == 2 * one.activations
    assert (one.weights, one.optimizer) == (4 * MODEL.num_parameters, 8 * MODEL.num_parameters)
    # A rank runs no more sequences at once than it has.
    split = MemoryNeeds.of(spec(micro_batch_size=16, batch_size=32, num_workers=16))
    assert split.activations == one.activations // 2


def attempts_of_starved(tmp_path: Path, step: int) -> list[dict[str, object]]:
    """Attempts of a process whose memory is limited from a step on, and again without limit."""
    command = [sys.executable, "-m", "tests.unit.trainer.starved_process", str(tmp_path), str(step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    attempts: list[dict[str, object]] = json.loads(done.stdout.splitlines()[-1])
    return attempts


@pytest.mark.timeout(180)
def test_where_the_first_step_finds_no_memory_the_run_ends_with_that_error(tmp_path: Path) -> None:
    (first, *_) = attempts_of_starved(tmp_path, 0)
    assert first["end"] == "FAILED"
    # The allocator's words, what is needed, and what to do.
    assert "ran out of memory: an allocation of 65.5 MB failed (RuntimeError)" in str(
        first["fatal"]
    )
    assert "activations" in str(first["fatal"])
    assert "lower train.micro_batch_size (now 32)" in str(first["fix"])


@pytest.mark.timeout(180)
def test_a_later_step_that_finds_none_costs_an_attempt_and_no_state_is_kept_of_it(
    tmp_path: Path,
) -> None:
    first, second = attempts_of_starved(tmp_path, 3)
    assert (first["end"], first["fatal"], first["standing"]) == ("INTERRUPTED", None, None)
    assert "ran out of memory" in str(first["message"])
    assert (second["end"], second["step"]) == ("FINISHED", 5)


def kernel_files(root: Path, group: str, count: int) -> None:
    path = root / "sys/fs/cgroup" / group
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"low 0\nmax 12\noom 3\noom_kill {count}\noom_group_kill 0\n")


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/pods/a", "pods/a/memory.events"),
        ("0::/pods/a", "unified/pods/a/memory.events"),
        ("4:memory:/pods/a", "memory/pods/a/memory.oom_control"),
    ],
)
def test_the_counter_of_the_processs_own_group_tells_that_the_kernel_struck(
    tmp_path: Path, line: str, file: str
) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text(f"3:cpuset:/\n{line}\n")
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 7\noom_kill 5\n")
    kernel_files(tmp_path, file, 2)
    kills = OomKills(7, tmp_path)
    assert not kills.risen()
    # Another group's.
    (tmp_path / "proc/vmstat").write_text("oom_kill 6\n")
    assert not kills.risen()
    kernel_files(tmp_path, file, 3)
    assert kills.risen()


def test_without_groups_the_machines_counter_tells_and_without_any_nothing_does(
    tmp_path: Path,
) -> None:
    assert not OomKills(7, tmp_path).risen()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("oom_kill 5\n")
    kills = OomKills(7, tmp_path)
    assert not kills.risen()
    (tmp_path / "proc/vmstat").write_text("oom_kill 6\n")
    assert kills.risen()


def test_a_process_that_dies_while_the_counter_rises_was_killed_for_memory(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("oom_kill 5\n")
    with subprocess.Popen(["sleep", "60"]) as process:
        watch = Watch(process.pid, None, 10.0, OomKills(process.pid, tmp_path))
        (tmp_path / "proc/vmstat").write_text("oom_kill 6\n")
        assert not watch.is_killed_for_memory()
        process.kill()
        process.wait()
        assert watch.is_killed_for_memory()
        assert not watch.is_killed_for_memory()
