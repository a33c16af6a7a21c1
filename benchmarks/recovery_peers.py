"""The training loop of benchmarks.recovery, as torchrun, Ray Train and torchft have it.

    python -m benchmarks.recovery_peers torchrun FOLDER     under torch.distributed.run
    python -m benchmarks.recovery_peers ray FOLDER          starts a Ray cluster of its own
    python -m benchmarks.recovery_peers ray-elastic FOLDER  one to two workers, in a cluster
    python -m benchmarks.recovery_peers lighthouse FOLDER   torchft's; its address in FOLDER
    python -m benchmarks.recovery_peers torchft FOLDER RANK

Each rank adds a line to FOLDER/steps after each optimizer step: time, step, rank, pid. A checkpoint
is written every 10 steps, as their documentation has it; torchft's survivor needs none.
"""

import contextlib
import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.recovery_common import BATCH, EVERY, MODEL, SEQ_LEN, WORLD_SIZE, note
from torch import nn

from eagleray.platform.model.decoder import Decoder

MAX_STEPS = 1_000_000
LIGHTHOUSE = "lighthouse"


class Parts:
    """Model, optimizer and batches of one rank."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        self.model: nn.Module = Decoder(MODEL)
        self.model.init_weights(torch.Generator().manual_seed(0))  # type: ignore[operator]
        self.inner = self.model
        """Without what wraps it."""
        self.rank = rank

    def begin(self, path: Path | None) -> int:
        """Make the optimizer, and go on from a checkpoint, if there is one; its step."""
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if path is None or not path.exists():
            return 0
        state = torch.load(path, weights_only=True)
        self.inner.load_state_dict(state["model"])
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
        state = {"model": self.inner.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "step": step}, path)

    def loss(self, step: int) -> torch.Tensor:
        """Over this rank's part of a step's batch."""
        draw = torch.Generator().manual_seed(step * WORLD_SIZE + self.rank)
        rows = torch.randint(0, 512, (BATCH // WORLD_SIZE, SEQ_LEN + 1), generator=draw)
        logits = self.model(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


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

    ray.init(num_cpus=4, log_to_driver=False, object_store_memory=200_000_000)
    _fit_with_ray(folder, num_workers=WORLD_SIZE)


def with_elastic_ray(folder: Path) -> None:
    """The same in the cluster that the environment names, with as many workers as have room."""
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
    # After a loss it tries the old number first; by default for 60 s.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "5"
    import ray

    ray.init(log_to_driver=False)
    _fit_with_ray(folder, num_workers=(1, WORLD_SIZE), elastic_resize_monitor_interval_s=5.0)


def _fit_with_ray(folder: Path, **scaling: Any) -> None:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        _train_with_ray,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(**scaling),
        run_config=RunConfig(
            name="peer",
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def with_torchft(folder: Path, rank: int) -> None:
    """One replica group of one process; the other goes on alone while it is gone."""
    import torchft

    lighthouse = (folder / LIGHTHOUSE).read_text()

    class Replicated(torchft.DistributedDataParallel):  # type: ignore[misc]
        # That of torchft 0.2.0 ends the survivor by an assertion: where gloo tells of a dead peer
        # as it is waited for, the future that its hook hands on has not been made.
        @staticmethod
        def _comm_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            state.allreduce(bucket.buffer()).wait()
            done = torch.futures.Future[torch.Tensor]()
            done.set_result(bucket.buffer())
            return done

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parts = Parts(rank)
    parts.begin(None)
    plain, inner = parts.optimizer, parts.model

    def load(state: dict[str, Any]) -> None:
        inner.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": inner.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        replica_id=f"replica_{rank}", lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    parts.model = Replicated(manager, inner)
    parts.optimizer = torchft.Optimizer(manager, plain)
    while (before := manager.current_step()) < MAX_STEPS:
        parts.optimizer.zero_grad()
        parts.loss(before).backward()
        parts.optimizer.step()
        # A step that met a death is not applied; one that took the state over is another one.
        if manager.current_step() > before:
            note(folder, manager.current_step() - 1, rank)


def keep_lighthouse(folder: Path) -> None:
    """Tell where it is, and stay."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50,
        heartbeat_timeout_ms=1000,
    )  # fmt: skip
    (folder / "lighthouse.new").write_text(server.address())
    (folder / "lighthouse.new").rename(folder / LIGHTHOUSE)
    signal.pause()


if __name__ == "__main__":
    way, place = sys.argv[1], Path(sys.argv[2])
    if way == "torchft":
        with_torchft(place, int(sys.argv[3]))
    else:
        ways = {
            "torchrun": with_torchrun,
            "ray": with_ray,
            "ray-elastic": with_elastic_ray,
            "lighthouse": keep_lighthouse,
        }
        ways[way](place)
