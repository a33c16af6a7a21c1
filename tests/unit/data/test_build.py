"""Building a dataset: one digest for the same inputs, whole or absent, every token counted."""

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagleray.actors.data import BuildProgress, Dataset, build_dataset, last_digest
from eagleray.actors.data import build as module
from eagleray.actors.data.sources import DocumentReader
from eagleray.actors.data.text_recipe import TextRecipe
from eagleray.actors.data.tokenizer import TextTokenizer
from eagleray.actors.data.units import Encoder, Unit, UnitResult
from eagleray.platform.config import DataConfig
from eagleray.platform.errors import DataError, IntegrityError, NotFoundError, StorageError
from eagleray.platform.storage import Storage, digest_file

Build = Callable[..., Dataset]


def texts_of(dataset: Dataset, split: str, domain: int = 0) -> list[str]:
    tokenizer = TextTokenizer(dataset.tokenizer_json)
    stream = dataset.split(split).streams[domain]  # type: ignore[arg-type]
    assert stream is not None
    tokens = np.empty(stream.num_tokens, dtype=np.int32)
    stream.read(0, tokens)
    ends = np.flatnonzero(tokens == dataset.eod_id)
    assert ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part[part != 0]) for part in np.split(tokens, ends[:-1] + 1)]


def corpus_texts(folder: Path) -> list[str]:
    lines = [line for p in sorted((folder / "raw").iterdir()) for line in p.open()]
    return [json.loads(line)["text"] for line in lines]


def test_every_document_is_in_one_split_whole_and_in_order(build: Build, corpus: Path) -> None:
    dataset = build()
    threshold = int(0.2 * 2**64)
    held = [
        text
        for text in corpus_texts(corpus)
        if int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) < threshold
    ]
    assert texts_of(dataset, "eval") == held
    assert texts_of(dataset, "train") == [t for t in corpus_texts(corpus) if t not in held]


def test_samples_overlap_by_one_token_and_the_tail_is_counted(build: Build) -> None:
    dataset = build()
    for split in ("train", "eval"):
        described = dataset.manifest["splits"][split]
        tokens = np.empty(described["tokens"], dtype=np.int32)
        (stream,) = dataset.split(split).streams
        assert stream is not None
        stream.read(0, tokens)
        samples = dataset.read(split, np.arange(dataset.num_samples(split)))
        for number, sample in enumerate(samples):
            assert np.array_equal(sample, tokens[number * 16 : number * 16 + 17])
        assert described["samples"] * 16 + 1 + described["dropped_tokens"] == described["tokens"]
        assert described["dropped_tokens"] < 16


def test_the_same_inputs_give_the_same_digest_in_another_place(
    build: Build, corpus: Path, tmp_path: Path
) -> None:
    first = build()
    moved = tmp_path / "elsewhere" / "deep"
    shutil.copytree(corpus, moved)
    second = build(Storage(tmp_path / "other"), moved)
    assert second.digest == first.digest
    files = {path.name: digest_file(path) for path in first.folder.iterdir()}
    assert {path.name: digest_file(path) for path in second.folder.iterdir()} == files
    assert str(tmp_path) not in (second.folder / "manifest.json").read_text()


def test_the_second_build_is_found_but_sources_are_still_hashed(
    build: Build, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build()
    monkeypatch.setattr(DocumentReader, "documents", lambda self: pytest.fail("read again"))
    assert build().digest == first.digest
    monkeypatch.undo()
    with (corpus / "raw/a.jsonl").open("a") as file:
        file.write('{"text": "One more document."}\n')
    assert build().digest != first.digest


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 17},
        {"eval_fraction": 0.3},
        {"tokenizer": {"kind": "bpe", "vocab_size": 300}},
        {"sources": [{"path": "raw/a.jsonl"}]},
        {"sources": [{"path": "raw/b.jsonl"}, {"path": "raw/a.jsonl"}]},
    ],
)
def test_a_setting_that_matters_changes_the_digest(build: Build, change: dict[str, object]) -> None:
    assert build(**change).digest != build().digest


def test_settings_that_do_not_touch_the_data_do_not_change_the_digest(build: Build) -> None:
    digest = build().digest
    assert build(order_seed=9, prefetch_batches=0, cache={"enabled": False}).digest == digest
    assert build(on_bad_record="skip").digest == digest


def test_shards_roll_over_and_read_as_one(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build()
    monkeypatch.setattr("eagleray.actors.data.split_writer.BLOCK_TOKENS", 64)
    monkeypatch.setattr(
        "eagleray.actors.data.shards.ShardWriter.__init__.__kwdefaults__", {"block_tokens": 64}
    )
    cut = build(shard_bytes=600, storage=Storage(whole.folder.parents[1] / "cut"))
    shards = cut.manifest["splits"]["train"]["shards"]
    assert len(shards) > 3
    assert {shard["tokens"] for shard in shards[:-1]} == {256}
    ids = np.arange(cut.num_samples("train"))
    assert np.array_equal(cut.read("train", ids), whole.read("train", ids))
    assert cut.verify() == []


def test_bad_and_blank_records_are_in_the_manifest(build: Build, corpus: Path) -> None:
    (corpus / "raw/c.jsonl").write_text('{"text": ""}\n{"text": " "}\n{broken\n{"text": "fine"}\n')
    with pytest.raises(DataError, match=r"c\.jsonl:3 is not valid JSON"):
        build()
    entry = build(on_bad_record="skip").manifest["sources"][2]
    counts = {name: entry[name] for name in ("documents", "empty", "filtered", "skipped")}
    assert counts == {"documents": 1, "empty": 2, "filtered": 0, "skipped": 1}
    assert entry["skipped_examples"][0].startswith("c.jsonl:3: is not valid JSON")
    assert entry["name"] == "c.jsonl"


def test_every_record_is_counted_wherever_blanks_and_empty_files_stand(
    build: Build, corpus: Path
) -> None:
    raw = corpus / "raw"
    blank, some = '{"text": " "}\n', (raw / "a.jsonl").read_text()
    files = {
        "a-first": blank + some,
        "b-last": some.replace("the", "a") + blank,
        "c-all": 3 * blank,
        "d-none": "",
        "e-inside": some.replace("\n", "\n" + blank, 1).replace("of", "in"),
    }
    for old in raw.iterdir():
        old.unlink()
    for name, content in files.items():
        (raw / f"{name}.jsonl").write_text(content)
    dataset = build()
    entries = {Path(entry["name"]).stem: entry for entry in dataset.manifest["sources"]}
    kinds = ("documents", "empty", "filtered", "skipped")
    counted = {name: sum(entry[kind] for kind in kinds) for name, entry in entries.items()}
    assert counted == {name: len(content.splitlines()) for name, content in files.items()}
    assert [entries[name]["empty"] for name in files] == [1, 1, 3, 0, 1]
    # All that was kept is in one split or the other, and none of it is without a token.
    splits = dataset.manifest["splits"].values()
    assert sum(split["documents"] for split in splits) == sum(
        entry["documents"] for entry in entries.values()
    )
    assert min(upper for split in splits for upper, _ in split["document_tokens"]) > 1


def test_a_corpus_of_blanks_is_refused_by_path(build: Build, corpus: Path) -> None:
    (corpus / "blank.jsonl").write_text('{"text": ""}\n{"text": "\\n"}\n')
    with pytest.raises(DataError, match=r"no document with text .*blank\.jsonl: 2 empty"):
        build(sources=[{"path": "blank.jsonl"}])


@pytest.mark.parametrize(("fraction", "split"), [(1e-9, "eval"), (0.499, "train")])
def test_a_split_without_a_sample_names_sizes_and_what_to_change(
    build: Build, corpus: Path, fraction: float, split: str
) -> None:
    if split == "train":
        (corpus / "raw/b.jsonl").unlink()
        texts = [t for t in corpus_texts(corpus) if hashlib.sha256(t.encode()).digest()[0] < 128]
        (corpus / "raw/a.jsonl").write_text(
            "".join(json.dumps({"text": t}) + "\n" for t in texts[:9])
        )
    with pytest.raises(DataError) as failed:
        build(eval_fraction=fraction, seq_len=4096)
    assert f"the {split} split has no sample: 0 of" in failed.value.what
    assert "seq_len + 1 = 4097" in failed.value.what
    assert "data.seq_len" in failed.value.fix


def test_a_file_that_changes_under_the_build_is_noticed(
    build: Build, corpus: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (corpus / "raw/a.jsonl").read_bytes()
    (corpus / "tok.json").write_bytes(build().tokenizer_json)
    changes = {
        "longer": before + b'{"text": "late"}\n',
        "another": before.replace(b"people", b"PEOPLE", 1),
    }
    for phase, owner, method in (
        ("learn", TextRecipe, "_tokenizer"),
        ("encode", module._Build, "_encode"),
    ):
        for name, after in changes.items():
            real = getattr(owner, method)

            def slip_in(*args: object, real: Any = real, after: bytes = after) -> object:
                (corpus / "raw/a.jsonl").write_bytes(after)
                return real(*args)

            tokenizer = (
                {"kind": "file", "path": "tok.json"}
                if phase == "encode"
                else {"kind": "bpe", "vocab_size": 320}
            )
            with monkeypatch.context() as patch:
                patch.setattr(owner, method, slip_in)
                with pytest.raises(DataError, match=r"a\.jsonl was changed while"):
                    build(tokenizer=tokenizer, seq_len=8, storage=Storage(corpus / name / phase))
            (corpus / "raw/a.jsonl").write_bytes(before)
            folder = corpus / name / phase / "datasets"
            assert [path.name for path in folder.iterdir()] == [".building.lock"]


@pytest.mark.parametrize(
    ("owner", "method"),
    [(TextRecipe, "_tokenizer"), (module._Build, "_encode"), (module._Build, "_tallies")],
)
def test_a_file_that_vanishes_under_the_build_is_named(
    build: Build, corpus: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    real = getattr(owner, method)

    def slip_in(*args: object) -> object:
        (corpus / "raw/a.jsonl").unlink()
        return real(*args)

    monkeypatch.setattr(owner, method, slip_in)
    with pytest.raises(DataError, match=r"a\.jsonl (was changed while|cannot be read)"):
        build()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, FileNotFoundError])
def test_an_interrupted_build_goes_on_where_it_stopped(
    build: Build, storage: Storage, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    undisturbed = build(storage=Storage(storage.root / "undisturbed"))
    monkeypatch.setattr(module, "UNIT_BYTES", 2000)
    real, encoded = Encoder.encode, list[int]()

    def encode(self: Encoder, unit: Unit, *args: Any) -> UnitResult:
        if len(encoded) == 3:
            encoded.append(-1)
            raise error
        encoded.append(unit.index)
        return real(self, unit, *args)

    learnt: list[object] = []
    tokenizer = TextRecipe._tokenizer
    monkeypatch.setattr(Encoder, "encode", encode)
    monkeypatch.setattr(
        TextRecipe, "_tokenizer", lambda *args: learnt.append(1) or tokenizer(*args)
    )
    # An error of the system is told as storage's.
    with pytest.raises(StorageError if issubclass(error, OSError) else error):
        build()
    assert storage.names("datasets") == []
    (left,) = storage.path("datasets").glob(".build-*")
    assert len(list((left / "units").iterdir())) == 3
    dataset = build()
    assert dataset.digest == undisturbed.digest
    # Nothing was learnt or encoded twice.
    assert encoded == [0, 1, 2, -1, *range(3, len(encoded) - 1)]
    assert len(encoded) > 6
    assert len(learnt) == 1
    assert not left.exists()


def test_a_finished_unit_that_was_damaged_is_done_anew(
    build: Build, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = build(storage=Storage(storage.root / "undisturbed"))
    monkeypatch.setattr(module, "UNIT_BYTES", 2000)
    with monkeypatch.context() as patch:
        patch.setattr(TextRecipe, "write", lambda *args: pytest.fail("here"))
        with pytest.raises(pytest.fail.Exception):
            build()
    (ids,) = storage.path("datasets").glob(".build-*/units/00002/train.items")
    data = bytearray(ids.read_bytes())
    data[4] ^= 1
    ids.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"00002/train\.items is not what the build wrote"):
        build()
    assert build().digest == undisturbed.digest


def test_a_second_builder_waits_for_the_first(
    build: Build, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun, may_go_on = Encoder.encode, threading.Event(), threading.Event()

    def encode(*args: Any) -> UnitResult:
        begun.set()
        assert may_go_on.wait(30)
        return real(*args)

    monkeypatch.setattr(Encoder, "encode", encode)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(build)
        assert begun.wait(30)
        seen: list[BuildProgress] = []

        def look(progress: BuildProgress) -> None:
            seen.append(progress)
            if progress.phase == "wait":
                may_go_on.set()

        second = pool.submit(build, on_progress=look)
        assert first.result().digest == second.result().digest
    assert [*dict.fromkeys(each.phase for each in seen)] == ["hash", "wait", "found"]


def test_what_killed_builds_left_is_removed(build: Build, storage: Storage) -> None:
    for name in (".tmp-build-dead", ".build-of-something-else-16000000"):
        left = storage.path("datasets", name)
        left.mkdir(parents=True)
        (left / "train-00000.bin").write_bytes(b"half")
        build(seq_len=16 + len(name))
        assert not left.exists()


def test_the_tokenizer_never_sees_held_out_text(build: Build, corpus: Path) -> None:
    texts = ["zyxwvut" * 40 if i % 2 else "plain words here" for i in range(400)]
    draw = [text + f" {i}" for i, text in enumerate(texts)]
    digests = [hashlib.sha256(text.encode()).digest() for text in draw]
    held = [int.from_bytes(d[:8]) < int(0.2 * 2**64) for d in digests]
    kept = [t for t, h in zip(draw, held, strict=True) if h == t.startswith("zyx")]
    (corpus / "raw/a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in kept))
    dataset = build(sources=[{"path": "raw/a.jsonl"}])
    assert len(TextTokenizer(dataset.tokenizer_json).encode("zyxwvut")) == 7


def test_only_a_share_of_a_large_corpus_is_learnt_from(build: Build) -> None:
    small = build(tokenizer={"kind": "bpe", "vocab_size": 320, "train_bytes": 2000})
    assert small.digest != build().digest
    with pytest.raises(DataError, match="no text to learn"):
        build(tokenizer={"kind": "bpe", "vocab_size": 320, "train_bytes": 0})


def test_a_tokenizer_file_is_used_as_it_is(build: Build, corpus: Path) -> None:
    trained = build()
    (corpus / "tok.json").write_bytes(trained.tokenizer_json)
    loaded = build(tokenizer={"kind": "file", "path": "tok.json"})
    assert loaded.tokenizer_json == trained.tokenizer_json
    assert loaded.digest == trained.digest


def test_progress_ends_with_all_that_was_read(corpus: Path, storage: Storage) -> None:
    seen: list[BuildProgress] = []
    config = DataConfig.model_validate(
        {"sources": [{"path": "raw"}], "seq_len": 16, "eval_fraction": 0.2}
    )
    build_dataset(config, lambda path: corpus / path, storage, seen.append)
    assert [*dict.fromkeys(p.phase for p in seen)] == ["hash", "count", "tokenizer", "encode"]
    assert (seen[-1].fraction, seen[-1].documents) == (1.0, 120)
    assert seen[-1].tokens > 0
    seen.clear()
    build_dataset(config, lambda path: corpus / path, storage, seen.append)
    assert seen[-1].phase == "found"


def test_the_last_dataset_is_remembered(build: Build, storage: Storage) -> None:
    with pytest.raises(NotFoundError, match="no dataset has been built"):
        last_digest(storage)
    first = build()
    build(seq_len=32)
    build()
    assert last_digest(storage) == first.digest


def test_storage_that_cannot_be_written_is_named(build: Build, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write"):
        build(Storage(tmp_path / "file" / "below"))


THREE = [
    {"path": "raw/a.jsonl", "domain": "north"},
    {"path": "raw/b.jsonl", "domain": "south", "where": {"n": {"max": 29}}},
    {"path": "raw/b.jsonl", "domain": "east", "where": {"n": {"min": 30}}},
]


@pytest.fixture
def numbered(corpus: Path) -> Path:
    """The corpus with a number from 0 to 59 beside each text."""
    for path in (corpus / "raw").iterdir():
        texts = [json.loads(line)["text"] for line in path.open()]
        records = [json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(texts)]
        path.write_text("".join(records))
    return corpus


@pytest.mark.usefixtures("numbered")
def test_domains_are_streams_of_their_own_in_the_order_of_their_sources(
    build: Build, corpus: Path
) -> None:
    dataset = build(sources=THREE)
    assert dataset.domains == ("north", "south", "east")
    texts = corpus_texts(corpus)
    for domain, part in enumerate((texts[:60], texts[60:90], texts[90:])):
        held = texts_of(dataset, "eval", domain)
        assert texts_of(dataset, "train", domain) == [text for text in part if text not in held]
        assert set(held) <= set(part)
    described = dataset.manifest["splits"]["train"]
    assert sum(described["domains"][d]["tokens"] for d in dataset.domains) == described["tokens"]
    assert dataset.verify() == []


@pytest.mark.usefixtures("numbered")
def test_ids_count_through_the_domains(build: Build) -> None:
    dataset = build(sources=THREE)
    split = dataset.split("train")
    samples = dataset.read("train", np.arange(split.num_samples))
    base = 0
    for size, stream in zip(split.sizes, split.streams, strict=True):
        assert stream is not None
        tokens = np.empty(size * 16 + 1, dtype=np.int32)
        stream.read(0, tokens)
        for number in range(size):
            expected = tokens[number * 16 : number * 16 + 17]
            assert np.array_equal(samples[base + number], expected)
        base += size
    through = split.read_through(
        np.arange(split.num_samples), lambda blocks: [split.read_block(b) for b in blocks]
    )
    assert np.array_equal(through, samples)


@pytest.mark.usefixtures("numbered")
def test_a_domain_without_a_training_sample_is_named(build: Build, storage: Storage) -> None:
    with pytest.raises(DataError, match="the train split of domain west has no sample"):
        build(sources=[*THREE, {"path": "raw/a.jsonl", "domain": "west", "where": {"n": [99]}}])
    assert storage.names("datasets") == []


@pytest.mark.usefixtures("numbered")
def test_a_domain_without_held_out_text_is_no_error(build: Build) -> None:
    one = {"path": "raw/a.jsonl", "domain": "one", "where": {"n": [3]}}
    others = {"path": "raw/b.jsonl", "domain": "others"}
    dataset = build(sources=[one, others], eval_fraction=0.1)
    assert dataset.sizes("eval")[0] == 0
    assert dataset.read("eval", np.arange(dataset.num_samples("eval"))).min() >= 0


def test_moving_a_file_to_another_domain_changes_the_digest(build: Build) -> None:
    sources = [{"path": "raw/a.jsonl"}, {"path": "raw/b.jsonl", "domain": "b"}]
    assert build().digest != build(sources=sources).digest
