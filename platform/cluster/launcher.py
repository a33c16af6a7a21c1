"""Clusters of several machines: Ray's own launcher, after its file has been checked.

The launcher drives every machine over ssh. Ray answers a wrong key in the file by a dump of its
schema; we name the key and the rule.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from eagleray.platform.config import LoadedConfig
from eagleray.platform.errors import (
    DeadlineExceededError,
    InfeasibleError,
    ServiceError,
    UsageError,
)

# Machines may have to be bought, booted and set up.
TIMEOUT_S = 3600.0


def command(loaded: LoadedConfig, verb: str, ssh: str | None = None) -> list[str]:
    """The launcher's command line for `up` or `down`, after everything that it needs was checked.

    Args:
        loaded: The project; its `cluster.launcher` names the file.
        verb: `up` or `down`.
        ssh: The ssh program; None looks for it on PATH.

    Raises:
        UsageError: The file is missing, or breaks the launcher's rules; the message names the key.
        InfeasibleError: There is no ssh.
    """
    launcher = loaded.config.cluster.launcher
    if launcher is None:
        raise UsageError("cluster.launcher is not set", "name a file such as cluster.yaml")
    path = loaded.resolve(launcher)
    check_file(path)
    if (ssh or shutil.which("ssh")) is None:
        raise InfeasibleError(
            f"the launcher of {path} needs ssh and there is none on PATH",
            "install an ssh client, or start the nodes with `ray start` and set cluster.address",
        )
    return [sys.executable, "-m", "ray.scripts.scripts", verb, "-y", str(path)]


def check_file(path: Path) -> None:
    """Hold a launcher file against Ray's own schema, defaults filled in as Ray does.

    Raises:
        UsageError: It cannot be read or breaks a rule.
    """
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"launcher file {path} cannot be read: {error}") from error
    if not isinstance(tree, dict):
        raise UsageError(f"launcher file {path} is not a mapping", "start from cluster.yaml")
    try:
        validate_config(prepare_config(tree))
    except Exception as error:  # the schema's and the providers' checks raise whatever they like
        # A schema error's own text dumps the whole file; it knows the place and the rule, too.
        keys = [str(part) for part in getattr(error, "absolute_path", ())]
        rule = getattr(error, "message", str(error) or type(error).__name__)
        where = f", {'.'.join(keys)}" if keys else ""
        raise UsageError(
            f"launcher file {path}{where} is refused by Ray: {rule}", "start from cluster.yaml"
        ) from error


def run(argv: list[str], timeout_s: float = TIMEOUT_S) -> None:
    """Run the launcher; what it says goes to our own output.

    Raises:
        ServiceError: It failed; DeadlineExceededError: it took too long.
    """
    try:
        done = subprocess.run(argv, timeout=timeout_s, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineExceededError(
            f"the launcher did not end in {timeout_s:.0f} s", "look at the machines it names"
        ) from None
    if done.returncode:
        raise ServiceError(
            f"the launcher failed with exit code {done.returncode}",
            "its own message stands above",
        )
