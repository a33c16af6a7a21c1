"""What we give Ray Train's controller: how ranks meet, what it asks for, whom it tells of faults.

Nothing here imports torch, nor what does: the controller's process starts seconds earlier without,
and it must be there before a worker can start.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
from ray._common.network_utils import build_address  # type: ignore[attr-defined]
from ray.train import UserCallback
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy


@dataclass
class ProcessGroupConfig(BackendConfig):
    """torch.distributed's default process group over all workers.

    Attributes:
        backend: `gloo` or `nccl`.
        timeout_s: After so long without the other ranks an operation fails.
    """

    backend: str
    timeout_s: float

    @property
    def backend_cls(self) -> type[Backend]:
        """Ray Train's hook."""
        return _ProcessGroup

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """Ray Train's hook: runs in the thread that trains."""
        return _OnItsDevice


class _ProcessGroup(Backend):
    """Lets the workers meet at rank 0; each ends with its process, so nothing is taken down."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        host, port = worker_group.execute_single(0, get_address_and_port)
        meeting, size = f"tcp://{build_address(host, port)}", len(worker_group)
        ray.get(
            [
                worker_group.execute_single_async(rank, _meet, backend_config, meeting, rank, size)
                for rank in range(size)
            ]
        )


class _OnItsDevice:
    """The current CUDA device is per thread."""

    def __enter__(self) -> None:
        _set_device()

    def __exit__(self, *_: object) -> None:
        pass


def _meet(config: ProcessGroupConfig, meeting: str, rank: int, world_size: int) -> None:
    """Runs in a worker."""
    import torch.distributed as dist  # noqa: PLC0415 - see the module's text

    _set_device()
    dist.init_process_group(
        config.backend,
        init_method=meeting,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=config.timeout_s),
    )


def _set_device() -> None:
    import torch  # noqa: PLC0415

    if torch.cuda.is_available():
        import ray.train.torch  # noqa: PLC0415

        device = ray.train.torch.get_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)


class FixedCluster(FixedScalingPolicy):
    """The wished number of workers, without a request to an autoscaler that is not there."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Ray Train's hook."""

    def _maybe_send_resource_request(self) -> None:
        pass


class FaultCallback(UserCallback):
    """Tells the recorder of workers that died or failed."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        """Ray Train's hook."""
        message = "; ".join(
            f"rank {rank}: {_first_line(error)}"
            for rank, error in sorted(worker_exceptions.items())
        )
        # Not waited for: the controller must go on to restart the workers.
        self._recorder.call.remote("fault", message[:2000], sorted(worker_exceptions))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__
