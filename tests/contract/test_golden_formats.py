"""Files of each format as version 0.1 wrote them: a later version must still read them.

A change that breaks one of these needs a new format number and a reader for both.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.actors.checkpoint.samples import SampleLog
from eagleray.actors.data.dataset import Dataset
from eagleray.platform.ledger import Ledger
from eagleray.platform.registry import Registry
from eagleray.platform.runs import RunStatus, RunStore
from eagleray.platform.storage import Storage

GOLDEN = Path(__file__).with_name("golden") / "store-1"


@pytest.fixture
def golden(tmp_path: Path) -> Storage:
    shutil.copytree(GOLDEN, tmp_path / "store")
    return Storage(tmp_path / "store")


def test_a_dataset_of_format_1_is_read(golden: Storage) -> None:
    (digest,) = [name for name in golden.names("datasets") if len(name) == 64]
    dataset = Dataset.open(golden, digest)
    assert dataset.verify() == []
    assert dataset.num_samples("train") > 0
    tokens = dataset.read("train", np.arange(2))
    assert tokens.shape == (2, dataset.seq_len + 1)
    assert tokens[0].tolist() == [int(t) for t in (GOLDEN / "first-sample.txt").read_text().split()]


def test_a_dataset_of_features_of_format_3_is_read(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN.with_name("features-3"), tmp_path / "store")
    storage = Storage(tmp_path / "store")
    (digest,) = storage.names("datasets")
    dataset = Dataset.open(storage, digest)
    assert dataset.verify() == []
    assert dataset.features is not None
    assert dataset.features.names == ["gain", "gate", "pixels[0]", "pixels[1]"]
    assert dataset.features.label is not None
    assert dataset.features.label.categories == ("0", "5", "10", "15")
    first, second = dataset.read("train", np.arange(2)).tolist()
    assert second == [np.float32(1 / 7), 1, 1, 0.5, 1]
    assert (np.isnan(first[0]), first[1:]) == (True, [0, 0, 0, 0])


def test_a_record_of_format_1_is_read(golden: Storage) -> None:
    version = Registry(golden).resolve("golden@prod")
    tree = Ledger(golden).lineage(version.record)
    assert [node.record.kind for _, node in tree.walk()] == ["model", "checkpoint", "run"]
    assert tree.record.body["metrics"] == {"eval_loss": 2.5}


def test_a_run_is_read(golden: Storage) -> None:
    runs = RunStore(golden)
    state = runs.state("golden-2222")
    assert (state.status, state.step) == (RunStatus.FINISHED, 2)
    assert [event["event"] for event in runs.events("golden-2222")] == ["attempt"]


def test_a_checkpoint_and_its_samples_of_format_1_are_read(golden: Storage) -> None:
    checkpoint = CheckpointFolder(golden, "golden-2222").load(2)
    assert checkpoint.arrays["model.w"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    (segment,) = SampleLog(golden, "golden-2222").chain(checkpoint.samples)
    assert segment.ids_SG.tolist() == [[3, 1], [0, 2]]
