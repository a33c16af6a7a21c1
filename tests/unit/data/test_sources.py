"""Documents from JSON Lines and text: counted, filtered, refused by file and line."""

import csv
import gzip
import hashlib
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from eagleray.actors.data import records
from eagleray.actors.data.sources import DocumentReader, find_files
from eagleray.platform.config import SourceConfig
from eagleray.platform.errors import DataError


def read(
    root: Path, *configs: dict[str, object], skip: bool = False
) -> tuple[list[str], DocumentReader]:
    files = find_files([SourceConfig.model_validate(c) for c in configs], lambda p: root / p)
    reader = DocumentReader(files, "skip" if skip else "fail")
    return [document.text for document in reader.documents()], reader


def write_jsonl(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_files_of_a_folder_are_read_in_name_order_and_hidden_ones_left_out(tmp_path: Path) -> None:
    for name in ("d/b.jsonl", "d/a.jsonl", "d/sub/c.jsonl", "d/.hidden.jsonl", "d/.x/e.jsonl"):
        write_jsonl(tmp_path / name, {"text": name})
    (tmp_path / "d/readme.md").write_text("not JSON Lines")
    texts, reader = read(tmp_path, {"path": "d"})
    assert texts == ["d/a.jsonl", "d/b.jsonl", "d/sub/c.jsonl"]
    assert [file.name for file in reader.files] == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]


def test_globs_name_files_from_their_fixed_part(tmp_path: Path) -> None:
    for name in ("raw/x/1.jsonl", "raw/y/2.jsonl", "raw/y/3.txt"):
        write_jsonl(tmp_path / name, {"text": name})
    texts, reader = read(tmp_path, {"path": "raw/**/*.jsonl"})
    assert texts == ["raw/x/1.jsonl", "raw/y/2.jsonl"]
    assert [file.name for file in reader.files] == ["x/1.jsonl", "y/2.jsonl"]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\n")
    texts, _ = read(tmp_path, {"kind": "text", "path": "a.txt"})
    assert texts == ["one\r\n\r\ntwo\n"]


def test_packed_files_are_unpacked_and_hashed_as_stored(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"text": "zipped"}\n')
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    texts, reader = read(tmp_path, {"path": "a.jsonl.gz"})
    assert texts == ["zipped"]
    assert reader.tallies[0].sha256 == hashlib.sha256(packed).hexdigest()
    assert reader.tallies[0].bytes == reader.bytes_read == len(packed)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b"no gzip", lambda b: b[:20] + b"\xff" * 9]
)
def test_a_damaged_pack_is_named(tmp_path: Path, damage: object) -> None:
    packed = gzip.compress(b'{"text": "zipped and long enough"}\n' * 50)
    (tmp_path / "a.jsonl.gz").write_bytes(damage(packed))  # type: ignore[operator]
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be"):
        read(tmp_path, {"path": "a.jsonl.gz"}, skip=True)


def test_where_keeps_records_with_one_of_the_values(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "a.jsonl",
        {"text": "1", "party": "Whig", "year": 1840},
        {"text": "2", "party": "Whig", "year": 1850},
        {"text": "3", "party": "Tory", "year": 1840},
        {"text": "4", "year": 1840},
        {"party": "Tory"},
    )
    where = {"party": ["Whig", "Federalist"], "year": [1840]}
    texts, reader = read(tmp_path, {"path": "a.jsonl", "where": where})
    assert texts == ["1"]
    assert reader.tallies[0].filtered == 4


@pytest.mark.parametrize("place", [0, 1, 2, None])
def test_blank_documents_are_counted_wherever_they_stand(tmp_path: Path, place: int | None) -> None:
    texts = ["", " \n\t", "\u00a0"] if place is None else ["a", "b", "c"]
    if place is not None:
        texts[place] = " "
    write_jsonl(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    found, reader = read(tmp_path, {"path": "a.jsonl"})
    assert found == [text for text in texts if text.strip()]
    assert reader.tallies[0].empty + reader.tallies[0].documents == 3


BAD = {
    b"{": "is not valid JSON",
    b"[1]": "is a JSON list, not an object",
    b'{"txt": 1}': "has no field 'text'",
    b'{"text": 1}': "has a int in field 'text'",
    b'{"text": null}': "has a NoneType in field 'text'",
    b'{"text": "\xff"}': "is not UTF-8: invalid start byte at byte 10",
    b'{"text": "\\ud800"}': "has half a surrogate pair",
    b"[" * 100_000: "is nested too deeply",
    b'{"text": "' + b"x" * 300 + b'"}': "is longer than 200 bytes",
}


@pytest.mark.parametrize(("record", "reason"), BAD.items(), ids=range(len(BAD)))
def test_a_bad_record_fails_by_file_and_line_or_is_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: bytes, reason: str
) -> None:
    if "longer" in reason:
        monkeypatch.setattr(records, "MAX_RECORD_BYTES", 200)
    good = b'{"text": "good"}\n'
    (tmp_path / "a.jsonl").write_bytes(good + b"\n" + record + b"\n" + good)
    with pytest.raises(DataError) as failed:
        read(tmp_path, {"path": "a.jsonl"})
    assert f"a.jsonl:3 {reason}" in failed.value.what
    assert "on_bad_record=skip" in failed.value.fix
    texts, reader = read(tmp_path, {"path": "a.jsonl"}, skip=True)
    assert texts == ["good", "good"]
    assert reader.tallies[0].skipped == 1
    assert reader.tallies[0].examples[0].startswith(f"a.jsonl:3: {reason}")


def test_only_a_few_examples_of_bad_records_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{\n" * 100)
    _, reader = read(tmp_path, {"path": "a.jsonl"}, skip=True)
    assert reader.tallies[0].skipped == 100
    assert len(reader.tallies[0].examples) == 5


def test_a_text_file_that_is_not_utf8_is_a_bad_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"na\xefve")
    with pytest.raises(DataError, match=r"a\.txt:1 is not UTF-8"):
        read(tmp_path, {"kind": "text", "path": "a.txt"})


def test_a_byte_order_mark_before_the_first_record_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}')
    assert read(tmp_path, {"path": "a.jsonl"})[0] == ["a", "b"]


def test_a_second_pass_counts_from_the_start(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", {"text": "a"}, {"text": ""})
    _, reader = read(tmp_path, {"path": "a.jsonl"})
    first = reader.tallies
    list(reader.documents())
    assert reader.tallies == first


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"path": "gone.jsonl"}, r"there is no .*gone\.jsonl"),
        ({"path": "*.nothing"}, r"nothing found at .*nothing"),
        ({"path": "gone/*.jsonl"}, r"nothing found at .*gone"),
        ({"path": "."}, r"no \.jsonl or \.ndjson file"),
        ({"kind": "text", "path": "a.txt", "where": {"x": [1]}}, r"has no fields for `where`"),
    ],
)
def test_a_source_that_finds_nothing_names_its_path(
    tmp_path: Path, config: dict[str, object], reason: str
) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=reason):
        read(tmp_path, config)


def test_no_sources_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.sources is empty"):
        read(tmp_path)


def test_the_same_file_twice_is_refused_unless_the_filter_differs(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", {"text": "a", "n": 1}, {"text": "b", "n": 2})
    with pytest.raises(DataError, match=r"names .*a\.jsonl twice"):
        read(tmp_path, {"path": "a.jsonl"}, {"path": "*.jsonl"})
    texts, _ = read(
        tmp_path, {"path": "a.jsonl", "where": {"n": [2]}}, {"path": "a.jsonl", "where": {"n": [1]}}
    )
    assert texts == ["b", "a"]


TABLE = [
    {"text": 'one, and\n"more"', "year": 1840, "party": "Whig"},
    {"text": " ", "year": 1850, "party": "Whig"},
    {"text": "three \u00e9", "year": 1860, "party": "Tory"},
]


def write_csv(path: Path, records: list[dict[str, object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


def write_table(path: Path, records: list[dict[str, object]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=2)


@pytest.mark.parametrize(("kind", "write"), [("csv", write_csv), ("parquet", write_table)])
def test_tables_are_read_filtered_and_hashed_like_json_lines(
    tmp_path: Path, kind: str, write: object
) -> None:
    path = tmp_path / f"t.{kind}"
    write(path, TABLE)  # type: ignore[operator]
    texts, reader = read(tmp_path, {"kind": kind, "path": path.name})
    assert texts == [TABLE[0]["text"], TABLE[2]["text"]]
    tally = reader.tallies[0]
    assert (tally.documents, tally.empty) == (2, 1)
    assert tally.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert tally.bytes == reader.bytes_read == path.stat().st_size
    for where, count in (
        ({"year": {"min": 1841}}, 1), ({"year": {"max": 1840}}, 1), ({"year": [1860, 1840]}, 2),
        ({"party": ["Whig"], "year": {"min": 1840, "max": 1850}}, 1),
    ):  # fmt: skip
        found, _ = read(tmp_path, {"kind": kind, "path": path.name, "where": where})
        assert len(found) == count, where


@pytest.mark.parametrize(("kind", "write"), [("csv", write_csv), ("parquet", write_table)])
def test_a_table_without_the_column_names_those_it_has(
    tmp_path: Path, kind: str, write: object
) -> None:
    write(tmp_path / f"t.{kind}", TABLE)  # type: ignore[operator]
    for settings in ({"text_field": "body"}, {"where": {"body": [1]}}):
        with pytest.raises(DataError, match=r"has no column 'body' \(it has 'text', 'year'"):
            read(tmp_path, {"kind": kind, "path": f"t.{kind}", **settings}, skip=True)


def test_bad_rows_of_a_csv_file_are_named_by_their_first_line(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(
        b'text,n\n"two\nlines",1\nshort\n"na\xefve",2\n"a"b,3\ngood,4\n'
    )
    texts, reader = read(tmp_path, {"kind": "csv", "path": "t.csv"}, skip=True)
    assert texts == ["two\nlines", "good"]
    examples = reader.tallies[0].examples
    assert [example.split(": ")[0] for example in examples] == ["t.csv:4", "t.csv:5", "t.csv:6"]
    assert "has 1 cells, the header 2" in examples[0]
    assert "is not UTF-8" in examples[1]
    assert "is not valid CSV" in examples[2]


def test_an_empty_csv_file_has_no_records(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"")
    assert read(tmp_path, {"kind": "csv", "path": "t.csv"})[0] == []


def test_rows_of_a_table_are_decoded_by_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_PARQUET_BYTES", 100_000)
    draw = random.Random(1)
    texts = [draw.randbytes(size).hex() for size in 40 * [10_000] + [300_000] + 600 * [10]]
    table = pyarrow.Table.from_pydict({"text": texts, "unread": texts})
    sizes = []
    for rows in (table[:40], table[40:41], table[41:]):
        pyarrow.parquet.write_table(rows, tmp_path / "t.parquet")
        source = SourceConfig(kind="parquet", path="t.parquet")
        (file,) = find_files([source], lambda path: tmp_path / path)
        sizes.append([len(list(batch)) for _, batch in records.read_parquet(file)])
    # 20 KB a row; one row that is more than the limit; rows so short that their number decides.
    assert sizes[0] == 10 * [4] or sizes[0] == 8 * [5]
    assert sizes[1:] == [[1], [256, 256, 88]]
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=30)
    assert read(tmp_path, {"kind": "parquet", "path": "t.parquet"})[0] == texts


def test_a_bad_row_of_a_parquet_file_is_named_by_its_number(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a", None, "c"]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet:2 has a NoneType in field 'text'"):
        read(tmp_path, {"kind": "parquet", "path": "t.parquet"})


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"PAR1" + b"x" * 99 + b"PAR1"])
def test_a_damaged_parquet_file_is_named(tmp_path: Path, damage: object) -> None:
    write_table(tmp_path / "t.parquet", TABLE)
    sound = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(damage(sound))  # type: ignore[operator]
    with pytest.raises(DataError, match=r"t\.parquet cannot be read"):
        read(tmp_path, {"kind": "parquet", "path": "t.parquet"}, skip=True)


def test_zstandard_files_are_unpacked(tmp_path: Path) -> None:
    packed = pyarrow.compress(b'{"text": "packed"}\n' * 3, "zstd", asbytes=True)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jsonl.zst").write_bytes(packed)
    texts, reader = read(tmp_path, {"path": "d"})
    assert texts == ["packed"] * 3
    assert reader.tallies[0].sha256 == hashlib.sha256(packed).hexdigest()
    (tmp_path / "d" / "a.jsonl.zst").write_bytes(packed[:-7])
    with pytest.raises(DataError, match=r"a\.jsonl\.zst cannot be"):
        read(tmp_path, {"path": "d"}, skip=True)
    (tmp_path / "d" / "a.jsonl.zst").write_bytes(b"no zstd")
    with pytest.raises(DataError, match=r"a\.jsonl\.zst cannot be"):
        read(tmp_path, {"path": "d"}, skip=True)
