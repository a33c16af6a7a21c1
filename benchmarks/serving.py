"""Output tokens per second and waits through HTTP, beside llama.cpp's own server.

    python -m benchmarks.serving --peers FOLDER [--only WAY ...] [--quick] [--json FILE]

Every way serves SmolLM2-135M-Instruct on two threads, one after the other, and is driven by the
same clients on the same machine: prompts of 64 distinct tokens, 64 greedy tokens out, at 1, 8, 16
and 32 requests at a time; then prompts of 512 tokens, one at a time.

    eagleray int4, int8    `serve.weights`, through Ray Serve: proxy, keys' place, API and engine
    llama.cpp Q4_0, Q8_0   its server, in xllamacpp: continuous batching over as many slots

    tokens/s    output tokens of all, by the wall clock
    CPU         milliseconds of the server's processes per output token
    TTFT        to the first token of the stream, median
    perplexity  of the weights as they are computed with, on the same held-out text, all else in
                float32; ours with its kernels, activations rounded as well

Peers: `pip install --target FOLDER --no-deps xllamacpp`. Ten minutes; with --quick three.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from benchmarks.leftovers import end_family
from benchmarks.record import Figure, console, run
from benchmarks.serving_model import (
    dequantized,
    held_out_ids,
    native_perplexity,
    perplexity,
    prepared,
    requantized,
)

from eagleray.platform.model import hf_layout
from eagleray.serve.load import Arrivals, drive

_OURS = ("eagleray int4", "eagleray int8")
_PEERS = ("llama.cpp Q4_0", "llama.cpp Q8_0")
_CONCURRENCY = (1, 8, 16, 32)
_GOALS = {1: 1.0, 8: 1.5, 32: 2.0}
_PROMPT_TOKENS, _OUTPUT_TOKENS, _LONG_TOKENS = 64, 64, 512
_THREADS = 2
_START_S = 180.0


@dataclass(frozen=True)
class Measured:
    """Of one way at one number of requests at a time."""

    tokens_per_s: float
    cpu_ms: float
    ttft_s: float


@dataclass
class Row:
    """All of one way."""

    at: dict[int, Measured]
    long_ttft_s: float
    perplexity: float


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """All ways, one after the other."""
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="bench-serving-") as name:
        folder = Path(name)
        model = prepared(folder)
        exact = perplexity(hf_layout.load(model), held_out_ids(model))
        console.print(f"float32: perplexity {exact:.3f}", style="dim")
        for way in arguments.only:
            with _server(way, folder, model, arguments.peers) as server:
                rows[way] = _driven(server, arguments.quick)
            rows[way].perplexity = _perplexity(way, folder, model)
            told = ", ".join(f"{n}: {m.tokens_per_s:.0f}" for n, m in rows[way].at.items())
            console.print(f"{way}: tokens/s at {told}", style="dim")
    return list(_figures(rows, exact))


def _figures(rows: dict[str, Row], exact: float) -> Iterator[Figure]:
    peers = {way: row for way, row in rows.items() if way in _PEERS}
    for way, row in rows.items():
        if way in peers:
            continue
        excess = 100 * (row.perplexity / exact - 1)
        yield Figure(
            f"{way}: perplexity above float32", excess, "%", goal="below 1 %", holds=excess < 1
        )
        for number, found in row.at.items():
            best = max(peers, key=lambda peer: peers[peer].at[number].tokens_per_s, default="")
            theirs = peers[best].at[number].tokens_per_s if best else None
            goal = _GOALS.get(number)
            yield Figure(
                f"{way}: tokens/s at {number}", found.tokens_per_s, "", best, theirs,
                f"{goal:g} x" if goal and theirs else "",
                found.tokens_per_s >= goal * theirs if goal and theirs else None,
            )  # fmt: skip
        best = min(peers, key=lambda peer: peers[peer].long_ttft_s, default="")
        theirs = peers[best].long_ttft_s if best else None
        yield Figure(
            f"{way}: TTFT of {_LONG_TOKENS} tokens", 1000 * row.long_ttft_s, "ms", best,
            1000 * theirs if theirs else None, "0.8 x" if theirs else "",
            row.long_ttft_s <= 0.8 * theirs if theirs else None,
        )  # fmt: skip
    for way, row in rows.items():
        yield Figure(f"{way}: perplexity", row.perplexity, "")
        for number, found in row.at.items():
            yield Figure(f"{way}: CPU per token at {number}", found.cpu_ms, "ms")
            yield Figure(f"{way}: TTFT at {number}", 1000 * found.ttft_s, "ms")


@dataclass(frozen=True)
class _Server:
    url: str
    process: psutil.Process
    vocab_size: int
    model: str


def _driven(server: _Server, is_quick: bool) -> Row:
    draw = np.random.default_rng(0)

    def bodies(count: int, length: int, max_tokens: int) -> list[dict[str, object]]:
        return [
            {
                "model": server.model, "max_tokens": max_tokens, "temperature": 0,
                "ignore_eos": True,
                "prompt": draw.integers(1000, server.vocab_size - 1000, length).tolist(),
            }
            for _ in range(count)
        ]  # fmt: skip

    def driven(asked: list[dict[str, object]], clients: int) -> Measured:
        before = _cpu_s(server.process)
        result = asyncio.run(
            drive(f"{server.url}/v1/completions", asked, Arrivals(concurrency=clients))
        )
        summary, spent_s = result.summary(), _cpu_s(server.process) - before
        if summary["errors"]:
            raise SystemExit(f"error: {summary['errors']}")
        return Measured(
            summary["output_tokens_per_s"],
            1000 * spent_s / max(1, summary["output_tokens"]),
            summary["ttft_s"]["p50"],
        )

    driven(bodies(2, _PROMPT_TOKENS, 8), 1)  # warm
    rounds = 1 if is_quick else 3
    at = {
        number: driven(bodies(max(3, rounds * number), _PROMPT_TOKENS, _OUTPUT_TOKENS), number)
        for number in _CONCURRENCY
    }
    return Row(at, driven(bodies(2 * rounds, _LONG_TOKENS, 2), 1).ttft_s, 0.0)


@contextlib.contextmanager
def _server(way: str, folder: Path, model: Path, peers: Path | None) -> Iterator[_Server]:
    port = _free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": str(_THREADS)}
    if way in _OURS:
        name = "smollm2"
        command = [
            str(Path(sys.executable).with_name("eagleray")), "serve", name, "-c", str(folder),
            f"serve.port={port}", f"serve.weights={way.split()[1]}",
        ]  # fmt: skip
        ready = "/readyz"
    else:
        if peers is None:
            raise SystemExit("error: --peers says where xllamacpp is installed")
        name, kind = "peer", way.split()[1]
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [os.environ.get("PYTHONPATH", ""), str(peers.resolve())])
        )
        file = requantized(folder, kind)
        command = [sys.executable, "-m", "benchmarks.serving_peer", str(file), str(port)]
        ready = "/health"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url + ready, process, folder / "log")
        vocab_size = hf_layout.load(model, device="meta").config.vocab_size
        yield _Server(url, psutil.Process(process.pid), vocab_size, name)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with contextlib.suppress(psutil.NoSuchProcess):
            end_family(process.pid)
        process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"error: no server: {log.read_text(errors='replace')[-1000:]}")


def _cpu_s(process: psutil.Process) -> float:
    family = [process, *process.children(recursive=True)]
    spent = 0.0
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            spent += sum(member.cpu_times()[:2])
    return spent


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _perplexity(way: str, folder: Path, model: Path) -> float:
    ids = held_out_ids(model)
    if way in _PEERS:
        return perplexity(dequantized(requantized(folder, way.split()[1])), ids)
    return native_perplexity(hf_layout.load(model).eval(), 4 if "int4" in way else 8, ids)


def _add_options(parser: argparse.ArgumentParser) -> None:
    ways = [*_OURS, *_PEERS]
    parser.add_argument("--only", nargs="+", choices=ways, default=ways)
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="where pip put xllamacpp")


if __name__ == "__main__":
    torch.set_num_threads(_THREADS)
    run(__doc__.partition("\n")[0], measure, _add_options)
