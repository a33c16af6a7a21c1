"""`eagleray bench` against a real endpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eagleray.cli.app import app
from eagleray.platform.config import LoadedConfig
from eagleray.platform.storage import Storage
from eagleray.serve.api.keys import KeyStore

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("pace", [["--concurrency", "3"], ["--rate", "50"]])
def test_a_load_is_answered_and_told(
    pace: list[str],
    tmp_path: Path,
    make_project: Callable[..., LoadedConfig],
    register_tiny: Callable[..., str],
    served_locally: Callable[..., Any],
) -> None:
    project = make_project(tmp_path)
    storage = Storage(project.storage_path)
    register_tiny(storage, 1)
    key, page = KeyStore(storage).create("bench"), tmp_path / "load.html"
    words = ["bench", "-n", "9", "--max-tokens", "6", "--prompt-words", "5", "--json", *pace]
    with served_locally(project) as url:
        told = CliRunner().invoke(app, [*words, "--plot", str(page), url, "--key", key])
        refused = CliRunner().invoke(app, [*words, url, "--key", "er-wrong", "--model", "tiny"])
    document = json.loads(told.stdout)
    assert (document["completed"], document["errors"], document["model"]) == (9, {}, "tiny")
    assert 9 <= document["output_tokens"] <= 54
    assert 0 < document["ttft_s"]["p50"] <= document["latency_s"]["p50"]
    assert "<svg" in page.read_text()
    assert refused.exception is not None
    assert json.loads(refused.stdout)["statuses"] == {"401": 9}
