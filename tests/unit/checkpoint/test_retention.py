"""Which checkpoints stay: by the rule, for ever, for a model; and what a prune by hand removes."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagleray.actors.checkpoint.inventory import damages, entries, plan_prune
from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.actors.checkpoint.retention import (
    Retention,
    keep_forever,
    kept_forever,
    prune,
    remove,
)
from eagleray.actors.checkpoint.state import Checkpoint
from eagleray.platform.errors import IntegrityError, NotFoundError
from eagleray.platform.ledger import Ledger
from eagleray.platform.registry import Registry
from eagleray.platform.storage import Storage


def write(folder: CheckpointFolder, *steps: int, **meta: Any) -> None:
    for step in steps:
        folder.write(Checkpoint(step, {"model.w": np.full(3, step, np.float32)}, "", dict(meta)))


def flip(folder: CheckpointFolder, step: int, name: str = "__0_0.distcp") -> Path:
    path = folder.path(step) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


@pytest.fixture
def folder(storage: Storage) -> CheckpointFolder:
    return CheckpointFolder(storage, "r")


def test_the_newest_the_best_and_every_so_many_steps_stay(folder: CheckpointFolder) -> None:
    rule = Retention(keep=2, keep_every_steps=40)
    for step in range(10, 110, 10):
        write(folder, step, eval_loss=1.0 if step == 30 else 2.0)
        prune(folder, rule, step)
    assert folder.steps() == [30, 40, 80, 90, 100]
    assert rule.reasons(folder, folder.steps()) == {
        30: "the best held-out loss", 40: "a multiple of 40", 80: "a multiple of 40",
        90: "among the newest 2", 100: "among the newest 2",
    }  # fmt: skip


def test_what_is_kept_for_ever_outlives_retention_and_its_own_replacement(
    folder: CheckpointFolder,
) -> None:
    write(folder, 1)
    before = folder.digest(1), sorted(path.name for path in folder.path(1).iterdir())
    keep_forever(folder, 1)
    assert before == (folder.digest(1), sorted(path.name for path in folder.path(1).iterdir()))
    folder.verify(1)
    write(folder, 1, 2, 3)
    prune(folder, Retention(keep=1), 3)
    assert folder.steps() == [1, 3]
    assert remove(folder, [1, 3]) == [3]
    assert kept_forever(folder) == {1}


def test_only_what_there_is_can_be_kept_for_ever(folder: CheckpointFolder) -> None:
    write(folder, 1)
    with pytest.raises(NotFoundError):
        keep_forever(folder, 2)
    assert kept_forever(folder) == set()


def test_a_mark_and_a_removal_exclude_each_other(folder: CheckpointFolder) -> None:
    write(folder, 1, 2)
    removed: list[int] = []
    with folder.locked("retention"):
        other = threading.Thread(target=lambda: removed.extend(remove(folder, [1, 2])))
        other.start()
        # It waits for the lock, and then finds the mark.
        folder.storage.put(b"", *folder.place("00000001.keep"))
        assert folder.steps() == [1, 2]
    other.join(20)
    assert removed == [2]
    assert folder.steps() == [1]


def test_a_prune_never_removes_the_newest_intact_one(
    folder: CheckpointFolder, storage: Storage
) -> None:
    write(folder, 1, 2, 3, 4)
    flip(folder, 3)
    flip(folder, 4, "manifest.json")
    plan = plan_prune(storage, "r", Retention(keep=1))
    assert plan.stay == {2: "the newest intact one"}
    assert plan.remove == [1, 3, 4]


def test_a_prune_removes_nothing_where_nothing_is_intact(
    folder: CheckpointFolder, storage: Storage
) -> None:
    assert plan_prune(storage, "r", Retention(keep=1)).remove == []
    write(folder, 1, 2)
    for step in (1, 2):
        flip(folder, step)
    with pytest.raises(IntegrityError, match="none of the 2 checkpoints of run r is intact"):
        plan_prune(storage, "r", Retention(keep=1))


def test_a_prune_never_removes_what_a_registered_model_was_made_of(
    folder: CheckpointFolder, storage: Storage
) -> None:
    write(folder, 1, 2, 3)
    ledger = Ledger(storage)
    for run_id, step in (("r", 1), ("other", 2)):
        checkpoint = ledger.put("checkpoint", {"run_id": run_id, "step": step})
        record = ledger.put("model", {"artifact": "a", "step": step}, {"checkpoint": checkpoint})
        Registry(storage).register("m", record, "a", {})
    plan = plan_prune(storage, "r", Retention(keep=1))
    assert plan.stay == {1: "model m@1", 3: "the newest intact one"}
    assert plan.remove == [2]


def test_every_damaged_file_is_named_with_what_differs(folder: CheckpointFolder) -> None:
    write(folder, 1)
    assert damages(folder, 1) == []
    path = flip(folder, 1)
    (folder.path(1) / ".metadata").write_bytes(b"")
    (folder.path(1) / "__0_7.distcp").write_bytes(b"of another write")
    (folder.path(1) / ".nfs0001").write_bytes(b"still read by somebody")
    found = {damage.path.name: damage.reason for damage in damages(folder, 1)}
    assert set(found) == {path.name, ".metadata", "__0_7.distcp"}
    assert found[".metadata"].startswith("has 0 bytes, ")
    assert "has SHA-256 " in found[path.name]
    assert "parts of two writes mix" in found["__0_7.distcp"]
    path.unlink()
    assert "is missing" in [damage.reason for damage in damages(folder, 1)]
    (folder.path(1) / "manifest.json").unlink()
    assert [damage.path.name for damage in damages(folder, 1)] == ["manifest.json"]


def test_a_file_that_cannot_be_read_is_damage(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Path.open

    def fail(self: Path, *words: Any, **options: Any) -> Any:
        if self.name.startswith("manifest"):
            return plain(self, *words, **options)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    write(folder, 1)
    monkeypatch.setattr(Path, "open", fail)
    found = [damage.reason for damage in folder.damage(1)]
    assert found == ["cannot be read: Input/output error"] * 2


def test_entries_tell_what_manifests_say(folder: CheckpointFolder) -> None:
    write(folder, 1, eval_loss=2.5)
    write(folder, 2)
    keep_forever(folder, 1)
    flip(folder, 2, "manifest.json")
    first, second = entries(folder)
    files = folder.manifest(1)["files"].values()
    assert (first.step, first.eval_loss, first.kept_forever, first.intact) == (1, 2.5, True, None)
    assert first.bytes == sum(file["bytes"] for file in files) > 1_000
    assert (second.step, second.eval_loss, second.kept_forever, second.intact) == (
        2, None, False, False
    )  # fmt: skip
