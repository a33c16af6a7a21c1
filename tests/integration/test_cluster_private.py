"""Private clusters: they end with their block, with a killed driver, with an interrupted `up`."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagleray.platform.cluster import ClusterRecord, guard, status
from eagleray.platform.config import LoadedConfig, load_config
from eagleray.platform.storage import Storage

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

# Attaches, computes, says where, and ends or waits as it is told.
DRIVER = """\
import json, os, signal, sys
import ray
from eagleray.platform.cluster import Demand, guard, session
from eagleray.platform.cluster.options import TRAIN_VARIABLES
from eagleray.platform.config import load_config
from eagleray.platform.errors import UsageError

AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")
OURS = {*AUTH, *TRAIN_VARIABLES}
handler = signal.getsignal(signal.SIGTERM)
settings = dict(os.environ)
loaded = load_config(sys.argv[1])
with session(loaded, Demand(1, 1)) as info:
    mark = ray.get(ray.remote(lambda: os.environ["EAGLERAY_CLUSTER_MARK"]).remote(), timeout=60)
    with session(loaded) as same:
        assert same.address == info.address
    assert ray.is_initialized()
    port = info.address.rpartition(":")[2]
    with session(load_config(sys.argv[1], [f"cluster.address=localhost:{port}"])) as same:
        assert same.address == info.address
    try:
        with session(load_config(sys.argv[1], ["cluster.address=127.0.0.1:1"])):
            raise AssertionError("worked on another cluster than the one that was named")
    except UsageError as error:
        assert info.address in error.what and "127.0.0.1:1" in error.what
    told = {"mark": mark, "private": info.is_private, "dashboard": info.dashboard_url}
    print(json.dumps(told), flush=True)
    if len(sys.argv) > 2:
        signal.pause()
assert not ray.is_initialized()
assert signal.getsignal(signal.SIGTERM) is handler
changed = {name for name in {*settings, *os.environ} if settings.get(name) != os.environ.get(name)}
print(json.dumps(sorted(changed & OURS)), flush=True)
"""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    (tmp_path / "eagleray.yaml").write_text(
        "name: test\ncluster: {num_cpus: 1, object_store_bytes: 80MB, start_timeout_s: 150}\n"
    )
    return load_config(tmp_path)


@pytest.fixture
def start(loaded: LoadedConfig) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python with arguments; it is ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, python: str = sys.executable) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [python, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=loaded.root,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def folders() -> set[Path]:
    return set(Path("/tmp").glob("eagleray-*"))


def test_a_session_ends_its_cluster_and_restores_the_process(
    loaded: LoadedConfig, start: Callable[..., subprocess.Popen[str]]
) -> None:
    # Also from an environment whose path a shell would cut in two.
    environment = loaded.root / "my projects" / "env"
    environment.parent.mkdir()
    environment.symlink_to(sys.prefix, target_is_directory=True)
    python = environment / "bin" / Path(sys.executable).name
    driver = start("-c", DRIVER, str(loaded.root), python=str(python))
    said, complaints = driver.communicate(timeout=200)
    assert driver.returncode == 0, complaints
    told, changed = (json.loads(line) for line in said.splitlines())
    assert told["private"]
    assert told["dashboard"] is None
    assert changed == []
    assert guard.family(told["mark"]) == set()
    assert status(loaded).phase == "none"
    # Ray is kept quiet: nothing but our own two lines.
    assert complaints == ""


def test_a_killed_driver_takes_its_private_cluster_with_it(
    loaded: LoadedConfig,
    start: Callable[..., subprocess.Popen[str]],
    until: Callable[..., None],
) -> None:
    config = loaded.root / "eagleray.yaml"
    config.write_text(config.read_text().replace("cluster: {", "cluster: {dashboard: true, "))
    driver = start("-c", DRIVER, str(loaded.root), "wait")
    assert driver.stdout is not None
    told = json.loads(driver.stdout.readline())
    assert told["dashboard"].startswith("http://127.0.0.1:")
    members = guard.family(told["mark"])
    assert len(members) > 5
    homes = {home for pid in members if (home := Path(f"/proc/{pid}/cwd").resolve()) in folders()}
    assert len(homes) == 1
    driver.send_signal(signal.SIGKILL)
    driver.wait(10)
    until(lambda: not guard.family(told["mark"]), "the cluster's end", timeout_s=20)
    until(lambda: not homes & folders(), "its folder's end", timeout_s=10)


def test_an_interrupted_up_leaves_nothing(
    loaded: LoadedConfig,
    start: Callable[..., subprocess.Popen[str]],
    until: Callable[..., None],
) -> None:
    up = start("-m", "eagleray", "up")
    until(lambda: marks_below(up.pid), "the guard's start")
    (mark,) = marks_below(up.pid)
    until(lambda: len(guard.family(mark)) > 2, "the head's processes")
    up.send_signal(signal.SIGINT)
    _, complaints = up.communicate(timeout=30)
    assert up.returncode == 130, complaints
    assert guard.family(mark) == set()
    record = ClusterRecord(Storage(loaded.storage_path))
    assert record.read() is None
    assert not record.token_file.exists()


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def marks_below(pid: int) -> list[str]:
    """The mark of each child that has one: before its exec it has its parent's environment."""
    name = f"{guard.MARK_VARIABLE}=".encode()
    return [
        entry[len(name) :].decode()
        for child in children(pid)
        for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if entry.startswith(name)
    ]
