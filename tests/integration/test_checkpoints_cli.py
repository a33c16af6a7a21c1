"""The checkpoint verbs as a user runs them."""

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.actors.checkpoint.retention import kept_forever
from eagleray.actors.checkpoint.snapshot import take_arrays
from eagleray.actors.checkpoint.state import Checkpoint
from eagleray.actors.data import Dataset
from eagleray.cli import checkpoints
from eagleray.platform.config import resolved_json
from eagleray.platform.errors import IntegrityError, NotFoundError, RunFailedError, UsageError
from eagleray.platform.model import hf_layout
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder
from eagleray.platform.storage import Storage
from eagleray.project import Project

CONFIG = """\
name: p
storage: {uri: storage}
data: {sources: [{path: small.jsonl}], seq_len: 16}
model: {dim: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, max_seq_len: 32}
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "eagleray.yaml").write_text(CONFIG)
    return Project.load(tmp_path)


@pytest.fixture
def run_id(project: Project) -> str:
    """A run with checkpoints of steps 10, 20 and 30; 10 is the best."""
    run_id = project.runs.create("p", "train", resolved_json(project.config))
    folder = CheckpointFolder(project.storage, run_id)
    for step in (10, 20, 30):
        arrays = {"model.w": np.full(100, step, np.float32)}
        folder.write(Checkpoint(step, arrays, "", {"eval_loss": step / 10}))
    return run_id


@pytest.fixture
def folder(project: Project, run_id: str) -> CheckpointFolder:
    return CheckpointFolder(project.storage, run_id)


def run(project: Project, *words: str, answer: str = "") -> str:
    app = typer.Typer()
    checkpoints.register(app)
    result = CliRunner().invoke(
        app, ["checkpoints", *words, "-c", str(project.loaded.root)],
        input=answer, catch_exceptions=False, standalone_mode=False,
    )  # fmt: skip
    return result.stdout


def document(project: Project, *words: str) -> Any:
    return json.loads(run(project, *words, "--json"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_list_shows_step_time_size_loss_and_what_is_kept(project: Project, run_id: str) -> None:
    run(project, "prune", run_id, "--keep", "3", "--keep-forever", "20")
    lines = run(project, "list", run_id).splitlines()
    assert lines[0].split("  ")[0] == "step"
    assert [line.split()[0] for line in lines[1:]] == ["10", "20", "30"]
    assert ["yes" in line for line in lines[1:]] == [False, True, False]
    assert all("unknown" in line and "kB" in line for line in lines[1:])
    rows = document(project, "list", run_id)
    assert [(row["step"], row["eval_loss"], row["intact"]) for row in rows] == [
        (10, 1.0, None), (20, 2.0, None), (30, 3.0, None)
    ]  # fmt: skip


def test_a_run_without_checkpoints_has_an_empty_list(project: Project) -> None:
    empty = project.runs.create("p", "train", {})
    assert run(project, "list", empty) == f"run {empty} has no checkpoints\n"
    assert document(project, "list", empty) == []
    with pytest.raises(NotFoundError, match="has no checkpoints"):
        run(project, "verify", empty)
    assert document(project, "prune", empty)["removed"] == []


@pytest.mark.parametrize(
    "words",
    [["list"], ["verify"], ["prune"], ["export", "10", "--to", "out"]],
    ids=lambda words: words[0],
)
def test_an_unknown_run_is_named_with_those_that_there_are(
    project: Project, run_id: str, words: list[str]
) -> None:
    with pytest.raises(NotFoundError, match=f"there is no run 'nothing' .newest: {run_id}"):
        run(project, words[0], "nothing", *words[1:])


@pytest.mark.parametrize(
    "words",
    [["verify", "11"], ["export", "11", "--to", "out"], ["prune", "--keep-forever", "11"]],
    ids=lambda words: words[0],
)
def test_an_unknown_step_is_named_with_those_that_there_are(
    project: Project, run_id: str, words: list[str]
) -> None:
    with pytest.raises(NotFoundError, match=r"no checkpoint of step 11 .it has: 10, 20, 30"):
        run(project, words[0], run_id, *words[1:])


def test_verify_goes_on_after_the_first_damage_and_names_every_file(
    project: Project, run_id: str, folder: CheckpointFolder
) -> None:
    assert run(project, "verify", run_id).count("intact") == 3
    flip(folder.path(10) / "__0_0.distcp")
    (folder.path(10) / ".metadata").unlink()
    flip(folder.path(20) / "manifest.json")
    (folder.path(30) / "manifest.json").unlink()
    with pytest.raises(IntegrityError) as caught:
        run(project, "verify", run_id)
    assert caught.value.exit_code == 1
    assert "3 of 3 checkpoints" in caught.value.what
    for named in (
        "00000010/__0_0.distcp has SHA-256", "00000010/.metadata is missing",
        "00000020/manifest.json is damaged", "00000030/manifest.json is missing",
    ):  # fmt: skip
        assert named in caught.value.what


def test_verify_of_one_step_reads_that_alone(
    project: Project, run_id: str, folder: CheckpointFolder
) -> None:
    flip(folder.path(10) / "__0_0.distcp")
    (found,) = document(project, "verify", run_id, "20")
    assert (found["step"], found["ok"], found["damage"]) == (20, True, [])


def test_prune_by_the_run_s_own_rule_and_by_a_given_one(
    project: Project, run_id: str, folder: CheckpointFolder
) -> None:
    dry = document(project, "prune", run_id, "--keep", "1", "--dry-run", "--keep-forever", "20")
    assert (dry["remove"], dry["removed"]) == ([], [])
    assert kept_forever(folder) == set()
    dry = document(project, "prune", run_id, "--keep", "1", "--dry-run")
    assert (dry["remove"], dry["removed"]) == ([20], [])
    assert document(project, "prune", run_id)["remove"] == []  # train.checkpoint.keep is 2
    assert document(project, "prune", run_id, "--keep", "1", "--keep-every", "20")["remove"] == []
    assert folder.steps() == [10, 20, 30]
    told = run(project, "prune", run_id, "--keep", "1")
    assert "removed 1 checkpoints" in told
    assert "the best held-out loss" in told
    assert folder.steps() == [10, 30]


@pytest.mark.parametrize(("answer", "left"), [("n", [10, 20, 30]), ("y", [10, 30])])
def test_on_a_terminal_prune_asks_first(
    project: Project, run_id: str, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch,
    answer: str, left: list[int],
) -> None:  # fmt: skip
    monkeypatch.setattr(checkpoints, "_is_terminal", lambda: True)
    with contextlib.suppress(RunFailedError) if answer == "n" else contextlib.nullcontext():
        run(project, "prune", run_id, "--keep", "1", answer=answer)
        assert answer == "y"
    assert folder.steps() == left
    assert document(project, "prune", run_id, "--keep", "2")["removed"] == []


def test_export_needs_the_data_set_whose_tokenizer_goes_with_the_weights(
    project: Project, run_id: str, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError, match="name no dataset"):
        run(project, "export", run_id, "10", "--to", str(tmp_path / "out"))


@pytest.mark.parametrize("kind", ["train", "trial"])
def test_an_export_answers_as_the_model_did_in_our_decoder_and_in_transformers(
    project: Project, small_dataset: Dataset, tmp_path: Path, kind: str
) -> None:
    transformers = pytest.importorskip("transformers")
    run_id = project.runs.create("p", kind, resolved_json(project.config))
    noted = run_id
    if kind == "trial":
        noted = project.runs.create("p", "sweep", {})
        project.runs.add_event(noted, "trial", number=0, run=run_id, params={})
    project.runs.add_event(noted, "dataset", digest=small_dataset.digest)
    config = DecoderConfig.from_section(project.config.model, small_dataset.vocab_size)
    model = Decoder(config)
    model.init_weights(torch.Generator().manual_seed(5))
    arrays = take_arrays(model, torch.optim.AdamW(model.parameters()))
    CheckpointFolder(project.storage, run_id).write(Checkpoint(7, arrays, "", {}))
    out = tmp_path / "out"
    assert document(project, "export", run_id, "7", "--to", str(out))["folder"] == str(out)
    ids = torch.tensor([[3, 14, 15, 92, 65]])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(ids)
        assert torch.equal(hf_layout.load(out)(ids), expected)
        assert torch.allclose(theirs(ids).logits, expected, atol=1e-5)
    assert (out / "tokenizer.json").read_bytes() == small_dataset.tokenizer_json
    with pytest.raises(UsageError, match="is already there"):
        run(project, "export", run_id, "7", "--to", str(out))


# Exports a small model and then a large one; tells by how many bytes its memory peaked higher.
MEASURED = """
import sys
from pathlib import Path
from eagleray.actors.checkpoint.export import export_checkpoint
from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.storage import Storage
root, tokenizer, eos, config = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes(), *sys.argv[3:]
folder = CheckpointFolder(Storage(root), "r")

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def export(layers):
    shape = DecoderConfig(num_layers=layers, **eval(config))
    export_checkpoint(folder, layers, root / f"out-{layers}", shape, tokenizer, eos)
    return peak_bytes()

print(-export(1) + export(8))
"""
SHAPE = {
    "vocab_size": 400, "dim": 512, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64,
    "ffn_dim": 1536, "max_seq_len": 8,
}  # fmt: skip


@pytest.fixture
def large() -> Iterator[Path]:
    """A folder for some hundred megabytes, in memory where there is room: syncs of a disk are slow.

    It is gone after the test.
    """
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free > 10**9
    with tempfile.TemporaryDirectory(dir=memory if has_room else None) as name:
        yield Path(name)


@pytest.mark.timeout(180)  # Two processes import torch, on cores that may be busy.
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the peak of memory")
def test_an_export_holds_no_copy_of_the_model(large: Path, small_dataset: Dataset) -> None:
    root = large
    for layers in (1, 8):
        model = Decoder(DecoderConfig(num_layers=layers, **SHAPE))
        arrays = {f"model.{name}": p.detach().numpy() for name, p in model.named_parameters()}
        CheckpointFolder(Storage(root), "r").write(Checkpoint(layers, arrays, "", {}))
    eos = small_dataset.manifest["tokenizer"]["eod_token"]
    tokenizer = str(small_dataset.folder / "tokenizer.json")
    words = [sys.executable, "-c", MEASURED, str(root), tokenizer, eos, repr(SHAPE)]
    told = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    model_bytes = (root / "out-8" / "model.safetensors").stat().st_size
    assert model_bytes > 100_000_000
    assert int(told) < model_bytes / 4
    exported = hf_layout.load(root / "out-8").state_dict()
    assert all(torch.equal(exported[name], value) for name, value in model.state_dict().items())
