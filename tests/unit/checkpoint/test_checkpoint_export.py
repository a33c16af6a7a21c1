"""A checkpoint as a model folder: byte for byte what a finished run would publish."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from eagleray.actors.checkpoint import export as export_module
from eagleray.actors.checkpoint.export import export_checkpoint
from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.actors.checkpoint.snapshot import take_arrays
from eagleray.actors.checkpoint.state import Checkpoint
from eagleray.platform.artifact import artifact_digest
from eagleray.platform.errors import DataError, IntegrityError, StorageError, UsageError
from eagleray.platform.model import hf_layout
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder
from eagleray.platform.model.weight_stream import stream_weights
from eagleray.platform.storage import Storage

END = "<end>"
TOKENIZER = Tokenizer(models.WordLevel({END: 0, "union": 1}, END)).to_str().encode()
Export = Callable[..., Path]


@pytest.fixture
def model() -> Decoder:
    config = DecoderConfig(
        vocab_size=40, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, ffn_dim=24,
        max_seq_len=8, tie_embeddings=False,
    )  # fmt: skip
    made = Decoder(config)
    made.init_weights(torch.Generator().manual_seed(3))
    return made


@pytest.fixture
def folder(storage: Storage, model: Decoder) -> CheckpointFolder:
    made = CheckpointFolder(storage, "r")
    made.write(Checkpoint(5, take_arrays(model, torch.optim.AdamW(model.parameters())), "", {}))
    return made


@pytest.fixture
def export(folder: CheckpointFolder, model: Decoder, tmp_path: Path) -> Export:
    def call(target: Path = tmp_path / "out", config: DecoderConfig = model.config) -> Path:
        export_checkpoint(folder, 5, target, config, TOKENIZER, END)
        return target

    return call


def test_an_export_is_byte_for_byte_what_a_finished_run_publishes(
    export: Export, model: Decoder, tmp_path: Path
) -> None:
    hf_layout.save(model, tmp_path / "published", TOKENIZER, eos_token=END)
    out = export()
    assert artifact_digest(out) == artifact_digest(tmp_path / "published")
    ids = torch.tensor([[1, 2, 3]])
    loaded = hf_layout.load(out)
    with torch.no_grad():
        assert torch.equal(loaded(ids), model(ids))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_export_overwrites_nothing(export: Export, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(UsageError, match="is already there"):
        export()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_damaged_checkpoint_is_not_exported(
    export: Export, folder: CheckpointFolder, tmp_path: Path
) -> None:
    path = folder.path(5) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match=r"__0_0\.distcp has SHA-256"):
        export()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["StoredArrays", "write_documents"])
def test_a_checkpoint_that_vanishes_while_it_is_exported_is_named(
    export: Export, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """A run that goes on may remove it: after it was verified, or between two tensors."""
    plain = getattr(export_module, target)

    def vanish(*words: object, **options: object) -> object:
        shutil.rmtree(folder.path(5))
        return plain(*words, **options)

    monkeypatch.setattr(export_module, target, vanish)
    with pytest.raises(StorageError, match="removed meanwhile"):
        export()


def test_a_checkpoint_of_another_model_is_refused(export: Export, model: Decoder) -> None:
    with pytest.raises(DataError, match=r"model\.embed.* should be \[41, 16\], it has \[40, 16\]"):
        export(config=replace(model.config, vocab_size=41))
    with pytest.raises(DataError, match="no such array"):
        export(config=replace(model.config, num_layers=3))


def test_a_target_that_cannot_be_written_is_named(export: Export, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/out cannot be written: Not a directory"):
        export(tmp_path / "file" / "out")


def test_a_failed_export_leaves_nothing(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("eagleray.actors.checkpoint.export.stream_weights", full)
    with pytest.raises(StorageError, match="No space left on device"):
        export()
    assert {path.name for path in tmp_path.iterdir()} == {"storage"}


def test_streamed_weights_are_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 2), "half": torch.randn(5).to(torch.bfloat16), "a": torch.randn(1),
        "wide": torch.randn(2, dtype=torch.float64), "empty": torch.empty(0, 4),
    }  # fmt: skip
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    stream_weights(tmp_path, described, tensors.__getitem__)
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    ours = (tmp_path / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "library").read_bytes()


def test_streamed_weights_are_parted_as_whole_ones(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((4, 4), i, dtype=torch.float32) for i in range(5)}
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    stream_weights(tmp_path / "ours", described, tensors.__getitem__, shard_bytes=130)
    hf_layout.write_weights(tmp_path / "theirs", tensors.items(), shard_bytes=130)
    assert artifact_digest(tmp_path / "ours") == artifact_digest(tmp_path / "theirs")
    assert len(list((tmp_path / "ours").iterdir())) == 4
    found = load_file(tmp_path / "ours" / "model-00003-of-00003.safetensors")
    assert np.array_equal(found["t4"], tensors["t4"])


def test_weights_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tensor ids is torch\.int64"):
        stream_weights(tmp_path, {"ids": (torch.int64, (2,))}, lambda name: torch.zeros(2))
