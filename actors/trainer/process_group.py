"""How the processes of a run meet: torch.distributed's default process group, once per attempt.

Each attempt has a store of its own, at a port of its own, held by the process of rank 0: nothing of
an attempt that is over can be read in the next.

A process that waits for a peer in a collective waits for its connection. If the peer dies, the
connection ends; if the peer waits for one that died, or its machine is unreachable, it does not.
`Group.sever` ends the connections from this side, from any thread, and the wait with them.
"""

import contextlib
import os
import socket
import stat
import threading
from datetime import timedelta

import ray
import torch
import torch.distributed as dist

from eagleray.actors.trainer.collectives import PeerLostError, peers_needed
from eagleray.actors.trainer.seams import Seat

_BACKLOG = 4096
_DESCRIPTORS = "/proc/self/fd"

Address = tuple[str, int]


class Group:
    """This process's part in the group of one attempt.

    Args:
        backend: `gloo` or `nccl`.
        timeout_s: After so long without the other ranks an operation fails.
    """

    def __init__(self, backend: str, timeout_s: float) -> None:
        self._backend, self._timeout = backend, timedelta(seconds=timeout_s)
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._before: set[int] | None = None  # inodes, while the ranks meet
        self._own: set[int] = set()
        self._is_severed = False

    def listen(self) -> Address:
        """Of rank 0: where the ranks will meet.

        Torch would let its store, which asks for no token, listen on every interface.
        """
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        return host, int(self._listener.getsockname()[1])

    def meet(self, address: Address, seat: Seat) -> None:
        """Wait for all ranks, and make the default process group.

        Raises:
            PeerLostError: One of them did not come.
        """
        with self._lock:
            if self._is_severed:
                raise PeerLostError("the attempt was over before the ranks met")
            self._before = set(_connections())
        host, port = address
        listener = self._listener.detach() if self._listener else None
        self._listener = None
        with peers_needed():
            store = dist.TCPStore(  # type: ignore[attr-defined]  # public, not in its __all__
                host, port, seat.world_size, seat.rank == 0, self._timeout,
                wait_for_workers=False, master_listen_fd=listener,
            )  # fmt: skip
            dist.init_process_group(
                self._backend,
                store=store,
                rank=seat.rank,
                world_size=seat.world_size,
                timeout=self._timeout,
            )
        with self._lock:
            self._own, self._before = set(_connections()) - self._before, None

    def sever(self) -> None:
        """End the connections to the other ranks, and every wait for them; from any thread."""
        with self._lock:
            self._is_severed = True
            for inode, descriptor in _connections().items():
                is_own = inode in self._own
                # What else opens a connection while the ranks meet has to open it again.
                is_new = self._before is not None and inode not in self._before
                if is_own or is_new:
                    with (
                        contextlib.suppress(OSError),
                        socket.socket(fileno=os.dup(descriptor)) as s,
                    ):
                        s.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Take the process group down; the other ranks see that this one is gone."""
        if self._listener is not None:
            self._listener.close()
        self.sever()
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


def set_device(gpu: int | None) -> None:
    """Let this thread, and whatever asks for the current device, use a GPU of the node."""
    if gpu is not None:
        torch.cuda.set_device(gpu)


def _connections() -> dict[int, int]:
    """Inode -> descriptor of every socket to another process over the network."""
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        with contextlib.suppress(OSError):
            state = os.fstat(int(name))
            if not stat.S_ISSOCK(state.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as opened:
                is_listening = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if opened.family in (socket.AF_INET, socket.AF_INET6) and not is_listening:
                    found[state.st_ino] = int(name)
    return found
