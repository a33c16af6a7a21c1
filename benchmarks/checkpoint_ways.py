"""Ways to take checkpoints: the trainer's own, torch.save, DCP's async_save, Ray Train's upload."""

import multiprocessing
import shutil
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from eagleray.actors.checkpoint.snapshot import Snapshotter
from eagleray.actors.checkpoint.snapshot_buffer import SnapshotBuffer
from eagleray.actors.checkpoint.state import Snapshot
from eagleray.actors.checkpoint.store import CheckpointStore
from eagleray.actors.trainer.stepper import Stepper
from eagleray.platform.config import CheckpointConfig
from eagleray.platform.storage import Storage

OURS, TORCH, DCP, RAY = "eagleray", "torch.save", "DCP async", "Ray Train async"


class Way(Protocol):
    """A way to take checkpoints."""

    def begin(self, step: int) -> None:
        """After an update: take one of the state as it is now."""

    def before_update(self) -> None:
        """The state is about to change."""

    def settle(self) -> None:
        """Return when what was begun is on storage."""

    def close(self) -> None:
        """End what it has started."""


class _Ours:
    def __init__(self, stepper: Stepper, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._talk, theirs = context.Pipe()
        self._process = context.Process(target=_keep, args=(folder, theirs), daemon=True)
        self._process.start()
        self._ask("begin", 1)
        self._snapshotter = Snapshotter(stepper.model, stepper.optimizer, self)
        self._last = 0
        self._buffers: dict[Any, SnapshotBuffer] = {}

    def lend(self, num_bytes: int) -> SnapshotBuffer:
        name = self._ask("lend", 1, num_bytes)
        if name not in self._buffers:
            self._buffers[name] = SnapshotBuffer.attach(name)
        return self._buffers[name]

    def submit(self, snapshot: Snapshot) -> None:
        self._ask("submit", snapshot)

    def begin(self, step: int) -> None:
        ids = np.arange(self._last, step)[:, None]
        self._snapshotter.begin(Snapshot(step, 1, 0, 1, {}, ids, self._last))
        self._last = step

    def before_update(self) -> None:
        self._snapshotter.join()

    def settle(self) -> None:
        self._snapshotter.join()
        self._ask("flush", self._last)

    def close(self) -> None:
        self._talk.send(None)
        self._process.join()

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._talk.send((method, arguments))
        answer = self._talk.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _keep(folder: Path, talk: Connection) -> None:
    """A store's process."""
    store = CheckpointStore(Storage(folder), "run", CheckpointConfig(keep=1, write_timeout_s=300))
    while (asked := talk.recv()) is not None:
        method, arguments = asked
        try:
            talk.send(getattr(store, method)(*arguments))
        except Exception as error:  # noqa: BLE001 - raised by who asked
            talk.send(error)
    store.close()


class _TorchSave:
    def __init__(self, stepper: Stepper, folder: Path) -> None:
        self._stepper, self._path = stepper, folder / "checkpoint.pt"

    def begin(self, step: int) -> None:
        new = self._path.with_suffix(".new")
        torch.save(state_of(self._stepper), new)
        new.replace(self._path)

    def before_update(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


class _DcpAsync:
    def __init__(self, stepper: Stepper, folder: Path) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        self._stepper, self._folder = stepper, folder
        # What needs an accelerator is off.
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=True,
            use_non_blocking_copy=False,
        )  # fmt: skip
        self._stager = DefaultStager(options)
        self._under_way: AsyncSaveResponse | None = None
        self._is_staged = True
        self._path: Path | None = None

    def begin(self, step: int) -> None:
        self.settle()
        new = self._folder / f"{step:08d}"
        found = async_save(
            state_of(self._stepper), storage_writer=FileSystemWriter(new, thread_count=1),
            async_stager=self._stager,
        )  # fmt: skip
        assert isinstance(found, AsyncSaveResponse)
        self._under_way, self._is_staged = found, False
        self._old, self._path = self._path, new

    def before_update(self) -> None:
        if self._under_way is not None and not self._is_staged:
            self._under_way.staging_completion.result()
            self._is_staged = True

    def settle(self) -> None:
        if self._under_way is not None:
            self.before_update()
            self._under_way.upload_completion.result()
            self._under_way = None
            if self._old is not None:
                shutil.rmtree(self._old)

    def close(self) -> None:
        self._stager.close()
        dist.destroy_process_group()


class _RayTrain:
    """Only inside a worker of Ray Train's."""

    def __init__(self, stepper: Stepper, folder: Path) -> None:
        self._stepper, self._folder = stepper, folder

    def begin(self, step: int) -> None:
        made = tempfile.mkdtemp(dir=self._folder)
        torch.save(state_of(self._stepper), Path(made) / "state.pt")
        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint.from_directory(made),
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
        )

    def before_update(self) -> None:
        pass

    def settle(self) -> None:
        ray.train.get_all_reported_checkpoints(ray.train.CheckpointConsistencyMode.COMMITTED)

    def close(self) -> None:
        pass


def inside_ray_train(measure: Callable[[Path], None], folder: Path) -> None:
    """Call `measure` in the one worker of a run of Ray Train's, in a cluster of its own."""
    ray.init(num_cpus=2, log_to_driver=False, object_store_memory=200_000_000)
    TorchTrainer(
        lambda config: measure(Path(config["folder"])),
        train_loop_config={"folder": str(folder)},
        scaling_config=ray.train.ScalingConfig(num_workers=1, resources_per_worker={"CPU": 2}),
        run_config=ray.train.RunConfig(
            name="peer",
            storage_path=str(folder / "ray"),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
        ),
    ).fit()
    ray.shutdown()


WAYS: dict[str, Callable[[Stepper, Path], Way]] = {
    OURS: _Ours, TORCH: _TorchSave, DCP: _DcpAsync, RAY: _RayTrain,
}  # fmt: skip


def state_of(stepper: Stepper) -> dict[str, Any]:
    """As a training script would have it."""
    slots = {
        f"{name}.{slot}": value
        for name, parameter in stepper.model.named_parameters()
        for slot, value in stepper.optimizer.state[parameter].items()
    }
    return {"model": dict(stepper.model.state_dict()), "optimizer": slots}
