"""Deploying on Ray Serve: what is replaced, and what is refused with its reason."""

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from eagleray.cli.app import app
from eagleray.platform.config import LoadedConfig
from eagleray.platform.errors import (
    InfeasibleError,
    NotFoundError,
    PortInUseError,
    ServiceError,
    UsageError,
)
from eagleray.platform.storage import Storage
from eagleray.serve.app import build
from eagleray.serve.deployment import deploy, first_key, undeploy
from eagleray.serve.spec import resolve

pytestmark = [pytest.mark.timeout(300), pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]
Register = Callable[..., str]
MakeProject = Callable[..., LoadedConfig]


def test_deploying_again_replaces_the_model_without_refusing_anybody(
    tmp_path: Path, register_tiny: Register, make_project: MakeProject, ray_cluster: str
) -> None:
    project = make_project(tmp_path, require_key=False)
    storage = Storage(project.storage_path)
    digests = {register_tiny(storage, seed=0)}
    endpoint = deploy(project)
    seen: list[tuple[int, str | None]] = []
    is_done = threading.Event()

    def keep_asking() -> None:
        body = {"model": "tiny", "prompt": "fox", "max_tokens": 4}
        with httpx.Client(base_url=endpoint.url, timeout=60, trust_env=False) as http:
            while not is_done.is_set():
                answer = http.post("/v1/completions", json=body)
                seen.append((answer.status_code, answer.headers.get("x-model-digest")))

    asker = threading.Thread(target=keep_asking)
    asker.start()
    (tmp_path / "eagleray.yaml").write_text(
        f"name: tiny\ncluster: {{address: '{ray_cluster}'}}\n"
        f"serve: {{port: {project.config.serve.port}}}\n"
    )
    try:
        beside = CliRunner().invoke(app, ["serve", "tiny@1", "--config", str(tmp_path)])
        assert isinstance(beside.exception, UsageError), beside.output
        assert "serves a model already" in beside.exception.what
        digests.add(register_tiny(storage, seed=1))
        replaced = deploy(project)
        assert replaced.model == "tiny@2"
        assert json.loads(httpx.get(f"{endpoint.url}/v1/models").text)["data"][0]["version"] == 2
    finally:
        is_done.set()
        asker.join(60)
        took_off = CliRunner().invoke(app, ["undeploy", "--json", "--config", str(tmp_path)])
    assert json.loads(took_off.stdout) == {"undeployed": True}
    assert {status for status, _ in seen} == {200}
    assert {digest for _, digest in seen} <= digests


def test_what_cannot_be_deployed_says_why_before_anything_starts(
    tmp_path: Path,
    register_tiny: Register,
    make_project: MakeProject,
    with_serve: Callable[..., LoadedConfig],
) -> None:
    loaded = make_project(tmp_path)
    register_tiny(Storage(loaded.storage_path), seed=0)
    with pytest.raises(NotFoundError, match="tiny"):
        deploy(loaded, "other")
    with pytest.raises(InfeasibleError, match="64"):
        deploy(with_serve(loaded, cpus_per_replica=64))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=str(port)):
            deploy(with_serve(loaded, port=port))


def test_a_damaged_artifact_is_refused_with_its_reason(
    tmp_path: Path, register_tiny: Register, make_project: MakeProject
) -> None:
    project = make_project(tmp_path)
    storage = Storage(project.storage_path)
    register_tiny(storage, seed=0)
    weights = storage.path("artifacts", resolve(project).artifact, "model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    try:
        with pytest.raises(ServiceError, match="has content of digest"):
            deploy(project)
    finally:
        undeploy()


def test_the_first_key_is_made_once_and_only_if_keys_are_needed(
    tmp_path: Path, make_project: MakeProject, with_serve: Callable[..., LoadedConfig]
) -> None:
    project = make_project(tmp_path)
    assert first_key(with_serve(project, require_key=False)) is None
    assert (first_key(project) or "").startswith("er-")
    assert first_key(project) is None


def test_the_builder_takes_what_serve_run_gives_it(
    tmp_path: Path, register_tiny: Register, make_project: MakeProject
) -> None:
    project = make_project(tmp_path)
    register_tiny(Storage(project.storage_path), seed=0)
    (tmp_path / "eagleray.yaml").write_text("name: tiny\n")
    arguments = {"config": str(tmp_path), "model": "tiny@1", "serve.num_replicas": "2"}
    assert build(arguments)
    with pytest.raises(NotFoundError, match="other"):
        build({**arguments, "model": "other"})
    with pytest.raises(UsageError, match="dotted"):
        build({**arguments, "replicas": "2"})


def test_taking_off_what_is_not_there_is_no_error() -> None:
    assert not undeploy()
