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


def test_digests_that_do_not_name_one_dataset_are_refused(project: Path) -> None:
    with pytest.raises(NotFoundError, match="no dataset has been built"):
        run(project, "inspect")
    with pytest.raises(NotFoundError, match="no dataset abc"):
        run(project, "inspect", "abc")
    for name in ("abcdef1", "abcdef2"):
        (project / ".eagleray" / "datasets" / name).mkdir(parents=True)
    with pytest.raises(UsageError, match="start of 2 digests"):
        run(project, "inspect", "abcdef")
