"""The launcher's file is checked before any machine is touched."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagleray.platform.cluster.launcher import check_file, command, run
from eagleray.platform.config import LoadedConfig, load_config
from eagleray.platform.errors import (
    DeadlineExceededError,
    InfeasibleError,
    ServiceError,
    UsageError,
)

SHIPPED = Path(__file__).parents[3] / "cluster.yaml"


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    (tmp_path / "cluster.yaml").write_bytes(SHIPPED.read_bytes())
    (tmp_path / "eagleray.yaml").write_text("name: t\ncluster: {launcher: cluster.yaml}\n")
    return load_config(tmp_path)


def changed(tmp_path: Path, **keys: Any) -> Path:
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(SHIPPED.read_text()), **keys}))
    return path


def test_the_shipped_file_passes_rays_own_schema() -> None:
    check_file(SHIPPED)


def test_every_node_of_the_shipped_file_requires_the_token() -> None:
    tree = yaml.safe_load(SHIPPED.read_text())
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        starts = [line for line in tree[key] if "ray start" in line]
        assert starts
        assert all("RAY_AUTH_MODE=token" in line for line in starts)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"max_wrkers": 2}, "max_wrkers"),
        ({"cluster_name": None}, "cluster_name is refused by Ray"),
        ({"provider": {"type": "nope"}}, "Unsupported node provider: nope"),
    ],
)
def test_a_broken_file_is_refused_by_its_key(
    tmp_path: Path, keys: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        check_file(changed(tmp_path, **keys))


@pytest.mark.parametrize("content", [None, "- a list", "a: ["])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "c.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match="launcher file"):
        check_file(path)


def test_the_command_names_the_checked_file(loaded: LoadedConfig) -> None:
    argv = command(loaded, "up", ssh="/usr/bin/ssh")
    assert argv[0] == sys.executable
    assert argv[-3:] == ["up", "-y", str(loaded.root / "cluster.yaml")]


def test_a_missing_ssh_is_infeasible(
    loaded: LoadedConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InfeasibleError, match="needs ssh"):
        command(loaded, "up")


def test_a_launcher_that_fails_is_told_by_its_exit_code() -> None:
    with pytest.raises(ServiceError, match="exit code 3"):
        run([sys.executable, "-c", "raise SystemExit(3)"])


def test_a_launcher_that_hangs_is_ended_at_the_deadline() -> None:
    with pytest.raises(DeadlineExceededError):
        run([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.3)
