"""The training loop of benchmarks.recovery, as torchrun and Ray Train have it.

    python -m benchmarks.recovery_peers torchrun FOLDER     under torch.distributed.run
    python -m benchmarks.recovery_peers ray FOLDER          starts a Ray cluster of its own

Each rank adds a line to FOLDER/steps after each optimizer step: time, step, rank, pid. A checkpoint
is written every 10 steps, as their documentation has it.
"""

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder

MODEL = DecoderConfig(
    vocab_size=512, dim=192, num_layers=4, num_heads=6, num_kv_heads=2, head_dim=32, ffn_dim=512,
    max_seq_len=128,
)  # fmt: skip
SEQ_LEN, BATCH, WORLD_SIZE, EVERY = 64, 16, 2, 10
MAX_STEPS = 1_000_000


class Parts:
    """Model, optimizer and batches of one rank."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self.model: nn.Module = Decoder(MODEL)
        self.model.init_weights(torch.Generator().manual_seed(0))  # type: ignore[operator]
        self.rank = rank

    def begin(self, path: Path | None) -> int:
        """Make the optimizer, and go on from a checkpoint, if there is one; its step."""
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if path is None or not path.exists():
            return 0
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def step(self, step: int, folder: Path) -> None:
        """Take a step, and note it."""
        self.optimizer.zero_grad()
        self.loss(step).backward()
        self.optimizer.step()
        note(folder, step, self.rank)

    def save(self, step: int, path: Path) -> None:
        """Write a checkpoint."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "step": step}, path)

    def loss(self, step: int) -> torch.Tensor:
        """Over this rank's part of a step's batch."""
        draw = torch.Generator().manual_seed(step * WORLD_SIZE + self.rank)
        rows = torch.randint(0, 512, (BATCH // WORLD_SIZE, SEQ_LEN + 1), generator=draw)
        logits = self.model(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def note(folder: Path, step: int, rank: int) -> None:
    """One line, in one write."""
    descriptor = os.open(folder / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, f"{time.time()} {step} {rank} {os.getpid()}\n".encode())
    os.close(descriptor)


def with_torchrun(folder: Path) -> None:
    """Restarted as a whole by the agent; goes on from the last checkpoint."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parts, path = Parts(rank), folder / "checkpoint.pt"
    parts.model = nn.parallel.DistributedDataParallel(parts.model)
    for step in range(parts.begin(path), MAX_STEPS):
        parts.step(step, folder)
        if (step + 1) % EVERY == 0 and rank == 0:
            parts.save(step + 1, folder / "checkpoint.new")
            (folder / "checkpoint.new").rename(path)


def _train_with_ray(config: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch

    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    parts = Parts(rank)
    parts.model = ray.train.torch.prepare_model(parts.model)
    checkpoint = ray.train.get_checkpoint()
    with checkpoint.as_directory() if checkpoint else contextlib.nullcontext() as saved:
        start = parts.begin(Path(saved) / "state.pt" if saved else None)
    for step in range(start, MAX_STEPS):
        parts.step(step, folder)
        if (step + 1) % EVERY == 0:
            with tempfile.TemporaryDirectory() as made:
                kept = None
                if rank == 0:
                    parts.save(step + 1, Path(made) / "state.pt")
                    kept = ray.train.Checkpoint.from_directory(made)
                ray.train.report({"step": step + 1}, checkpoint=kept)


def with_ray(folder: Path) -> None:
    """Ray Train, with its health check as tight as it goes well."""
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=4, log_to_driver=False, object_store_memory=200_000_000)
    TorchTrainer(
        _train_with_ray,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=WORLD_SIZE),
        run_config=RunConfig(
            name="peer",
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    way, place = sys.argv[1], Path(sys.argv[2])
    {"torchrun": with_torchrun, "ray": with_ray}[way](place)
