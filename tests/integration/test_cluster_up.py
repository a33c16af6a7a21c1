"""One cluster from `eagleray up` to `eagleray down`: found, attached to, refused, used for jobs."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from eagleray.cli.app import app
from eagleray.platform.cluster import (
    ClusterRecord,
    ClusterState,
    down,
    guard,
    open_dashboard,
    status,
    up,
)
from eagleray.platform.config import LoadedConfig, load_config
from eagleray.platform.errors import AuthenticationError, NotFoundError
from eagleray.platform.jobs import JobRecords, Jobs, JobStatus, prepare
from eagleray.platform.storage import Storage

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
ATTACH = """\
import json, sys, time
import ray
from eagleray.platform.cluster import Demand, session
from eagleray.platform.config import load_config
from eagleray.platform.errors import EagleRayError

started = time.monotonic()
try:
    with session(load_config(sys.argv[1], sys.argv[3:]), Demand(1, float(sys.argv[2]))) as info:
        answer = ray.get(ray.remote(lambda: 6 * 7).remote(), timeout=60)
        told = {"address": info.address, "private": info.is_private, "answer": answer}
        told["cpus"] = sum(node.cpus for node in info.nodes())
except EagleRayError as error:
    told = {"error": type(error).__name__, "code": error.exit_code, "what": error.what}
print(json.dumps({**told, "seconds": time.monotonic() - started}))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedConfig:
    folder = tmp_path_factory.mktemp("project")
    (folder / "eagleray.yaml").write_text(
        "name: test\ncluster: {num_cpus: 2, object_store_bytes: 80MB, start_timeout_s: 150}\n"
    )
    return load_config(folder)


@pytest.fixture(scope="module")
def cluster(loaded: LoadedConfig) -> Iterator[ClusterState]:
    """A cluster that is up; its end is tested as well, since every test must end with it."""
    state, is_new = up(loaded)
    assert is_new
    yield state
    members = guard.family(state.mark)
    assert len(members) > 5
    segments = guard.mapped_segments(members)
    stopped = down(loaded)
    assert stopped == state
    assert guard.family(state.mark) == set()
    assert guard.start_ticks(state.guard_pid) is None
    assert not Path(state.folder).exists()
    assert not Path(state.token_file).exists()
    assert not [path for path in segments if Path(path).exists()]
    assert down(loaded) is None


@pytest.fixture
def jobs(cluster: ClusterState, loaded: LoadedConfig) -> Iterator[Jobs]:
    dashboard = open_dashboard(cluster)
    yield Jobs(dashboard, JobRecords(Storage(loaded.storage_path)), sys.executable)
    dashboard.close()


def attach(loaded: LoadedConfig, *overrides: str, cpus: float = 0) -> dict[str, object]:
    """What a second process is told when it attaches."""
    done = subprocess.run(
        [sys.executable, "-c", ATTACH, str(loaded.root), str(cpus), *overrides],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout, done.stderr
    told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_up_again_finds_it_running(loaded: LoadedConfig, cluster: ClusterState) -> None:
    assert up(loaded) == (cluster, False)


def test_another_process_attaches_and_computes(loaded: LoadedConfig, cluster: ClusterState) -> None:
    told = attach(loaded, cpus=2)
    assert told["address"] == cluster.address
    assert (told["private"], told["answer"], told["cpus"]) == (False, 42, 2)


def test_status_tells_versions_and_resources(
    loaded: LoadedConfig, cluster: ClusterState, until: Callable[..., None]
) -> None:
    until(lambda: status(loaded).usage, "the monitor's report")
    found = status(loaded)
    assert (found.phase, found.state) == ("up", cluster)
    assert found.usage is not None
    assert found.usage["CPU"][1] == 2
    assert found.nodes[0]["labels"]["eagleray-version"] == cluster.versions.eagleray


def test_nothing_of_it_listens_beyond_loopback(cluster: ClusterState) -> None:
    listening = listeners(guard.family(cluster.mark))
    assert len(listening) >= 5
    assert {address for address, _ in listening} == {"127.0.0.1"}


def test_only_this_user_may_enter_its_folder_and_read_its_token(cluster: ClusterState) -> None:
    assert Path(cluster.folder).stat().st_mode & 0o077 == 0
    assert Path(cluster.token_file).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("path", ["/api/version", "/api/jobs/", "/api/v0/nodes", "/nodes"])
def test_nothing_is_answered_without_the_token(cluster: ClusterState, path: str) -> None:
    with httpx.Client(trust_env=False) as stranger:
        assert stranger.get(cluster.dashboard_url + path).status_code == 401
        wrong = {"Authorization": "Bearer " + "0" * 64}
        assert stranger.get(cluster.dashboard_url + path, headers=wrong).status_code == 403


def test_a_wrong_token_is_refused_at_once(loaded: LoadedConfig, cluster: ClusterState) -> None:
    token = Path(cluster.token_file)
    right = token.read_text()
    token.write_text("0" * 64)
    try:
        told = attach(loaded)
        with pytest.raises(AuthenticationError):
            open_dashboard(cluster).nodes()
    finally:
        token.write_text(right)
    assert (told["error"], told["code"]) == ("AuthenticationError", 4)
    assert isinstance(told["seconds"], float)
    assert told["seconds"] < 5


def test_other_versions_are_refused_before_connecting(
    loaded: LoadedConfig, cluster: ClusterState
) -> None:
    record = ClusterRecord(Storage(loaded.storage_path))
    record.write(
        dataclasses.replace(cluster, versions=dataclasses.replace(cluster.versions, ray="2.59.0"))
    )
    try:
        told = attach(loaded)
    finally:
        record.write(cluster)
    assert told["error"] == "VersionSkewError"
    assert f"ray 2.59.0 there, {cluster.versions.ray} here" in str(told["what"])


def test_more_than_the_cluster_has_is_infeasible(
    loaded: LoadedConfig, cluster: ClusterState
) -> None:
    told = attach(loaded, cpus=3)
    assert (told["error"], told["code"]) == ("InfeasibleError", 3)
    assert "2 CPU on 1 node" in str(told["what"])


def test_a_configured_address_is_attached_to_with_rays_own_token_settings(
    tmp_path: Path, cluster: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "eagleray.yaml").write_text(f"name: other\ncluster: {{address: {cluster.address}}}")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", cluster.token_file)
    told = attach(load_config(tmp_path))
    assert (told["address"], told["answer"]) == (cluster.address, 42)


def test_a_submitted_verb_runs_the_code_that_was_sent(
    loaded: LoadedConfig, jobs: Jobs, tmp_path: Path
) -> None:
    """Were the installed package run instead, the changed version would not be printed."""
    code = tmp_path / "eagleray"
    subprocess.run(["cp", "-rL", str(ROOT / "src" / "eagleray"), str(code)], check=True)
    face = code / "__init__.py"
    face.write_text(face.read_text().replace('__version__ = "', '__version__ = "9.9.9+'))
    printed: list[str] = []
    job = jobs.submit(prepare(loaded, ["version"], code))
    ended = jobs.follow(job.job_id, printed.append)
    assert ended.status is JobStatus.FINISHED
    assert "eagleray 9.9.9+" in "".join(printed)
    kept = JobRecords(Storage(loaded.storage_path)).log(job.job_id)
    assert kept == "".join(printed) == jobs.log(job.job_id)


def test_a_failed_verb_ends_as_failed_with_its_exit_code(loaded: LoadedConfig, jobs: Jobs) -> None:
    job = jobs.submit(prepare(loaded, ["train", "no.such.key=1"], ROOT / "src" / "eagleray"))
    ended = jobs.follow(job.job_id, lambda _: None)
    assert (ended.status, ended.message) == (JobStatus.FAILED, "exit code 2")
    assert "no.such" in jobs.log(job.job_id)


def test_plain_ray_job_submit_finds_our_command_and_attaches_to_its_own_cluster(
    cluster: ClusterState, jobs: Jobs, tmp_path: Path
) -> None:
    # This project has no cluster of its own; outside the job a private one would be started.
    (tmp_path / "eagleray.yaml").write_text("name: elsewhere\n")
    script = tmp_path / "attach.py"
    script.write_text(ATTACH)
    plain = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": cluster.token_file,
    }
    command = f"eagleray version && python {script} {tmp_path} 1"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "job", "submit"),
            *("--address", cluster.dashboard_url, "--submission-id", "plain"),
            *("--", "bash", "-c", command),
        ],
        env=plain,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"eagleray {cluster.versions.eagleray}" in done.stdout
    assert f'"address": "{cluster.address}", "private": false, "answer": 42' in done.stdout
    assert "plain" in {job.job_id for job in jobs.all()}


def test_a_sleeping_job_is_stopped_and_what_it_printed_is_kept(
    loaded: LoadedConfig, jobs: Jobs, cluster: ClusterState, until: Callable[..., None]
) -> None:
    job_id = sleeper(cluster, "sleeper")
    until(lambda: "awake" in jobs.log(job_id), "the job's first words", timeout_s=90)
    started = time.monotonic()
    stopped = jobs.stop(job_id)
    assert stopped.status is JobStatus.STOPPED
    assert time.monotonic() - started < 20
    assert "awake" in (JobRecords(Storage(loaded.storage_path)).log(job_id) or "")
    assert jobs.stop(job_id).status is JobStatus.STOPPED


def test_an_interrupted_follower_leaves_the_job_running(
    loaded: LoadedConfig, jobs: Jobs, cluster: ClusterState, until: Callable[..., None]
) -> None:
    job_id = sleeper(cluster, "followed")
    follower = subprocess.Popen(
        [sys.executable, "-m", "eagleray", "logs", "-f", job_id, "-c", str(loaded.root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    try:
        assert any("awake" in line for line in follower.stdout)
        follower.send_signal(2)
        _, said = follower.communicate(timeout=30)
    finally:
        follower.kill()
    assert follower.returncode == 130
    assert f"eagleray logs -f {job_id}" in said
    assert jobs.get(job_id).status is JobStatus.RUNNING
    assert [job.status for job in jobs.stop_all() if job.job_id == job_id] == [JobStatus.STOPPED]


def test_an_unknown_job_is_not_found(jobs: Jobs) -> None:
    for act in (jobs.get, jobs.log, jobs.stop):
        with pytest.raises(NotFoundError, match="knows no job 'nobody'"):
            act("nobody")


def sleeper(cluster: ClusterState, job_id: str) -> str:
    """Starts a job that says one word and sleeps."""
    dashboard = open_dashboard(cluster)
    request = {"entrypoint": "echo awake; sleep 600", "submission_id": job_id}
    dashboard.call("POST", "/api/jobs/", json=request)
    dashboard.close()
    return job_id


def listeners(pids: set[int]) -> list[tuple[str, int]]:
    """IPv4 addresses and ports on which processes listen (IPv4-mapped IPv6 included)."""
    inodes = {
        target.removeprefix("socket:[").removesuffix("]")
        for pid in pids
        for target in descriptors(pid)
        if target.startswith("socket:[")
    }
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                last = bytes.fromhex(address[-8:])[::-1]
                found.append((".".join(map(str, last)), int(port, 16)))
    return found


def descriptors(pid: int) -> list[str]:
    try:
        return [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []


def verb(loaded: LoadedConfig, *words: str) -> str:
    """What a verb prints; it must succeed."""
    result = CliRunner().invoke(app, [words[0], "--config", str(loaded.root), *words[1:]])
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def test_the_verbs_work_from_submit_to_stop(loaded: LoadedConfig, cluster: ClusterState) -> None:
    assert "already running" in verb(loaded, "up")
    assert json.loads(verb(loaded, "up", "--json"))["mark"] == cluster.mark
    assert cluster.address in verb(loaded, "down", "--dry-run")
    told = verb(loaded, "status")
    assert cluster.address in told
    assert "ray 2." in told
    assert f"export RAY_AUTH_TOKEN_PATH={cluster.token_file}" in verb(loaded, "status", "--env")
    job = json.loads(verb(loaded, "submit", "--json", "--", "version"))
    followed = verb(loaded, "logs", "-f", job["job_id"])
    assert "eagleray " in followed
    assert f"{job['job_id']}: finished" in followed
    assert job["job_id"] in verb(loaded, "ps")
    assert "eagleray " in verb(loaded, "logs", job["job_id"])
    assert "finished" in verb(loaded, "stop", job["job_id"])
