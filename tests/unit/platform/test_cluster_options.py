"""The command line and environment of a head: loopback, token, nothing inherited by mistake."""

import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagleray.platform.cluster.guard import MARK_VARIABLE
from eagleray.platform.cluster.options import (
    HeadOptions,
    new_options,
    plain_interpreter,
    start_command,
    start_environment,
)
from eagleray.platform.cluster.start import configure
from eagleray.platform.config import ClusterConfig

OPTIONS = HeadOptions(
    num_cpus=3,
    num_gpus=None,
    object_store_bytes=100_000_000,
    gcs_port=20_000,
    dashboard_port=20_001,
    metrics_port=20_002,
    dashboard_metrics_port=20_003,
    monitor_metrics_port=20_004,
    is_lasting=True,
)
FOLDER, TOKEN = Path("/tmp/eagleray-test"), Path("/tmp/token")


def environment(base: dict[str, str]) -> dict[str, str]:
    return start_environment(base, OPTIONS, "mark", FOLDER, TOKEN)


def test_everything_binds_to_loopback(tmp_path: Path) -> None:
    command = start_command(OPTIONS, tmp_path)
    assert "--node-ip-address=127.0.0.1" in command
    assert "--dashboard-host=127.0.0.1" in command
    assert environment({})["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


def test_what_was_configured_is_passed_and_what_was_not_is_left_to_ray(tmp_path: Path) -> None:
    folders = (tmp_path / str(number) for number in itertools.count())

    def start(options: HeadOptions) -> list[str]:
        folder = next(folders)
        folder.mkdir()
        return start_command(options, folder)

    command = start(OPTIONS)
    assert "--num-cpus=3" in command
    assert "--object-store-memory=100000000" in command
    assert not [word for word in command if word.startswith("--num-gpus")]
    assert "--num-gpus=2" in start(replace(OPTIONS, num_gpus=2))


@pytest.mark.parametrize("is_brief", [True, False])
def test_only_a_cluster_for_one_command_does_without_monitor_and_log_monitor(
    tmp_path: Path, is_brief: bool
) -> None:
    options = replace(OPTIONS, is_lasting=not is_brief, shows_logs=not is_brief)
    without = {"--no-monitor", "--include-log-monitor=false"}
    assert (without & set(start_command(options, tmp_path))) == (without if is_brief else set())


def test_the_token_is_required_and_read_from_our_file() -> None:
    made = environment({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "another"})
    assert made["RAY_AUTH_MODE"] == "token"
    assert made["RAY_AUTH_TOKEN_PATH"] == str(TOKEN)
    assert "RAY_AUTH_TOKEN" not in made


def test_temporary_files_go_with_the_cluster_unless_the_user_chose_a_place() -> None:
    assert environment({})["TMPDIR"] == str(FOLDER)
    assert environment({"TMPDIR": "/tmp"})["TMPDIR"] == str(FOLDER)
    assert environment({"TMPDIR": "/scratch/large"})["TMPDIR"] == "/scratch/large"


def test_the_cluster_that_we_run_in_ourselves_does_not_leak_into_the_new_one() -> None:
    outer = {"RAY_ADDRESS": "1.2.3.4:6379", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "HOME": "/home/me"}
    made = environment(outer)
    assert "RAY_ADDRESS" not in made
    assert "RAY_JOB_CONFIG_JSON_ENV_VAR" not in made
    assert made["HOME"] == "/home/me"


def test_relative_module_paths_still_lead_to_the_same_folders() -> None:
    made = environment({"PYTHONPATH": f"src{os.pathsep}/abs"})
    assert made["PYTHONPATH"].split(os.pathsep) == [os.path.abspath("src"), "/abs"]


def test_training_is_tuned_and_the_processes_are_marked() -> None:
    made = environment({})
    assert float(made["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"]) <= 0.2
    assert made[MARK_VARIABLE] == "mark"


@pytest.mark.parametrize("is_lasting", [True, False])
def test_new_options_follow_the_configuration(is_lasting: bool) -> None:
    cluster = ClusterConfig(num_cpus=5, object_store_bytes=77_000_000)
    options = new_options(cluster, is_lasting=is_lasting, shows_logs=False)
    assert (options.num_cpus, options.object_store_bytes) == (5, 77_000_000)
    assert len(set(options.ports)) == 5


def test_the_hook_leaves_the_client_server_out_of_a_head_only() -> None:
    head, worker = (SimpleNamespace(ray_client_server_port=10001) for _ in range(2))
    configure(head, head=True)
    configure(worker, head=False)
    assert head.ray_client_server_port is None
    assert worker.ray_client_server_port == 10001


def test_an_interpreter_behind_a_space_is_reached_by_a_path_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "a folder" / "venv"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").touch()
    short = tmp_path / "short"
    short.mkdir()
    monkeypatch.setattr(sys, "executable", str(home / "bin" / "python"))
    found = plain_interpreter(short)
    assert found == str(short / "env" / "bin" / "python")
    assert Path(found).exists()
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    assert plain_interpreter(short) == "/usr/bin/python3"
