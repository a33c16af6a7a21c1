"""`eagleray bench` as people and scripts see it, with the network replaced by known answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from eagleray.cli import bench
from eagleray.platform.errors import ServiceError, UsageError
from eagleray.serve import load
from eagleray.serve.load import Answer, Arrivals, LoadResult


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[dict[str, Any]], Arrivals]]:
    """What would have been sent; every third request fails."""
    sent: list[tuple[str, list[dict[str, Any]], Arrivals]] = []

    async def drive(url: str, bodies: Any, arrivals: Arrivals, **options: Any) -> LoadResult:
        sent.append((url, list(bodies), arrivals))
        result = LoadResult(begun_s=10.0, ended_s=12.0)
        for number in range(len(bodies)):
            error = "HTTP 429: too many" if number % 3 == 2 else ""
            answer = Answer(10.0, 429 if error else 200, error, 10.5, 11.5, 5)
            result.answers.append(answer)
            options["on_answer"](answer)
        return result

    monkeypatch.setattr(load, "drive", drive)
    return sent


def run(*words: str) -> Result:
    app = typer.Typer()
    bench.register(app)
    result = CliRunner().invoke(app, [*words, "--model", "m"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_figures_for_people(asked: list[Any], tmp_path: Path) -> None:
    page = tmp_path / "load.html"
    told = run("http://h:1/", "-n", "6", "--concurrency", "3", "--plot", str(page)).stdout
    assert "4 of 6 requests in 2.0 s: 10.0 output tokens/s, 2.00 requests/s" in told
    assert "2 x HTTP 429: too many" in told
    assert "500.0" in told
    [(url, bodies, arrivals)] = asked
    assert (url, arrivals) == ("http://h:1/v1/completions", Arrivals(concurrency=3))
    assert len({body["prompt"] for body in bodies}) == 6
    html = page.read_text()
    assert html.count("<svg") == 2
    assert "first token" in html
    assert "<script" not in html


def test_one_document_for_scripts(asked: list[Any]) -> None:
    document = json.loads(run("http://h:1", "-n", "6", "--rate", "2.5", "--json").stdout)
    assert document["completed"] == 4
    assert document["errors"] == {"HTTP 429: too many": 2}
    assert document["ttft_s"]["p50"] == pytest.approx(0.5)
    assert asked[0][2] == Arrivals(rate=2.5)


def test_prompts_of_a_file_take_turns(asked: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("one\n\ntwo\n")
    run("http://h:1", "-n", "3", "--prompts", str(file))
    assert [body["prompt"] for body in asked[0][1]] == ["one", "two", "one"]


def test_mistakes_are_named(asked: list[Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        run("http://h:1", "--rate", "1", "--concurrency", "2")
    with pytest.raises(UsageError, match="cannot be read"):
        run("http://h:1", "--prompts", str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match="has no line"):
        run("http://h:1", "--prompts", str(tmp_path / "empty"))
    assert asked == []


def test_an_endpoint_that_answers_nothing_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def drive(*_: Any, **__: Any) -> LoadResult:
        return LoadResult([Answer(0.0, 0, "ClientConnectorError: refused")], 0.0, 1.0)

    monkeypatch.setattr(load, "drive", drive)
    with pytest.raises(ServiceError, match="none of 1 requests was answered: ClientConnector"):
        run("http://h:1", "-n", "1")
