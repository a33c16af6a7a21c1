"""The verbs up, down and status where no cluster runs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from eagleray.cli.app import app
from eagleray.platform.errors import ServiceError

SHIPPED = Path(__file__).parents[3] / "cluster.yaml"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "eagleray.yaml").write_text("name: test\ncluster: {num_cpus: 3}\n")
    return tmp_path


def run(project: Path, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--config", str(project)])


def test_status_says_how_to_start_one(project: Path) -> None:
    assert "start one with `eagleray up`" in run(project, "status").stdout


def test_status_for_scripts_names_the_phase(project: Path) -> None:
    assert json.loads(run(project, "status", "--json").stdout)["phase"] == "none"


def test_exports_of_nothing_are_a_comment(project: Path) -> None:
    assert run(project, "status", "--env").stdout.startswith("#")


def test_a_dry_up_says_what_it_would_start(project: Path) -> None:
    assert json.loads(run(project, "up", "--dry-run", "--json").stdout)["num_cpus"] == 3
    assert json.loads(run(project, "status", "--json").stdout)["phase"] == "none"


def test_down_without_a_cluster_is_fine(project: Path) -> None:
    for words in (("down",), ("down", "--dry-run")):
        result = run(project, *words)
        assert result.exit_code == 0
        assert "no cluster is up" in result.stdout


@pytest.mark.parametrize("verb", ["up", "down"])
def test_a_launcher_file_drives_rays_launcher(project: Path, verb: str) -> None:
    (project / "cluster.yaml").write_bytes(SHIPPED.read_bytes())
    (project / "eagleray.yaml").write_text("name: t\ncluster: {launcher: cluster.yaml}\n")
    argv = json.loads(run(project, verb, "--dry-run", "--json").stdout)["command"]
    assert argv[-3:] == [verb, "-y", str(project / "cluster.yaml")]


def test_status_of_a_configured_address_fails_at_once_when_nothing_is_there(project: Path) -> None:
    (project / "eagleray.yaml").write_text("name: t\ncluster: {address: '127.0.0.1:1'}\n")
    result = run(project, "status")
    assert isinstance(result.exception, ServiceError)
    assert "nothing listens" in result.exception.what
