"""The verb that drives an endpoint and tells what its clients see."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagleray.cli.console import ConfigOption, JsonOption, console, emit, errors, table
from eagleray.cli.serve import KeyOption
from eagleray.platform.config import CONFIG_NAME
from eagleray.platform.errors import ServiceError, UsageError
from eagleray.project import Project

if TYPE_CHECKING:
    from eagleray.serve.load import Answer

_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from "
    "or had an they which one you were all her she there would their we him been has when who will"
)
_TIMEOUT_S = 600.0
_MILLI = 1000.0


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(bench)


def bench(
    url: Annotated[
        str | None, typer.Argument(help="The endpoint's base; without one: serve.host, serve.port.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Clients that ask again once answered (8).")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-3, help="Requests per second, at random moments.")
    ] = None,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="In all.")] = 64,
    prompt_words: Annotated[int, typer.Option(min=1, help="Length of a made-up prompt.")] = 64,
    prompts: Annotated[
        Path | None, typer.Option(help="A text file: each line a prompt, in turns.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    model: Annotated[str | None, typer.Option(help="Without one: what is served.")] = None,
    key: KeyOption = None,
    seed: Annotated[int, typer.Option(help="Of prompts and moments.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a page with curves there.")] = None,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Load an endpoint and show throughput, latencies and errors, as its clients see them.

    Examples: eagleray bench --concurrency 32
              eagleray bench http://10.0.0.7:8000 --rate 5 -n 300 --plot load.html
    """
    from eagleray.serve.address import base_url
    from eagleray.serve.client import ChatClient
    from eagleray.serve.load import Arrivals, drive

    if concurrency is not None and rate is not None:
        raise UsageError("--concurrency and --rate exclude each other", "give one of them")
    arrivals = Arrivals(None if rate else concurrency or 8, rate, seed)
    address = (url or base_url(Project.load(config).config.serve)).rstrip("/")
    if model is None:
        with ChatClient(address, key, _TIMEOUT_S) as client:
            model = client.model()
    texts = _lines_of(prompts) if prompts else _made_up(requests, prompt_words, seed)
    bodies = [
        {
            "model": model, "prompt": texts[number % len(texts)], "max_tokens": max_tokens,
            "temperature": 0,
        }
        for number in range(requests)
    ]  # fmt: skip
    with _progress(requests, quiet=as_json) as on_answer:
        result = asyncio.run(
            drive(
                f"{address}/v1/completions", bodies, arrivals, key=key, timeout_s=_TIMEOUT_S,
                on_answer=on_answer,
            )
        )  # fmt: skip
    summary = {"url": address, "model": model, "concurrency": arrivals.concurrency, "rate": rate,
               **result.summary()}  # fmt: skip
    if plot is not None:
        from eagleray.platform.report.load_page import load_page

        waits = {
            "first token": [answer.ttft_s for answer in result.whole],
            "whole answer": [answer.latency_s for answer in result.whole],
        }
        plot.write_text(load_page(f"{model} at {address}", [_told(summary)], waits))
    emit(summary, as_json, lambda: _show(summary, plot))
    if not result.whole:
        raise ServiceError(
            f"none of {requests} requests was answered: {next(iter(summary['errors']), '')}",
            "see `eagleray chat` for a single one",
        )


def _lines_of(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "name a text file") from error
    if not lines:
        raise UsageError(f"{path} has no line", "name a file with a prompt on each line")
    return lines


def _made_up(count: int, num_words: int, seed: int) -> list[str]:
    """Prompts that share no beginning, so that no cache answers for the model."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(_WORDS.split(), k=num_words)) for _ in range(count)]


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Any]:
    if quiet or not errors.is_terminal:
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
    )  # fmt: skip
    with Progress(*columns, console=errors, transient=True) as bar:
        task, failed = bar.add_task("requests", total=total, failed=0), 0

        def on_answer(answer: "Answer") -> None:
            nonlocal failed
            failed += not answer.is_whole
            bar.update(task, advance=1, failed=failed)

        yield on_answer


def _told(summary: dict[str, Any]) -> str:
    return (
        f"{summary['completed']} of {summary['requests']} requests in {summary['seconds']:.1f} s: "
        f"{summary['output_tokens_per_s']:.1f} output tokens/s, "
        f"{summary['requests_per_s']:.2f} requests/s"
    )


def _show(summary: dict[str, Any], plot: Path | None) -> None:
    console.print(_told(summary), markup=False)
    rows = []
    for name, label in (
        ("ttft_s", "first token"), ("tpot_s", "per token after it"), ("latency_s", "whole answer")
    ):  # fmt: skip
        if found := summary[name]:
            rows.append([label, *(f"{_MILLI * value:,.1f}" for value in found.values())])
    if rows:
        columns = ["milliseconds", "p50", "p90", "p95", "p99", "max"]
        console.print(table("waits", columns, rows))
    for error, count in summary["errors"].items():
        console.print(f"{count} x {error}", markup=False)
    if plot is not None:
        console.print(str(plot), markup=False)
