import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner, Result

from eagleray.cli import serve
from eagleray.platform.errors import NotFoundError, PortInUseError, UsageError
from eagleray.platform.registry import Registry
from eagleray.platform.storage import Storage
from eagleray.serve import client as client_module
from eagleray.serve.api.keys import KeyStore

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a verb on a project; errors come out as they are raised."""
    (tmp_path / "eagleray.yaml").write_text("name: tiny\n")
    app = typer.Typer()
    serve.register(app)

    def call(*words: str, **options: Any) -> Result:
        result = CliRunner().invoke(app, [*words, "-c", str(tmp_path)], **options)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


def test_keys_are_made_listed_and_revoked(run: Run, tmp_path: Path) -> None:
    made = json.loads(run("keys", "create", "laptop", "--json").stdout)
    keys = KeyStore(Storage(tmp_path / ".eagleray"))
    assert keys.verify(made["key"])
    listed = json.loads(run("keys", "list", "--json").stdout)
    assert [(key["name"], key["last4"]) for key in listed] == [("laptop", made["key"][-4:])]
    assert made["key"] not in run("keys", "list").stdout
    run("keys", "revoke", "laptop")
    assert keys.verify(made["key"]) is None
    with pytest.raises(NotFoundError):
        run("keys", "revoke", "laptop")


def test_a_new_key_is_shown_once_to_people_too(run: Run) -> None:
    assert "er-" in run("keys", "create", "ci").stdout


def test_only_one_model_can_be_named(run: Run) -> None:
    with pytest.raises(UsageError, match="2 models were named: a, b"):
        run("serve", "a", "b", "serve.port=8001")


@pytest.mark.parametrize("verb", ["serve", "deploy"])
def test_an_unknown_model_is_refused_before_a_cluster_is_started(run: Run, verb: str) -> None:
    with pytest.raises(NotFoundError, match="tiny"):
        run(verb)


def test_deploying_without_a_cluster_is_refused_before_one_is_started(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Registry(Storage(tmp_path / ".eagleray")).register("tiny", "r" * 64, "a" * 64, {})
    with pytest.raises(UsageError, match="eagleray up"):
        run("deploy")


def test_a_taken_port_is_refused_before_a_cluster_is_started(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=str(port)):
            run("serve", f"serve.port={port}")


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the endpoint was asked; it answers with the number of messages."""
    asked: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        asked.append(json.loads(request.content))
        document = {"choices": [{"delta": {"content": f"[{len(asked[-1]['messages'])}]"}}]}
        return httpx.Response(200, text=f"data: {json.dumps(document)}\n\ndata: [DONE]\n\n")

    real = client_module.ChatClient

    def fake(url: str, key: str | None, timeout_s: float) -> Any:
        return real(url, key, timeout_s, httpx.MockTransport(answer))

    monkeypatch.setattr(client_module, "ChatClient", fake)
    return asked


def test_chat_asks_once_and_ends(run: Run, answered: list[Any]) -> None:
    result = run("chat", "--prompt", "hi", "--system", "be brief", "--max-tokens", "5")
    assert "[2]" in result.stdout
    assert answered[0]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert answered[0]["max_tokens"] == 5


def test_chat_remembers_the_conversation_until_the_end_of_input(
    run: Run, answered: list[Any]
) -> None:
    result = run("chat", input="one\n\ntwo\n")
    assert "tiny at http://127.0.0.1:8000" in result.stdout
    assert [message["content"] for message in answered[1]["messages"]] == ["one", "[1]", "two"]
