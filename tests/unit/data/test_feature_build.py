"""Datasets of features: every value as it was, in one split, with figures of the training rows."""

import csv
import gzip
import hashlib
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagleray.actors.data import BuildProgress, Dataset, build_dataset, row_recipe
from eagleray.actors.data import build as module
from eagleray.actors.data import rows as row_shards
from eagleray.actors.data.features import Features
from eagleray.actors.data.row_recipe import RowRecipe
from eagleray.actors.data.units import Encoder, Unit, UnitResult
from eagleray.platform.config import DataConfig
from eagleray.platform.errors import DataError, IntegrityError, StorageError
from eagleray.platform.storage import Storage, digest_file

Build = Callable[..., Dataset]
Record = dict[str, Any]
CARRIERS = ["UA", "AA", "B6", "\u00e9t\u00e9"]
FEATURES = {
    "columns": ["month", "carrier", "pixels", "gain"], "label": "digit",
    "categories": ["carrier", "digit"],
}  # fmt: skip


def records(count: int, seed: int = 0) -> list[Record]:
    draw = random.Random(seed)
    return [
        {
            "n": n,
            "month": draw.randint(1, 12),
            "carrier": draw.choice(CARRIERS),
            "pixels": [draw.uniform(-1, 1) for _ in range(3)],
            "gain": draw.gauss(1e4, 1e-2),
            "digit": draw.choice([2, 10, 7]),
        }
        for n in range(count)
    ]


def write(path: Path, rows: list[Record]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a.jsonl and b.jsonl: 120 records."""
    rows = records(120)
    write(tmp_path / "a.jsonl", rows[:60])
    write(tmp_path / "b.jsonl", rows[60:])
    return tmp_path


@pytest.fixture
def build(folder: Path, storage: Storage) -> Build:
    """Builds from the folder; keywords are settings of `data`."""

    def run(
        storage: Storage = storage,
        on_progress: Callable[[BuildProgress], None] | None = None,
        **settings: Any,
    ) -> Dataset:
        defaults: dict[str, Any] = {
            "sources": [{"path": "*.jsonl"}],
            "features": FEATURES,
            "eval_fraction": 0.2,
        }
        config = DataConfig.model_validate(defaults | settings)
        return build_dataset(config, lambda path: folder / path, storage, on_progress)

    return run


def rows_of(dataset: Dataset, split: Any = "train") -> np.ndarray:  # type: ignore[type-arg]
    return dataset.read(split, np.arange(dataset.num_samples(split)))


def expected_row(record: Record) -> list[float]:
    carrier = sorted(CARRIERS).index(record["carrier"])
    digit = [2, 7, 10].index(record["digit"])
    return [record["month"], carrier, *record["pixels"], record["gain"], digit]


def is_held_out(record: Record) -> bool:
    numbers = [record["month"], 0, *record["pixels"], record["gain"], 0]
    content = np.array(numbers, "<f4").tobytes()
    content += f"{record['carrier']}\0{record['digit']}\0".encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8]) < int(0.2 * 2**64)


def test_every_record_is_in_one_split_by_its_content_in_order_and_bit_for_bit(build: Build) -> None:
    dataset = build()
    for split in ("train", "eval"):
        wanted = [r for r in records(120) if is_held_out(r) == (split == "eval")]
        assert len(wanted) > 10
        expected = np.array([expected_row(record) for record in wanted], dtype=np.float32)
        found = rows_of(dataset, split)
        assert (found.dtype, found.tobytes()) == (np.float32, expected.tobytes())
    assert dataset.manifest["format"] == 3


def test_columns_have_figures_of_the_training_rows_and_categories_of_all(build: Build) -> None:
    dataset = build()
    features = dataset.features
    assert features is not None
    rows = rows_of(dataset).astype(np.float64)
    assert features.names == ["month", "carrier", "pixels[0]", "pixels[1]", "pixels[2]", "gain"]
    is_code = np.array([name == "carrier" for name in features.names])
    numbers = rows[:, :-1][:, ~is_code]
    assert np.allclose(features.mean[~is_code], numbers.mean(axis=0), rtol=1e-6)
    assert np.allclose(features.scale[~is_code], numbers.std(axis=0), rtol=1e-6)
    assert (features.mean[1], features.scale[1]) == (0, 1)
    month, carrier, pixels, gain = features.columns
    assert (month.min, month.max, month.count) == ((1.0,), (12.0,), (len(rows),))
    assert pixels.width == 3
    assert gain.min == (rows[:, 5].min(),)
    assert carrier.categories == tuple(sorted(CARRIERS))
    counts = Counter(rows[:, 1].tolist())
    assert carrier.count == tuple(counts[code] for code in range(4))
    assert features.label is not None
    # By number, not by text.
    assert features.label.categories == ("2", "7", "10")
    assert features.layout == (6, "class")


def test_names_with_more_digits_than_python_converts_are_names(build: Build, folder: Path) -> None:
    long = "7" * 5000
    rows = records(60)
    for number, row in enumerate(rows):
        row["digit"] = long if number % 2 else "10"
    write(folder / "a.jsonl", rows)
    write(folder / "b.jsonl", [{**row, "digit": "9"} for row in records(60, seed=1)])
    features = build().features
    assert features is not None
    assert features.label is not None
    assert features.label.categories == ("10", long, "9")


def test_a_column_whose_numbers_are_equal_is_not_divided_by_nothing(
    build: Build, folder: Path
) -> None:
    write(folder / "a.jsonl", [{"n": n, "same": 3} for n in range(60)])
    dataset = build(sources=[{"path": "a.jsonl"}], features={"columns": ["n", "same"]})
    assert dataset.features is not None
    assert dataset.features.columns[1].std == (0.0,)
    assert (dataset.features.mean[1], dataset.features.scale[1]) == (3, 1)
    assert dataset.features.layout == (2, None)


def test_the_manifest_describes_the_features_and_gives_them_back(build: Build) -> None:
    dataset = build()
    described = dict(dataset.manifest["features"])
    assert described.pop("missing") == "fail"
    back = Features.from_manifest(described)
    assert back == dataset.features
    assert json.loads(json.dumps(back.describe())) == described


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "parquet"])
def test_any_kind_gives_the_same_bytes_however_it_is_cut(
    build: Build, folder: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rows = [{key: row[key] for key in row if key != "pixels"} for row in records(200)]
    raw = folder / "raw"
    raw.mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "jsonl":
        (raw / "a.jsonl").write_text(text)
    elif kind == "jsonl.gz":
        (raw / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    elif kind == "csv":
        with (raw / "a.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), raw / "a.parquet", row_group_size=7)
    source = {"path": "raw", "kind": "jsonl" if kind == "jsonl.gz" else kind}
    source |= {"where": {"n": {"max": 150}}}
    options: dict[str, Any] = {
        "sources": [source],
        "features": {"label": "digit", "categories": ["carrier", "digit"]},
    }
    whole = build(**options)
    assert whole.features is not None
    assert whole.features.names == ["month", "carrier", "gain"]
    for unit_bytes in (1, 3000):
        monkeypatch.setattr(module, "UNIT_BYTES", unit_bytes)
        cut = build(storage=Storage(storage.root / f"cut-{unit_bytes}"), **options)
        assert cut.digest == whole.digest
        assert cut.verify() == []


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None
)
@given(
    values=st.lists(
        st.tuples(st.floats(width=32, allow_nan=False, allow_infinity=False), st.text(max_size=3)),
        min_size=1,
        max_size=20,
    ),
    unit_bytes=st.integers(1, 2000),
)
def test_any_float32_and_any_text_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    values: list[tuple[float, str]],
    unit_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("any")
    # Enough of others that both splits have some.
    rows = [*values, *((float(n), "other") for n in range(40))]
    write(folder / "a.jsonl", [{"x": x, "c": c} for x, c in rows])
    config = DataConfig.model_validate(
        {
            "sources": [{"path": "a.jsonl"}],
            "features": {"categories": ["c"], "missing": "nan"},
            "eval_fraction": 0.3,
        }
    )
    monkeypatch.setattr(module, "UNIT_BYTES", unit_bytes)
    dataset = build_dataset(config, lambda path: folder / path, Storage(folder / "store"))
    assert dataset.features is not None
    names = dataset.features.columns[1].categories
    assert names is not None
    found = np.concatenate([rows_of(dataset), rows_of(dataset, "eval")])
    back = Counter((np.float32(x).tobytes(), names[int(code)]) for x, code in found)
    wanted = Counter((np.float32(x).tobytes(), c if c.strip() else "") for x, c in rows)
    assert back == wanted
    assert dataset.verify() == []


def test_the_same_inputs_give_the_same_digest_in_another_place(
    build: Build, folder: Path, tmp_path: Path
) -> None:
    first = build()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        shutil.copy(folder / name, moved / name)
    config = DataConfig.model_validate(
        {"sources": [{"path": "*.jsonl"}], "features": FEATURES, "eval_fraction": 0.2}
    )
    second = build_dataset(config, lambda path: moved / path, Storage(moved / "store"))
    assert second.digest == first.digest
    files = {path.name: digest_file(path) for path in first.folder.iterdir()}
    assert {path.name: digest_file(path) for path in second.folder.iterdir()} == files
    assert str(tmp_path) not in (second.folder / "manifest.json").read_text()


def test_the_second_build_is_found(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build()
    monkeypatch.setattr(Encoder, "encode", lambda *_: pytest.fail("encoded again"))
    assert build().digest == first.digest


@pytest.mark.parametrize(
    "change",
    [
        {"features": FEATURES | {"columns": ["month", "carrier", "gain", "pixels"]}},
        {"features": FEATURES | {"categories": ["carrier"]}},
        {"features": FEATURES | {"missing": 0.0}},
        {"features": {key: FEATURES[key] for key in ("columns",)} | {"categories": ["carrier"]}},
        {"eval_fraction": 0.3},
        {"sources": [{"path": "a.jsonl"}]},
    ],
)
def test_a_setting_that_matters_changes_the_digest(build: Build, change: Record) -> None:
    assert build(**change).digest != build().digest


def test_shards_roll_over_and_read_as_one(build: Build, storage: Storage) -> None:
    whole = build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_shards, "BLOCK_BYTES", 200)
        patch.setattr(row_recipe, "BLOCK_BYTES", 200)
        cut = build(shard_bytes=600, storage=Storage(storage.root / "cut"))
        assert cut.manifest["block_rows"] == 7
    shards = cut.manifest["splits"]["train"]["shards"]
    assert len(shards) > 3
    assert {shard["rows"] for shard in shards[:-1]} == {21}
    ids = np.random.default_rng(0).permutation(cut.num_samples("train"))
    assert cut.read("train", ids).tobytes() == whole.read("train", ids).tobytes()
    split = cut.split("train")
    through = split.read_through(ids, lambda blocks: [split.read_block(b) for b in blocks])
    assert through.tobytes() == whole.read("train", ids).tobytes()
    assert cut.verify() == []


DOMAINS = [
    {"path": "a.jsonl", "domain": "north"},
    {"path": "b.jsonl", "domain": "south", "where": {"n": {"max": 89}}},
    {"path": "b.jsonl", "domain": "east", "where": {"n": {"min": 90}}},
]


def test_domains_are_streams_of_their_own_and_share_codes(build: Build) -> None:
    dataset = build(sources=DOMAINS)
    assert dataset.domains == ("north", "south", "east")
    wanted = [expected_row(record) for record in records(120) if not is_held_out(record)]
    assert np.array_equal(rows_of(dataset), np.array(wanted, np.float32))
    sizes = [sum(not is_held_out(r) for r in records(120)[a:b]) for a, b in
             ((0, 60), (60, 90), (90, 120))]  # fmt: skip
    assert dataset.sizes("train") == tuple(sizes)
    assert dataset.verify() == []


def test_verify_finds_any_flipped_byte_of_any_file(build: Build, storage: Storage) -> None:
    dataset = build()
    draw = random.Random(4)
    names = sorted(path.name for path in dataset.folder.iterdir())
    assert names == ["main.eval-00000.bin", "main.train-00000.bin", "manifest.json"]
    for path in sorted(dataset.folder.iterdir()):
        sound = path.read_bytes()
        for place in draw.sample(range(len(sound)), 100):
            damaged = bytearray(sound)
            damaged[place] ^= 1 << draw.randrange(8)
            path.write_bytes(damaged)
            if path.name == "manifest.json":
                with pytest.raises(IntegrityError, match=r"manifest\.json"):
                    Dataset.open(storage, dataset.digest)
            else:
                assert [damage.file for damage in dataset.verify()] == [path.name]
        path.write_bytes(sound)
    assert dataset.verify() == []


def test_a_shard_of_rows_with_another_meaning_does_not_open(
    build: Build, storage: Storage, folder: Path
) -> None:
    dataset = build()
    for path in folder.glob("*.jsonl"):
        path.write_text(path.read_text().replace('"gain"', '"loss"'))
    # The same values, and of another column.
    columns = ["month", "carrier", "pixels", "loss"]
    other = build(features=FEATURES | {"columns": columns})
    assert rows_of(other).tobytes() == rows_of(dataset).tobytes()
    name = "main.eval-00000.bin"
    shutil.copy(other.folder / name, dataset.folder / name)
    with pytest.raises(IntegrityError, match="not the one that the manifest names"):
        Dataset.open(storage, dataset.digest)


def test_a_dataset_of_features_has_no_tokens(build: Build) -> None:
    dataset = build()
    for name in ("seq_len", "vocab_size", "eod_id", "tokenizer_json"):
        with pytest.raises(DataError, match="holds rows of numbers, not tokens") as failed:
            getattr(dataset, name)
        assert "BatchStream" in failed.value.fix


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gain": None}, "has an empty cell in column 'gain'"),
        ({"gain": "much"}, "has 'much' in column 'gain', not a number"),
        ({"pixels": [1, 2]}, "has a list of 2 in column 'pixels', and the first record has 3"),
        ({"carrier": ""}, "has an empty cell in column 'carrier'"),
        ({"digit": None}, "has an empty cell in column 'digit'"),
    ],
)
def test_a_bad_cell_is_named_by_line_and_column_or_left_out_and_counted(
    build: Build, folder: Path, changes: Record, named: str
) -> None:
    rows = records(60)
    write(folder / "a.jsonl", [*rows[:41], rows[41] | changes, *rows[42:]])
    with pytest.raises(DataError) as failed:
        build()
    assert failed.value.what.startswith(f"{folder}/a.jsonl:42 {named}")
    assert "on_bad_record=skip" in failed.value.fix
    dataset = build(on_bad_record="skip")
    entry = dataset.manifest["sources"][0]
    assert (entry["documents"], entry["skipped"]) == (59, 1)
    assert entry["skipped_examples"][0].startswith(f"a.jsonl:42: {named}")
    kept = [
        expected_row(r) for r in rows[:41] + rows[42:] + records(120)[60:] if not is_held_out(r)
    ]
    assert np.array_equal(rows_of(dataset), np.array(kept, np.float32))


def test_empty_cells_may_be_nan_and_are_left_out_of_the_figures(build: Build, folder: Path) -> None:
    rows = records(60)
    for row in rows[::3]:
        row["gain"] = row["pixels"] = None
    rows[1]["carrier"] = None
    write(folder / "a.jsonl", rows)
    dataset = build(sources=[{"path": "a.jsonl"}], features=FEATURES | {"missing": "nan"})
    found = rows_of(dataset)
    assert dataset.features is not None
    gain, carrier = dataset.features.columns[3], dataset.features.columns[1]
    numbers = found[:, 5][~np.isnan(found[:, 5])].astype(np.float64)
    assert 0 < gain.count[0] == len(numbers) < len(found)
    assert math.isclose(gain.mean[0], numbers.mean(), rel_tol=1e-12)
    assert np.isnan(found[:, 2:5]).all(axis=1).sum() == np.isnan(found[:, 5]).sum()
    assert carrier.categories is not None
    assert carrier.categories[0] == ""
    assert dataset.verify() == []


def test_a_column_without_any_value_is_refused(build: Build) -> None:
    features = {"columns": ["month", "moth"], "missing": "nan"}
    with pytest.raises(DataError, match="column 'moth' has no value in any of the"):
        build(features=features)


def test_too_many_names_are_no_category(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_recipe, "MAX_CATEGORIES", 3)
    with pytest.raises(DataError, match="'carrier' has more than 3 different values"):
        build()


def test_a_split_without_a_row_says_what_to_change(build: Build) -> None:
    with pytest.raises(DataError, match="the eval split has no sample: 0 of 120 rec") as failed:
        build(eval_fraction=1e-12)
    assert failed.value.fix == "add records, or raise data.eval_fraction"
    held_out = next(record["n"] for record in records(60) if is_held_out(record))
    with pytest.raises(DataError, match="the train split has no sample: 0 of 1 records") as failed:
        build(sources=[{"path": "a.jsonl", "where": {"n": [held_out]}}])
    assert failed.value.fix == "add records, or lower data.eval_fraction"


def test_a_domain_without_a_training_row_is_named(build: Build) -> None:
    held_out = next(record["n"] for record in records(60) if is_held_out(record))
    sources = [*DOMAINS, {"path": "a.jsonl", "domain": "west", "where": {"n": [held_out]}}]
    with pytest.raises(DataError, match="the train split of domain west has no sample: 0 of 121"):
        build(sources=sources)


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

    monkeypatch.setattr(Encoder, "encode", encode)
    with pytest.raises(StorageError if issubclass(error, OSError) else error):
        build()
    assert storage.names("datasets") == []
    dataset = build()
    assert dataset.digest == undisturbed.digest
    assert encoded == [0, 1, 2, -1, *range(3, len(encoded) - 1)]
    assert len(encoded) > 6


def test_a_finished_unit_that_was_damaged_is_done_anew(
    build: Build, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = build(storage=Storage(storage.root / "undisturbed"))
    monkeypatch.setattr(module, "UNIT_BYTES", 2000)
    with monkeypatch.context() as patch:
        patch.setattr(RowRecipe, "write", lambda *args: pytest.fail("here"))
        with pytest.raises(pytest.fail.Exception):
            build()
    (unit,) = storage.path("datasets").glob(".build-*/units/00002/train.items")
    sound = unit.read_bytes()
    # A code that is none: found before it is looked up.
    for damaged in (sound[:4] + b"\xff\xff\x7f\x4b" + sound[8:], sound[:-3], sound + b"\0"):
        unit.parent.mkdir(exist_ok=True)
        unit.write_bytes(damaged)
        shutil.copytree(unit.parent, storage.root / "kept", dirs_exist_ok=True)
        with pytest.raises(IntegrityError, match=r"00002/train\.items is not what the build wrote"):
            build()
        assert not unit.exists()
        shutil.copytree(storage.root / "kept", unit.parent)
    shutil.rmtree(unit.parent)
    assert build().digest == undisturbed.digest


def test_progress_names_records_and_values(build: Build) -> None:
    seen: list[BuildProgress] = []
    build(on_progress=seen.append)
    assert [*dict.fromkeys(progress.phase for progress in seen)] == ["hash", "encode"]
    assert (seen[-1].fraction, seen[-1].documents, seen[-1].tokens) == (1.0, 120, 120 * 7)
