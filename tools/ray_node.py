"""A further node of a private Ray cluster on this machine, to be added, drained and killed."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.ray_constants as ray_constants
import ray._private.services as services
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.scripts.scripts import main as ray_command_line

from eagleray.platform.cluster import guard
from eagleray.platform.cluster.options import (
    new_options,
    plain_interpreter,
    start_environment,
)
from eagleray.platform.cluster.ports import HOST, free_ports
from eagleray.platform.cluster.versions import VERSION_LABEL, Versions
from eagleray.platform.config import ClusterConfig

_START_S = 120.0
_PREEMPTION = 2  # DRAIN_NODE_REASON_PREEMPTION


class RayNode:
    """One raylet with what it starts; it ends with `close`, and with this process.

    Args:
        address: Of the cluster that this process is a driver of.
        num_cpus: What it offers.
    """

    def __init__(self, address: str, num_cpus: int) -> None:
        self.name = f"node-{secrets.token_hex(4)}"
        self._address = address
        self._mark = secrets.token_hex(8)
        self._folder = tempfile.TemporaryDirectory(prefix="eagleray-node-")
        folder = Path(self._folder.name)
        # The guard removes it when it ends.
        (folder / "files").mkdir()
        options = new_options(ClusterConfig(), is_lasting=False, shows_logs=False)
        token_file = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        agent_ports = free_ports([None] * 3)
        command = [
            *(plain_interpreter(folder), "-P", __file__, "start", "--block"),
            f"--address={address}",
            f"--node-ip-address={HOST}",
            f"--node-name={self.name}",
            f"--num-cpus={num_cpus}",
            f"--metrics-export-port={options.metrics_port}",
            # Not 0: a raylet that is to find out gives its agents only some seconds to tell.
            f"--dashboard-agent-listen-port={agent_ports[0]}",
            f"--dashboard-agent-grpc-port={agent_ports[1]}",
            f"--runtime-env-agent-port={agent_ports[2]}",
            *("--node-manager-port=0", "--object-manager-port=0"),
            *("--min-worker-port=0", "--max-worker-port=0"),
            "--object-store-memory=100000000",
            f"--labels={VERSION_LABEL}={Versions.here().eagleray}",
            "--disable-usage-stats",
        ]
        environment = start_environment(os.environ, options, self._mark, folder, token_file)
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", guard.__file__, self._mark, str(folder / "files"), *command],
                stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=folder,
                env=environment,
                start_new_session=True,
            )  # fmt: skip

    @property
    def id(self) -> str:
        """Ray's id of it; empty as long as it has not joined, and when it is gone."""
        nodes: list[dict[str, object]] = ray.nodes()  # type: ignore[no-untyped-call]
        return next(
            (str(n["NodeID"]) for n in nodes if n["NodeName"] == self.name and n["Alive"]), ""
        )

    def wait_joined(self, timeout_s: float = _START_S) -> None:
        """Return when the cluster knows it."""
        deadline = time.monotonic() + timeout_s
        while not self.id:
            if time.monotonic() > deadline or self._process.poll() is not None:
                said = (Path(self._folder.name) / "log").read_text(errors="replace")
                raise TimeoutError(f"no node after {timeout_s:g} s: {said[-2000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL to its raylet: the node is gone, and what ran there ends by itself."""
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == "raylet":
                    process.send_signal(signal.SIGKILL)

    def drain(self, deadline_s: float) -> None:
        """Give notice that it is taken away."""
        client = GcsClient(address=self._address)
        deadline_ms = int((time.time() + deadline_s) * 1000)
        client.drain_node(self.id, _PREEMPTION, "taken away", deadline_ms)

    def close(self) -> None:
        """End all of it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        guard.end_family(self._mark)
        self._folder.cleanup()


@contextlib.contextmanager
def ray_node(address: str, num_cpus: int) -> Iterator[RayNode]:
    """A node that has joined, for as long as a block lasts."""
    node = RayNode(address, num_cpus)
    try:
        node.wait_joined()
        yield node
    finally:
        node.close()


def _start() -> None:
    """`ray start` on the loopback of a head that listens nowhere else.

    By the variables that keep a head there, it would refuse a second node; see LOOPBACK_VARIABLES.
    """
    get_node = services.get_node

    def get_node_patiently(*args: Any) -> Any:
        """Ray gives a node 30 s to come up; a busy machine takes longer."""
        deadline = time.monotonic() + _START_S
        while True:
            try:
                return get_node(*args)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise

    services.get_node = get_node_patiently
    ray_constants.ENABLE_RAY_CLUSTER = True
    services.get_node_ip_address = lambda *_: HOST
    ray_command_line()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    _start()
