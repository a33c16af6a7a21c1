"""`eagleray serve` as a user runs it: a private cluster, an answer, Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagleray.platform.config import LoadedConfig
from eagleray.platform.storage import Storage
from eagleray.serve.address import base_url, check_port, served_digest

pytestmark = [pytest.mark.timeout(300), pytest.mark.cluster]
EAGLERAY = (sys.executable, "-c", "from eagleray.cli.app import main; main()")


@pytest.fixture
def serving(
    tmp_path: Path, register_tiny: Callable[..., str], make_project: Callable[..., LoadedConfig]
) -> Iterator[tuple[LoadedConfig, "subprocess.Popen[str]", list[str]]]:
    """The project, the process that serves it, and what it printed until it answered."""
    project = make_project(tmp_path)
    register_tiny(Storage(project.storage_path), seed=0)
    (tmp_path / "eagleray.yaml").write_text("name: tiny\ncluster: {num_cpus: 2}\n")
    command = [
        *EAGLERAY, "serve", "tiny@1", "-c", str(tmp_path),
        f"serve.port={project.config.serve.port}", "serve.kv_cache_bytes=8MB",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("Ctrl-C"):
            break
    yield project, process, lines
    if process.poll() is None:
        process.kill()
    process.wait(60)


def test_serves_until_ctrl_c_with_a_key_that_is_shown_once(
    serving: tuple[LoadedConfig, "subprocess.Popen[str]", list[str]], tmp_path: Path
) -> None:
    project, process, lines = serving
    shown = "".join(lines)
    assert process.poll() is None, shown
    url = base_url(project.config.serve)
    assert f"tiny@1 answers at {url}/v1" in shown
    assert f"curl {url}/v1/chat/completions" in shown
    (key,) = set(re.findall(r"er-[A-Za-z0-9_-]{43}", shown))
    chat = [*EAGLERAY, "chat", "--prompt", "fox", "--url", url]
    answered = subprocess.run(
        [*chat, "--key", key], capture_output=True, text=True, timeout=60, check=True
    )
    assert answered.stdout.strip()
    refused = subprocess.run([*chat, "--key", "er-no"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 4
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    assert "stopped" in output
    assert served_digest(url) is None
    check_port(project.config.serve, may_be_ours=False)
