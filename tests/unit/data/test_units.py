"""However a corpus is cut, it gives the same bytes, and errors name the same line."""

import csv
import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.actors.data import Dataset
from eagleray.actors.data import build as module
from eagleray.actors.data.records import SourceFile
from eagleray.actors.data.sources import Part, PartReader, parts_of
from eagleray.platform.errors import DataError

Build = Callable[..., Dataset]

LINE = st.one_of(
    st.just(b""),
    st.just(b"\xef\xbb\xbf"),
    st.just(b"{broken"),
    st.text(max_size=30).map(lambda text: json.dumps({"text": text}).encode()),
    st.text(max_size=30).map(lambda t: json.dumps({"text": t}, ensure_ascii=False).encode()),
)


def read(file: SourceFile, parts: list[Part] | None) -> tuple[list[str], list[str], list[int]]:
    texts, examples, counts = list[str](), list[str](), [0, 0, 0, 0, 0]
    for part in parts or [None]:
        reader = PartReader(file, "skip", lambda num_bytes: None)
        texts += reader.texts(part)
        tally = reader.tally
        examples += tally.examples
        found = (tally.bytes, tally.documents, tally.empty, tally.filtered, tally.skipped)
        counts = [a + b for a, b in zip(counts, found, strict=True)]
    return texts, examples[:5], counts


@given(
    lines=st.lists(LINE, max_size=30),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    is_open=st.booleans(),
    target=st.integers(1, 300),
)
def test_the_parts_of_a_file_are_the_file(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    ending: bytes,
    is_open: bool,
    target: int,
) -> None:
    path = tmp_path_factory.mktemp("parts") / "a.jsonl"
    path.write_bytes(ending.join(lines) + (b"" if is_open else ending))
    file = SourceFile("a.jsonl", path, "jsonl")
    seen: list[int] = []
    digest, parts = parts_of(file, target, seen.append)
    assert (parts[0].start, parts[-1].stop, sum(seen)) == (0, *[path.stat().st_size] * 2)
    assert all(a.stop == b.start for a, b in pairwise(parts))
    whole = read(file, None)
    assert read(file, parts) == whole
    assert [part.sha256 for part in parts][:1] == [digest] or len(parts) > 1


def test_a_bad_record_is_named_by_its_line_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"number {i}"}) + "\n" for i in range(99)) + "{\n")
    file = SourceFile("a.jsonl", path, "jsonl")
    _, parts = parts_of(file, 500, lambda num_bytes: None)
    assert len(parts) > 3
    with pytest.raises(DataError, match=r"a\.jsonl:100 is not valid JSON"):
        list(PartReader(file, "fail", lambda num_bytes: None).texts(parts[-1]))


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "csv", "parquet", "txt"])
def test_a_corpus_of_any_kind_gives_the_same_bytes_however_it_is_cut(
    build: Build, corpus: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rows = [json.loads(line) for line in (corpus / "raw/a.jsonl").open()]
    rows = [{"text": row["text"], "n": n} for n, row in enumerate(rows)]
    raw = corpus / "of-kind"
    raw.mkdir()
    packed = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind == "jsonl":
        (raw / "a.jsonl").write_bytes(packed)
    elif kind == "jsonl.gz":
        (raw / "a.jsonl.gz").write_bytes(gzip.compress(packed))
    elif kind == "csv":
        with (raw / "a.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text", "n"])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), raw / "a.parquet", row_group_size=7)
    else:
        for row in rows:
            (raw / f"{row['n']:02}.txt").write_text(row["text"])
    source = {"path": "of-kind", "kind": {"txt": "text", "jsonl.gz": "jsonl"}.get(kind, kind)}
    if kind != "txt":
        source |= {"where": {"n": {"max": 55}}}
    whole = build(sources=[source])
    assert whole.manifest["splits"]["train"]["documents"] > 20
    for unit_bytes in (1, 700, 5000):
        (whole.folder.parents[0] / "builds").rename(corpus / f"builds-{unit_bytes}")
        whole.folder.rename(corpus / f"whole-{unit_bytes}")
        monkeypatch.setattr(module, "UNIT_BYTES", unit_bytes)
        again = build(sources=[source])
        assert again.digest == whole.digest
        assert again.verify() == []
