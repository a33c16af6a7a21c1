"""A user's mistakes on the command line: one message, the documented code, nothing left."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagleray.cli.app import app, main

pytestmark = pytest.mark.timeout(180)
EAGLERAY = str(Path(sys.executable).with_name("eagleray"))
TINY = "name: tiny\nstorage: {uri: store}\ndata: {sources: [{path: docs.jsonl}], seq_len: 16}\n"
Run = Callable[..., subprocess.CompletedProcess[str]]


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line as it is installed: for one mistake with each verb."""
    return subprocess.run(
        [EAGLERAY, *arguments], cwd=folder, text=True, capture_output=True, timeout=150,
        env={**os.environ, "COLUMNS": "300"},
    )  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """The command line in this process, which has imported by now what takes a new one seconds."""
    monkeypatch.setenv("COLUMNS", "300")
    handler = signal.getsignal(signal.SIGTERM)

    def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [EAGLERAY, *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(sys.argv, ended.value.code, *capfd.readouterr())

    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "eagleray.yaml").write_text(TINY)
    text = " ".join(["the union of the states and the people of the year"] * 40)
    lines = [json.dumps({"text": f"{number} {text}"}) + "\n" for number in range(80)]
    (tmp_path / "docs.jsonl").write_text("".join(lines))
    return tmp_path


def assert_refused(
    result: subprocess.CompletedProcess[str], code: int, *texts: str, folder: Path
) -> None:
    assert result.returncode == code, (result.stdout, result.stderr)
    assert "Traceback" not in result.stderr + result.stdout
    for text in texts:
        assert text in result.stderr
    assert "next:" in result.stderr
    leftovers = [path for path in folder.rglob("*") if path.name.startswith(".tmp-")]
    assert leftovers == []


def test_an_unknown_key_is_named_with_what_was_meant(project: Path) -> None:
    (project / "eagleray.yaml").write_text(TINY + "train: {stepz: 3}\n")
    result = start(project, "train")
    assert_refused(result, 2, "train.stepz = 3", "did you mean `train.steps`?", folder=project)
    assert not (project / "store").exists()


def test_a_yaml_mistake_names_its_line(project: Path) -> None:
    (project / "eagleray.yaml").write_text(TINY + "train: {steps: 3\n")
    assert_refused(start(project, "check"), 2, "line 5", "not valid YAML", folder=project)


def test_a_missing_data_path_is_named(project: Path, run: Run) -> None:
    override = "data.sources=[{path: nowhere/*.jsonl}]"
    for verb in ("check", "train"):
        result = run(project, verb, override)
        assert_refused(result, 2, "nowhere/*.jsonl", folder=project)


def test_a_corpus_of_empty_files_is_refused(project: Path, run: Run) -> None:
    (project / "docs.jsonl").write_text("")
    assert_refused(run(project, "train"), 2, "docs.jsonl", folder=project)
    assert not list((project / "store").glob("datasets/*/manifest.json"))


def test_a_bad_record_is_named_by_file_and_line(project: Path) -> None:
    lines = (project / "docs.jsonl").read_text().splitlines(keepends=True)
    (project / "docs.jsonl").write_text("".join([*lines[:5], "{not json\n", *lines[5:]]))
    assert_refused(start(project, "data", "build"), 2, "docs.jsonl:6", folder=project)


def test_a_language_model_is_not_trained_on_rows_of_numbers(project: Path, run: Run) -> None:
    override = "data={sources: [{path: docs.jsonl}], features: {}}"
    for verb in ("train", "tune"):
        result = run(project, verb, override, "tune.space={train.optimizer.lr: {kind: float, "
                     "low: 0.1, high: 1}}")  # fmt: skip
        texts = (f"`eagleray {verb}` trains a language model", "BatchStream")
        assert_refused(result, 2, *texts, folder=project)
    assert not (project / "store" / "datasets").exists()


def test_a_cell_that_is_no_number_is_named_by_line_and_column(project: Path, run: Run) -> None:
    override = "data={sources: [{path: docs.jsonl}], features: {}}"
    result = run(project, "data", "build", override)
    texts = ("docs.jsonl:1 has '0 the union", "in column 'text', not a number", "categories")
    assert_refused(result, 2, *texts, folder=project)


def test_settings_of_text_beside_features_are_named(project: Path, run: Run) -> None:
    result = run(project, "check", "data.features={}")
    assert_refused(result, 2, "seq_len 16 is for text", folder=project)


def test_storage_that_cannot_be_written_is_named(project: Path, run: Run) -> None:
    (project / "store").write_text("a file is in the way")
    assert_refused(run(project, "train"), 1, str(project / "store"), "storage.uri", folder=project)


def test_check_tells_every_path_that_is_not_there(project: Path, run: Run) -> None:
    overrides = ("data.sources=[{path: nowhere}]", "storage.uri=/proc/store")
    result = run(project, "check", *overrides)
    assert_refused(result, 2, "nowhere", "/proc cannot be written", folder=project)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("train.num_workers=2", "train.cpus_per_worker=64"), "128 CPU"),
        (("train.device=cuda", "cluster.num_gpus=0"), "1 GPU"),
    ],
)
def test_more_than_the_machine_has_is_refused_with_what_there_is(
    project: Path, overrides: tuple[str, ...], text: str, run: Run
) -> None:
    result = run(project, "train", "data.tokenizer.vocab_size=300", *overrides)
    assert_refused(result, 3, text, folder=project)


def test_an_unknown_run_model_or_sweep_is_named_with_what_there_is(project: Path, run: Run) -> None:
    for arguments in (("resume", "tiny-zzzz"), ("models", "show", "nobody")):
        assert_refused(start(project, *arguments), 2, folder=project)
    for arguments in (
        ("models", "lineage", "nobody@3"),
        ("models", "promote", "tiny@9"),
        ("train", "tune.best=last"),
        ("tune", "tune.space={train.optimizer.lr: {kind: float, low: 0.1, high: 1}}", "--resume=x"),
    ):
        assert_refused(run(project, *arguments), 2, folder=project)


def test_a_sweep_without_a_space_is_refused(project: Path) -> None:
    assert_refused(start(project, "tune"), 2, "tune.space is empty", folder=project)


def test_import_refuses_what_it_does_not_know(project: Path, run: Run) -> None:
    (project / "model.bin").write_bytes(b"PK\x03\x04")
    for source, text in (
        ("torch:model.bin", "neither hf:<folder> nor gguf:<file>"),
        ("hf:nowhere", "there is no nowhere"),
        ("gguf:model.bin", "model.bin"),
        ("hf:.", "config.json"),
    ):
        result = run(project, "models", "import", source, "--name", "m")
        assert_refused(result, 2, text, folder=project)
    assert not (project / "store" / "models").exists()


def test_init_makes_a_project_that_checks_and_never_overwrites(tmp_path: Path, run: Run) -> None:
    assert run(tmp_path, "init", "my-project").returncode == 0
    folder = tmp_path / "my-project"
    (folder / "data").mkdir()
    (folder / "data" / "a.jsonl").write_text('{"text": "x"}\n')
    checked = run(folder, "check", "--json")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["name"] == "my-project"
    again = run(tmp_path, "init", "my-project")
    assert_refused(again, 2, "already there", folder=folder)


def test_every_verb_has_help_with_an_example() -> None:
    verbs = (
        "init", "check", "up", "down", "status", "tune", "train", "resume", "serve", "deploy",
        "undeploy", "chat", "submit", "ps", "logs", "stop",
        "data build", "data inspect", "data verify",
        "models list", "models show", "models lineage", "models promote", "models rollback",
        "models export", "models import", "keys create", "keys list", "keys revoke",
    )  # fmt: skip
    for verb in verbs:
        result = CliRunner().invoke(app, [*verb.split(), "--help"])
        assert result.exit_code == 0, verb
        assert "xample" in result.stdout, verb


def test_the_schema_is_json_and_the_version_is_said(tmp_path: Path, run: Run) -> None:
    schema = json.loads(run(tmp_path, "schema").stdout)
    assert schema["properties"]["train"]
    assert start(tmp_path, "version").stdout.startswith("eagleray 0.")
