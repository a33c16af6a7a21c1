"""Recorded clusters that are dead, silent or on another machine; nothing is started here."""

import dataclasses
import socket
import time
from pathlib import Path

import pytest

from eagleray.platform import cluster
from eagleray.platform.cluster import ClusterRecord, ClusterState, down, status, up
from eagleray.platform.cluster.ports import free_ports
from eagleray.platform.cluster.state import boot_id
from eagleray.platform.cluster.tokens import write_token
from eagleray.platform.cluster.versions import Versions
from eagleray.platform.config import LoadedConfig, load_config
from eagleray.platform.errors import InfeasibleError, UsageError
from eagleray.platform.storage import Storage


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    (tmp_path / "eagleray.yaml").write_text("name: test\n")
    return load_config(tmp_path)


@pytest.fixture(autouse=True)
def _unattached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may be attached to a cluster of theirs."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)


@pytest.fixture
def record(loaded: LoadedConfig) -> ClusterRecord:
    return ClusterRecord(Storage(loaded.storage_path))


@pytest.fixture
def dead(record: ClusterRecord, tmp_path: Path) -> ClusterState:
    """A recorded cluster whose guard is gone and whose folder stayed."""
    folder = tmp_path / "folder"
    folder.mkdir()
    write_token(record.token_file)
    (port,) = free_ports([None])
    state = ClusterState(
        mark="0" * 16,
        guard_pid=2**22 + 1,
        guard_start_ticks=1,
        boot_id=boot_id(),
        host=socket.gethostname(),
        address=f"127.0.0.1:{port}",
        dashboard_url=f"http://127.0.0.1:{port}",
        metrics_port=1,
        folder=str(folder),
        token_file=str(record.token_file),
        versions=Versions.here(),
        started_s=time.time(),
    )
    record.write(state)
    return state


def test_a_project_without_a_cluster_has_none(loaded: LoadedConfig) -> None:
    assert status(loaded).phase == "none"
    assert down(loaded) is None


def test_a_dead_cluster_is_told_and_cleaned_by_down(
    loaded: LoadedConfig, record: ClusterRecord, dead: ClusterState
) -> None:
    seen: list[ClusterState] = []
    assert status(loaded).phase == "dead"
    assert down(loaded, seen.append) == dead
    assert seen == [dead]
    assert not Path(dead.folder).exists()
    assert not record.token_file.exists()
    assert status(loaded).phase == "none"


def test_a_living_cluster_that_does_not_answer_is_silent(
    loaded: LoadedConfig, dead: ClusterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClusterState, "is_alive", True)
    found = status(loaded)
    assert found.phase == "silent"
    assert "no Ray dashboard answers" in found.reason


def test_a_cluster_of_another_machine_is_never_touched_from_here(
    loaded: LoadedConfig, record: ClusterRecord, dead: ClusterState
) -> None:
    record.write(dataclasses.replace(dead, host="another-host"))
    assert status(loaded).phase == "elsewhere"
    for act in (up, down):
        with pytest.raises(UsageError, match="was started on another-host"):
            act(loaded)
    with pytest.raises(UsageError, match="runs on another-host"), cluster.session(loaded):
        raise AssertionError("attached to another machine's loopback")
    assert Path(dead.folder).exists()


def test_more_than_this_machine_may_offer_is_refused_before_anything_starts(
    loaded: LoadedConfig,
) -> None:
    small = load_config(loaded.root, ["cluster.num_cpus=2"])
    with (
        pytest.raises(InfeasibleError, match="3 CPU"),
        cluster.session(small, cluster.Demand(1, 3)),
    ):
        raise AssertionError("a cluster was started")


def test_the_face_offers_what_it_lists() -> None:
    assert all(getattr(cluster, name) for name in cluster.__all__)
    with pytest.raises(AttributeError):
        cluster.nothing  # noqa: B018
