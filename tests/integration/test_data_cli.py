"""The data verbs as a user runs them."""

import json
import threading
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from eagleray.actors.data.tokenizer import TextTokenizer
from eagleray.cli import console, data
from eagleray.platform.errors import IntegrityError, NotFoundError, UsageError


@pytest.fixture
def project(tmp_path: Path, small_dataset: object) -> Path:
    """A project on the small corpus, with a storage of its own."""
    (tmp_path / "eagleray.yaml").write_text(
        "name: p\n"
        "data:\n"
        "  sources: [{path: small.jsonl}]\n"
        "  tokenizer: {kind: bpe, vocab_size: 300}\n"
        "  seq_len: 16\n"
        "  eval_fraction: 0.2\n"
    )
    return tmp_path


def run(project: Path, *words: str) -> str:
    app = typer.Typer()
    data.register(app)
    result = CliRunner().invoke(
        app, ["data", *words, "-c", str(project)], catch_exceptions=False, standalone_mode=False
    )
    return result.stdout


def test_build_says_what_it_made_and_that_it_was_there(project: Path) -> None:
    first = run(project, "build")
    assert "built dataset " in first
    assert "MB/s" in first
    assert "found dataset " in run(project, "build")


def test_build_as_json_is_one_document(project: Path) -> None:
    document = json.loads(run(project, "build", "--json", "data.seq_len=32"))
    assert (document["built"], document["seq_len"], document["documents"]) == (True, 32, 60)
    assert document["bytes_per_second"] > 0
    again = json.loads(run(project, "build", "--json", "data.seq_len=32"))
    assert (again["built"], again["digest"]) == (False, document["digest"])


@pytest.mark.parametrize(
    ("interruption", "code"), [(KeyboardInterrupt(), 130), (SystemExit(), 143)]
)
def test_an_interrupted_build_says_how_to_go_on(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interruption: BaseException,
    code: int,
) -> None:
    def interrupt(*_: object) -> None:
        raise interruption

    # Told once per process, which here runs other tests as well.
    monkeypatch.setattr(console, "_has_told", threading.Event())
    monkeypatch.setattr(TextTokenizer, "encode_batch", interrupt)
    with pytest.raises(typer.Exit) as ended:
        data.build(config=project / "eagleray.yaml")
    assert ended.value.exit_code == code
    assert "stopped; the same command goes on where it stopped" in capsys.readouterr().err
    monkeypatch.undo()
    assert "built dataset " in run(project, "build")


def test_inspect_shows_the_last_dataset_or_the_one_named(project: Path) -> None:
    first = json.loads(run(project, "build", "--json"))["digest"]
    second = json.loads(run(project, "build", "--json", "data.seq_len=32"))["digest"]
    assert json.loads(run(project, "inspect", "--json"))["digest"] == second
    shown = run(project, "inspect", first[:8])
    assert first in shown
    assert "tokens per document" in shown
    assert "train sample 1" in shown


def test_verify_passes_what_is_sound_and_names_what_is_not(project: Path) -> None:
    digest = json.loads(run(project, "build", "--json"))["digest"]
    assert json.loads(run(project, "verify", "--json"))["ok"]
    shard = project / ".eagleray" / "datasets" / digest / "main.train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[200] ^= 1
    shard.write_bytes(content)
    with pytest.raises(IntegrityError, match=r"main\.train-00000\.bin block 0") as failed:
        run(project, "verify")
    assert failed.value.exit_code == 1


@pytest.fixture
def of_rows(tmp_path: Path, small_rows: object) -> Path:
    """A project on a table of numbers."""
    (tmp_path / "eagleray.yaml").write_text(
        "name: p\n"
        "data:\n"
        "  sources: [{kind: csv, path: small.csv}]\n"
        "  features: {label: kind, categories: [gate, kind]}\n"
        "  eval_fraction: 0.2\n"
    )
    return tmp_path


def test_rows_of_numbers_are_built_and_found(of_rows: Path) -> None:
    first = run(of_rows, "build")
    assert "rows/s" in first
    assert "3 features of 3 columns, label kind: 2 classes" in first
    document = json.loads(run(of_rows, "build", "--json"))
    assert document["train"]["samples"] + document["eval"]["samples"] == document["documents"]
    assert (document["built"], document["num_features"]) == (False, 3)
    assert document["features"]["label"]["categories"] == ["a", "b"]


def test_inspect_shows_columns_classes_and_rows_with_their_names(of_rows: Path) -> None:
    run(of_rows, "build")
    shown = run(of_rows, "inspect")
    assert "number (train)" in shown
    assert "month" in shown
    assert "gate: 3 names: " in shown
    assert "kind (train)" in shown
    document = json.loads(run(of_rows, "inspect", "--json"))
    counts = document["features"]["label"]["count"]
    assert sum(counts) == document["train"]["samples"]
    assert f"a {'#' * 8}" in shown
    row = document["examples"][0]
    assert (set(row), row["gate"] in "xyz", row["kind"] in "ab") == (
        {"gain", "month", "gate", "kind"}, True, True,
    )  # fmt: skip
    assert f"month={row['month']:g} gate={row['gate']} kind={row['kind']}" in shown


def test_inspect_shows_a_label_that_is_a_number_vectors_domains_and_what_was_left_out(
    tmp_path: Path,
) -> None:
    records = [{"v": [n, None], "y": n / 2, "c": f"[red]{n}"} for n in range(90)]
    records[7]["y"] = None
    records[8]["v"] = [0, 1]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "eagleray.yaml").write_text(
        "name: p\n"
        "data:\n"
        "  sources:\n"
        "    - {path: a.jsonl, domain: low, where: {y: {max: 20}}}\n"
        "    - {path: a.jsonl, domain: high}\n"
        "  features: {columns: [v, c], label: y, categories: [c], missing: nan}\n"
        "  on_bad_record: skip\n"
        "  eval_fraction: 0.2\n"
    )
    shown = run(tmp_path, "build")
    assert "skipped a.jsonl:8: has an empty cell in column 'y'" in shown
    assert "label y: a number" in shown
    shown = run(tmp_path, "inspect")
    assert "v x 2" in shown
    assert "held-out rows" in shown
    assert "c: 89 names: '[red]" in shown
    assert "v=[0, empty] c=[red]0 y=0" in shown
    assert json.loads(run(tmp_path, "inspect", "--json"))["examples"][0]["v"] == [0, None]


def test_verify_names_a_damaged_block_of_rows(of_rows: Path) -> None:
    digest = json.loads(run(of_rows, "build", "--json"))["digest"]
    assert json.loads(run(of_rows, "verify", "--json"))["ok"]
    shard = of_rows / ".eagleray" / "datasets" / digest / "main.train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[200] ^= 1
    shard.write_bytes(content)
    with pytest.raises(IntegrityError, match=r"main\.train-00000\.bin block 0"):
        run(of_rows, "verify")


def test_digests_that_do_not_name_one_dataset_are_refused(project: Path) -> None:
    with pytest.raises(NotFoundError, match="no dataset has been built"):
        run(project, "inspect")
    with pytest.raises(NotFoundError, match="no dataset abc"):
        run(project, "inspect", "abc")
    for name in ("abcdef1", "abcdef2"):
        (project / ".eagleray" / "datasets" / name).mkdir(parents=True)
    with pytest.raises(UsageError, match="start of 2 digests"):
        run(project, "inspect", "abcdef")
