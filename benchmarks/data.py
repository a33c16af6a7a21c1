"""Tokens per second of preprocessing and samples per second of loading, beside peers.

    python -m benchmarks.data [--quick] [--json FILE] [--ranks 1 2]

Peers are measured if they are installed: `datasets` (map, with the same tokenizer), `litdata`,
`mosaicml-streaming`, `torchdata`. Each is set up as its documentation has it for tokens on a local
disk, with 0 and with 2 loader processes, of which the better one counts; ours as it is by default.
All give shuffled batches of 32 samples as int64 tensors [B, T + 1]; rounds of ours and theirs
alternate, each in processes of its own and after 20 batches that do not count. Several ranks run
side by side, and their samples are added. Ten minutes; with --quick two.
"""

import argparse
import contextlib
import importlib
import io
import json
import logging
import multiprocessing
import os
import queue
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.leftovers import end_family, nothing_left
from benchmarks.record import Figure, middle, run
from examples.sotu.corpus import write_corpus

from eagleray.actors.data import BatchStream, Dataset, build_dataset
from eagleray.platform.config import DataConfig
from eagleray.platform.storage import Storage

_BATCH = 32
_SEQ_LEN = 128
_VOCAB_SIZE = 4096
_MAP_BATCH = 64
_CHUNK_BYTES = 16_000_000
_ROUND_S = 3.0

Rank = tuple[int, int]
"""(rank, number of ranks)"""
Batches = Iterable[torch.Tensor]


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """All figures."""
    rounds = 1 if arguments.quick else 5
    with nothing_left(), tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        root = Path(folder)
        corpus = write_corpus(root)
        dataset, build_figures = _preprocessing(root, corpus, 1 if arguments.quick else 3)
        figures = list(build_figures)
        peers = _prepared(root, dataset)
        for num_ranks in arguments.ranks:
            figures += _loading(root, dataset, peers, num_ranks, rounds)
    return figures


def _preprocessing(root: Path, corpus: Path, rounds: int) -> tuple[Dataset, Iterator[Figure]]:
    """Raw text to tokens on disk, by the same tokenizer: learning it is not measured."""
    settings = {
        "sources": [{"path": str(corpus)}],
        "tokenizer": {"vocab_size": _VOCAB_SIZE},
        "seq_len": _SEQ_LEN,
    }
    learnt = build_dataset(DataConfig.model_validate(settings), Path, Storage(root / "learn"))
    tokenizer = root / "tokenizer.json"
    tokenizer.write_bytes(learnt.tokenizer_json)
    tokens = sum(learnt.manifest["splits"][split]["tokens"] for split in ("train", "eval"))
    settings["tokenizer"] = {"kind": "file", "path": str(tokenizer)}
    texts = [json.loads(line)["text"] for line in corpus.open(encoding="utf-8")]
    ways: dict[str, Callable[[Path], object]] = {
        "ours": lambda to: build_dataset(DataConfig.model_validate(settings), Path, Storage(to)),
        "datasets.map": lambda to: _map(corpus, tokenizer, to),
        "litdata.optimize": lambda to: _optimize(texts, tokenizer, to),
    }
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        for name, way in ways.items():
            with _skipped(name, seconds):
                started = time.perf_counter()
                way(root / f"{name}-{number}")
                seconds.setdefault(name, []).append(time.perf_counter() - started)
    ours = tokens / middle(seconds["ours"])[0]
    return learnt, (
        Figure("preprocessing", ours, "tokens/s", name, tokens / middle(took)[0])
        for name, took in seconds.items()
        if name != "ours"
    )


def _map(corpus: Path, tokenizer_json: Path, to: Path) -> None:
    datasets = importlib.import_module("datasets")
    tokenizers = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    raw = datasets.load_dataset(
        "json", data_files=str(corpus), split="train", cache_dir=str(to / "raw")
    )
    raw.map(
        lambda rows: {"ids": [e.ids for e in tokenizer.encode_batch_fast(rows["text"])]},
        batched=True,
        batch_size=_MAP_BATCH,
        remove_columns=raw.column_names,
        cache_file_name=str(to / "ids.arrow"),
    )


def _optimize(texts: list[str], tokenizer_json: Path, to: Path) -> None:
    litdata = importlib.import_module("litdata")
    to.mkdir()
    groups = [texts[i : i + 16] for i in range(0, len(texts), 16)]
    litdata.optimize(
        fn=_Encode(tokenizer_json),
        inputs=groups,
        output_dir=str(to / "out"),
        chunk_bytes=_CHUNK_BYTES,
        num_workers=os.cpu_count() or 1,
        item_loader=litdata.TokensLoader(),
    )


class _Encode:
    def __init__(self, tokenizer_json: Path) -> None:
        self._path, self._tokenizer = tokenizer_json, None

    def __call__(self, texts: list[str]) -> Iterator[torch.Tensor]:
        if self._tokenizer is None:
            self._tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(
                str(self._path)
            )
        for encoding in self._tokenizer.encode_batch_fast(texts):
            yield torch.tensor(encoding.ids)


def _samples(dataset: Dataset) -> np.ndarray:
    """All training samples, int32 [N, T + 1]."""
    return dataset.read("train", np.arange(dataset.num_samples("train"), dtype=np.int64))


def _prepared(root: Path, dataset: Dataset) -> list[str]:
    """Write the samples as each peer wants them; the peers that are there."""
    samples = _samples(dataset)
    np.save(root / "samples.npy", samples)
    found: list[str] = []
    for name, write in (
        ("torchdata", lambda to: importlib.import_module("torchdata.stateful_dataloader")),
        ("litdata", lambda to: _write_litdata(samples, to)),
        ("streaming", lambda to: _write_mds(samples, to)),
    ):
        with _skipped(name):
            write(root / name)
            found.append(name)
    return found


def _write_litdata(samples: np.ndarray, to: Path) -> None:
    litdata = importlib.import_module("litdata")
    to.mkdir()
    litdata.optimize(
        fn=_Rows(samples),
        inputs=list(range(0, len(samples), 1024)),
        output_dir=str(to / "out"),
        chunk_size=(_SEQ_LEN + 1) * 8192,
        num_workers=1,
        item_loader=litdata.TokensLoader(),
    )


class _Rows:
    def __init__(self, samples: np.ndarray) -> None:
        self._samples = samples

    def __call__(self, start: int) -> Iterator[torch.Tensor]:
        for row in self._samples[start : start + 1024]:
            yield torch.from_numpy(row.copy())


def _write_mds(samples: np.ndarray, to: Path) -> None:
    streaming = importlib.import_module("streaming")
    columns = {"tokens": f"ndarray:int32:{_SEQ_LEN + 1}"}
    with streaming.MDSWriter(out=str(to), columns=columns) as writer:
        for row in samples:
            writer.write({"tokens": row})


def _loading(
    root: Path, dataset: Dataset, peers: list[str], num_ranks: int, rounds: int
) -> Iterator[Figure]:
    ways = [("ours", 0), *((peer, n) for peer in peers for n in (0, 2))]
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for way in ways:
            with _skipped(f"{way[0]} with {way[1]} workers", rates.get(way)):
                rate = _side_by_side(root, dataset, way, num_ranks)
                rates.setdefault(way, []).append(rate)
    best: dict[str, tuple[float, int]] = {}
    for (name, workers), found in rates.items():
        best[name] = max(best.get(name, (0.0, 0)), (middle(found)[0], workers))
    ours, _ = best.pop("ours")
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    top = max((rate for rate, _ in best.values()), default=0.0)
    for name, (rate, workers) in best.items():
        is_best = rate == top
        yield Figure(
            f"loading, {ranks}", ours, "samples/s", f"{name}, {workers} workers", rate,
            "2x the best" if is_best else "", ours >= 2 * rate if is_best else None,
        )  # fmt: skip


def _side_by_side(root: Path, dataset: Dataset, way: tuple[str, int], num_ranks: int) -> float:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(num_ranks), context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(
            target=_consume,
            args=(str(root), dataset.digest, way, (rank, num_ranks), port, barrier, results),
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        rates = [results.get(timeout=60) for _ in processes]
    except queue.Empty:
        raise TimeoutError("no batch within 60 s") from None
    finally:
        for process in processes:
            process.join(1)
            if process.pid is not None:
                end_family(process.pid)
            process.kill()
    for rate in rates:
        if isinstance(rate, str):
            raise RuntimeError(rate)
    return float(sum(rates))


def _consume(
    root: str, digest: str, way: tuple[str, int], rank: Rank, port: int, barrier: Any, results: Any
) -> None:
    """Take batches for a while in a process of its own; the rate goes to `results`."""
    os.environ.update(
        RANK=str(rank[0]), LOCAL_RANK=str(rank[0]), WORLD_SIZE=str(rank[1]),
        LOCAL_WORLD_SIZE=str(rank[1]), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    _be_quiet()
    torch.set_num_threads(1)
    try:
        with _opened(Path(root), digest, way, rank) as epochs:
            batches = (batch for epoch in epochs for batch in epoch)
            for _ in range(20):
                next(batches)
            barrier.wait(60)
            started, count = time.perf_counter(), 0
            while (took := time.perf_counter() - started) < _ROUND_S:
                batch = next(batches)
                assert batch.shape[1:] == (_SEQ_LEN + 1,), batch.shape
                assert batch.dtype == torch.int64, batch.dtype
                count += len(batch)
        results.put(count / took)
    except Exception as error:  # noqa: BLE001 - told to the process that measures
        barrier.abort()
        results.put(f"{type(error).__name__}: {error}")
    # Loader processes of peers are not waited for.
    end_family(os.getpid())
    sys.stdout.flush()
    results.close()
    results.join_thread()
    os._exit(0)


@contextlib.contextmanager
def _opened(
    root: Path, digest: str, way: tuple[str, int], rank: Rank
) -> Iterator[Iterator[Batches]]:
    """Epoch after epoch of this rank's batches."""
    name, workers = way
    if name == "ours":
        dataset = Dataset.open(Storage(root / "learn"), digest)
        with BatchStream(dataset, _BATCH * rank[1], rank=rank[0], world_size=rank[1]) as stream:
            yield ((torch.from_numpy(b.tokens).long() for b in stream) for _ in _forever())
        return
    if rank[1] > 1:
        torch.distributed.init_process_group("gloo", rank=rank[0], world_size=rank[1])
    loader = {"torchdata": _torchdata, "litdata": _litdata, "streaming": _streaming}[name](
        root, workers, rank
    )
    yield ((_long(batch) for batch in loader) for _ in _forever())


def _torchdata(root: Path, workers: int, rank: Rank) -> Batches:
    module = importlib.import_module("torchdata.stateful_dataloader")
    rows = _MappedRows(root / "samples.npy")
    sampler = (
        torch.utils.data.DistributedSampler(rows, rank[1], rank[0])
        if rank[1] > 1
        else torch.utils.data.RandomSampler(rows)
    )
    loader: Batches = module.StatefulDataLoader(
        rows, _BATCH, sampler=sampler, num_workers=workers, drop_last=True,
        persistent_workers=workers > 0,
    )  # fmt: skip
    return loader


class _MappedRows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, path: Path) -> None:
        self._rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._rows[index].astype(np.int64))


def _litdata(root: Path, workers: int, rank: Rank) -> Batches:
    litdata = importlib.import_module("litdata")
    rows = litdata.StreamingDataset(
        str(root / "litdata" / "out"), shuffle=True, drop_last=True,
        item_loader=litdata.TokensLoader(block_size=_SEQ_LEN + 1),
    )  # fmt: skip
    loader: Batches = litdata.StreamingDataLoader(rows, batch_size=_BATCH, num_workers=workers)
    return loader


def _streaming(root: Path, workers: int, rank: Rank) -> Batches:
    streaming = importlib.import_module("streaming")
    if rank[0] == 0:
        streaming.base.util.clean_stale_shared_memory()
    if rank[1] > 1:
        torch.distributed.barrier()
    rows = streaming.StreamingDataset(
        local=str(root / "streaming"), shuffle=True, batch_size=_BATCH
    )
    loader: Batches = torch.utils.data.DataLoader(
        rows, batch_size=_BATCH, num_workers=workers, drop_last=True,
        persistent_workers=workers > 0,
    )  # fmt: skip
    return loader


def _long(batch: Any) -> torch.Tensor:
    tensor: torch.Tensor = batch["tokens"] if isinstance(batch, dict) else batch
    return tensor.long()


def _forever() -> Iterator[None]:
    while True:
        yield


@contextlib.contextmanager
def _skipped(name: str, known: Any = None) -> Iterator[None]:
    """Tell why a peer is not measured, and go on; ours must not fail."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        if name.startswith("ours"):
            raise
        if not known:
            print(f"not measured: {name}: {type(error).__name__}: {str(error)[:200]}")


def _be_quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="default: 1 2")


if __name__ == "__main__":
    _be_quiet()
    # What peers start inherits these.
    os.environ.update(HF_DATASETS_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1")
    os.environ["PYTHONWARNINGS"] = "ignore"
    run(__doc__.partition("\n")[0], measure, _add_options)
