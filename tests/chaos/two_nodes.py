"""A Ray cluster of two nodes, each in a network namespace of its own, and the link between them.

    head (10.77.0.1) --- veth pair --- other (10.77.0.2)

A node that ends is started again, as a supervisor of machines does. Needs root.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from eagleray.platform.cluster import start
from eagleray.platform.cluster.options import TRAIN_VARIABLES, plain_interpreter
from eagleray.platform.cluster.tokens import write_token

HEAD, OTHER = "10.77.0.1", "10.77.0.2"
PORT = 6379
# A raylet waits for 15 s at most to hear which ports its agents have chosen, and then aborts; on a
# busy machine they take longer to start. Each node has all ports for itself.
_PORTS = (
    "--dashboard-agent-grpc-port=7001", "--dashboard-agent-listen-port=7002",
    "--runtime-env-agent-port=7003", "--metrics-export-port=7004",
)  # fmt: skip
_END_S, _POLL_S = 30.0, 0.1
_BIN = Path(sys.executable).parent


class TwoNodes:
    """Two nodes of one CPU; as a context manager, nothing of them is left.

    Args:
        folder: For the token and logs.
        temp: Ray's folder; a short path, as sockets lie below it.
    """

    def __init__(self, folder: Path, temp: Path) -> None:
        self._folder, self._temp = folder, temp
        mark = os.getpid()
        # Names of network interfaces have 15 characters at most.
        self._spaces = {HEAD: f"er{mark}a", OTHER: f"er{mark}b"}
        self._is_over = False
        self._keepers: list[threading.Thread] = []
        self._python = plain_interpreter(temp)
        token = folder / "token"
        write_token(token)
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            **TRAIN_VARIABLES,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            # A busy machine starts nodes slowly.
            "RAY_raylet_start_wait_time_s": "120",
            "RAY_agent_register_timeout_ms": "120000",
            # A node that does not answer for some ten seconds is dead.
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": "4",
        }

    def __enter__(self) -> "TwoNodes":
        try:
            self._make_link()
            self._keep(
                HEAD, "--head", f"--port={PORT}", f"--temp-dir={self._temp}", "--no-monitor",
                "--include-dashboard=false", "--include-log-monitor=false",
            )  # fmt: skip
            self._keep(OTHER, f"--address={HEAD}:{PORT}")
        except BaseException:  # whatever ends it, namespaces and nodes must not outlive the test
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def command(self, address: str, *command: str) -> list[str]:
        """What runs a command on a node."""
        return ["ip", "netns", "exec", self._spaces[address], *command]

    def set_link(self, state: str) -> None:
        """Cut the link (`down`), or mend it (`up`)."""
        _run("ip", "-n", self._spaces[HEAD], "link", "set", self._spaces[HEAD], state)

    def are_up(self) -> bool:
        """Whether both nodes have started."""
        return self._is_up(HEAD) and self._is_up(OTHER)

    def is_given_up(self) -> bool:
        """Whether the head takes the other node for dead."""
        log = self._temp / "session_latest" / "logs" / "gcs_server.out"
        return f"address: {OTHER} " in log.read_text() and "marked dead" in log.read_text()

    def end(self) -> None:
        """Kill what runs on the nodes, and remove them."""
        self._is_over = True
        for space in self._spaces.values():
            self._kill_all(space)
        for keeper in self._keepers:
            keeper.join(_END_S)
        for space in self._spaces.values():
            self._kill_all(space)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def _make_link(self) -> None:
        one, other = self._spaces.values()
        for space in (one, other):
            _run("ip", "netns", "add", space)
        _run(
            *("ip", "link", "add", one, "netns", one, "type", "veth"),
            *("peer", "name", other, "netns", other),
        )
        for address, space in self._spaces.items():
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", space)
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "link", "set", space, "up")

    def _keep(self, address: str, *options: str) -> None:
        command = self.command(
            address, self._python, "-P", start.__file__, "start", "--block",
            f"--node-ip-address={address}", "--num-cpus=1", "--num-gpus=0",
            "--object-store-memory=100000000", "--disable-usage-stats", *_PORTS, *options,
        )  # fmt: skip
        space = self._spaces[address]
        environment = {**self.environment, "GLOO_SOCKET_IFNAME": space}

        def keep() -> None:
            # Before there is a head, its tries would only keep the machine busy.
            while address == OTHER and not self._is_up(HEAD) and not self._is_over:
                time.sleep(_POLL_S)
            while not self._is_over:
                with (self._folder / f"{address}.log").open("ab") as log:
                    subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)

        keeper = threading.Thread(target=keep, name=f"node {address}", daemon=True)
        keeper.start()
        self._keepers.append(keeper)

    def _is_up(self, address: str) -> bool:
        log = self._folder / f"{address}.log"
        return log.exists() and "Ray runtime started" in log.read_text()

    def _kill_all(self, space: str) -> None:
        found = subprocess.run(
            ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
        )
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def why_not() -> str:
    """Why there can be no such cluster here; empty if there can."""
    probe = f"er{os.getpid()}p"
    try:
        command = ["ip", "netns", "add", probe]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no `ip` (iproute2)"
    if made.returncode:
        return f"network namespaces cannot be made (CAP_NET_ADMIN?): {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return ""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
