"""How the workers of a run meet: torch.distributed's default process group.

Ray Train's own TorchConfig does the same, but makes the controller load torch, and leaves a worker
that waits for one that died with its place on the cluster. Nothing here imports torch at its top.
"""

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError

_BACKLOG = 4096


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
        try:
            meeting, size = worker_group.execute_single(0, _listen), len(worker_group)
            # `_meet` has its own deadline.
            ray.get(
                [
                    worker_group.execute_single_async(
                        rank, _meet, backend_config, meeting, rank, size
                    )
                    for rank in range(size)
                ]
            )
        except (RayActorError, RayTaskError) as error:
            # Ray Train would keep the place of those that are left, and try no more.
            worker_group.shutdown()
            lines = str(error).strip().splitlines()
            raise WorkerGroupStartupFailedError(
                f"the workers did not meet: {lines[-1] if lines else type(error).__name__}"
            ) from error


class _OnItsDevice:
    """The current CUDA device is per thread."""

    def __enter__(self) -> None:
        _set_device()

    def __exit__(self, *_: object) -> None:
        pass


_listening: list[socket.socket] = []


def _listen() -> tuple[str, int]:
    """Runs in rank 0: the address of the store where the workers will meet.

    Torch would let its store, which asks for no token, listen on every interface of the machine.
    """
    host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    listener = socket.create_server((host, 0), family=_family(host), backlog=_BACKLOG)
    _listening[:] = [listener]
    return host, int(listener.getsockname()[1])


def _meet(config: ProcessGroupConfig, meeting: tuple[str, int], rank: int, world_size: int) -> None:
    """Runs in a worker."""
    import torch.distributed as dist  # noqa: PLC0415 - see the module's text

    _set_device()
    host, port = meeting
    timeout = timedelta(seconds=config.timeout_s)
    listener = _listening.pop().detach() if rank == 0 else None
    store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not in its __all__
        host, port, world_size, rank == 0, timeout, master_listen_fd=listener
    )
    dist.init_process_group(
        config.backend, store=store, rank=rank, world_size=world_size, timeout=timeout
    )


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _set_device() -> None:
    import torch  # noqa: PLC0415

    if torch.cuda.is_available():
        import ray.train.torch  # noqa: PLC0415

        device = ray.train.torch.get_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
