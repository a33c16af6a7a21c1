"""The commit protocol at every point of it: what a crash leaves, and what recovery makes of it."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tools.crash_disk import CrashRecorder, Image

from eagleray.actors.checkpoint import dcp, samples
from eagleray.actors.checkpoint.manifest import CheckpointFolder, newest_intact
from eagleray.actors.checkpoint.retention import Retention, keep_forever, kept_forever, prune
from eagleray.actors.checkpoint.samples import SampleLog, Segment
from eagleray.actors.checkpoint.state import Checkpoint
from eagleray.platform import storage as storage_module
from eagleray.platform.errors import EagleRayError
from eagleray.platform.storage import Storage

NUM_STEPS = 13
BEST, MARKED, REPLACED = 2, 5, 7
"""By held-out loss; kept for ever; written a second time."""
SEED, NUM_RANDOM = 1, 6
MEMORY = Path("/dev/shm")
KEEP_ONE = Retention(keep=1, keep_every_steps=4)


Record = Callable[[Retention], tuple[CrashRecorder, "Promises"]]


class Promises:
    """What the writer was told is safe, at the point of the replay."""

    def __init__(self) -> None:
        self.begun: dict[int, set[float]] = {}
        self.needed: dict[int, set[float]] = {}
        self.marked: set[int] = set()

    def begin(self, step: int, value: float) -> None:
        self.begun.setdefault(step, set()).add(value)
        if step in self.needed:
            self.needed[step].add(value)

    def keep(self, step: int, value: float) -> None:
        self.needed[step] = {value}

    def release(self, step: int) -> None:
        self.needed.pop(step, None)

    def frozen(self) -> tuple[Any, ...]:
        return (
            tuple((step, *sorted(values)) for step, values in sorted(self.needed.items())),
            frozenset(self.marked),
        )


def write_run(
    storage: Storage, retention: Retention, recorder: CrashRecorder, promises: Promises
) -> None:
    """A run's checkpoints, as the store writes them, with retention."""

    class Released(CheckpointFolder):
        def remove(self, step: int) -> None:
            recorder.note(lambda: promises.release(step))
            super().remove(step)

    folder, log = Released(storage, "r"), SampleLog(storage, "r")

    def write(step: int, value: float, head: str) -> None:
        arrays = {"model.w": np.full(3, value, np.float32)}
        recorder.note(lambda: promises.begin(step, value))
        folder.write(Checkpoint(step, arrays, head, {"eval_loss": float(step != BEST)}))
        recorder.note(lambda: promises.keep(step, value))
        prune(folder, retention, step)

    head = ""
    for step in range(1, NUM_STEPS + 1):
        head = log.append(Segment(step - 1, np.array([[step]]), head))
        write(step, step, head)
        if step == REPLACED:
            write(step, step + 0.5, head)
        if step == MARKED:
            keep_forever(folder, step)
            recorder.note(lambda: promises.marked.add(MARKED))


def recovered_badly(storage: Storage, promises: Promises) -> list[str]:
    """What is wrong after recovery from a crash; nothing, if the protocol is sound."""
    folder = CheckpointFolder(storage, "r")
    folder.remove_unfinished()
    found, damaged = newest_intact(folder)
    wrong = [f"visible, but damaged: {error.what}" for error in damaged]
    steps, loaded = folder.steps(), [] if found is None else [found]
    wrong += [f"acknowledged step {step} is lost" for step in promises.needed.keys() - set(steps)]
    for step in (step for step in steps if found is None or step != found.step):
        try:
            loaded.append(folder.load(step))
        except EagleRayError as error:
            wrong.append(f"step {step}: {error.what}")
    for checkpoint in loaded:
        step = checkpoint.step
        allowed = promises.needed.get(step) or promises.begun[step]
        if checkpoint.arrays["model.w"][0] not in allowed:
            wrong.append(f"step {step} holds {checkpoint.arrays}, one of {allowed} was written")
    if found is not None:
        log = SampleLog(storage, "r")
        last = log.read(found.samples)
        if last.first_step + len(last.ids_SG) != found.step:
            wrong.append(f"the sample log of step {found.step} ends after {last.first_step}")
        if last.previous:
            log.read(last.previous)
    if not promises.marked <= kept_forever(folder):
        wrong.append("a mark is lost")
    place = storage.path(*folder.place())
    names = {path.name for path in place.iterdir()} if place.exists() else set()
    left = {name for name in names if name.startswith((".tmp", ".old"))}
    return wrong + [f"{name} is left" for name in left]


class Parsed(dict[str, np.ndarray]):
    """A segment of the sample log, as `numpy.load` gives it."""

    def __enter__(self) -> "Parsed":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in memory, where there is one: thousands of small files come and go."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture
def recording(place: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    read: dict[bytes, Any] = {}

    def once(key: bytes, read_it: Callable[[], Any]) -> Any:
        if key not in read:
            read[key] = read_it()
        return read[key]

    def record(retention: Retention) -> tuple[CrashRecorder, Promises]:
        recorder, promises = CrashRecorder(place / "recorded"), Promises()
        with monkeypatch.context() as patch:
            recorder.install(patch)
            write_run(Storage(place / "recorded"), retention, recorder, promises)
        return recorder, promises

    # Nothing here is to survive a crash of this machine.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    # Looking for links that lead out of the storage takes half of the time.
    monkeypatch.setattr(Storage, "path", lambda self, *parts: self.root.joinpath(*parts))
    # What was verified is what was written: parsing it again, which is slow, says nothing new.
    arrays, log = dcp.read_arrays, samples.np.load
    monkeypatch.setattr(
        dcp, "read_arrays",
        lambda folder: once((folder / "manifest.sha256").read_bytes(), lambda: arrays(folder)),
    )  # fmt: skip
    monkeypatch.setattr(
        samples.np, "load",
        lambda file, **options: once(file.getvalue(), lambda: Parsed(log(file, **options))),
    )  # fmt: skip
    return record


def lay_out(image: Image, root: Path, pool: dict[bytes, Path]) -> None:
    root.mkdir()
    for path, content in image.items():
        if content is None:
            (root / path).mkdir()
            continue
        if content not in pool:
            pool[content] = root.parent / f"content-{len(pool)}"
            pool[content].write_bytes(content)
        os.link(pool[content], root / path)


def violations(
    place: Path, recorder: CrashRecorder, promises: Promises, num_random: int
) -> Iterator[tuple[str, list[str]]]:
    """Each crash point, and what was wrong after it; equal states are looked at once."""
    pool: dict[bytes, Path] = {}
    known: dict[Any, list[str]] = {}
    for what, image in recorder.crashes(SEED, num_random):
        state = (frozenset(image.items()), promises.frozen())
        if state not in known:
            root = place / "crashed"
            lay_out(image, root, pool)
            known[state] = recovered_badly(Storage(root), promises)
            shutil.rmtree(root)
        yield what, known[state]


@pytest.mark.parametrize(
    ("retention", "stay"),
    [
        (KEEP_ONE, [BEST, 4, MARKED, 8, 12, NUM_STEPS]),
        (Retention(keep=2), [BEST, MARKED, NUM_STEPS - 1, NUM_STEPS]),
    ],
    ids=["newest", "newest two"],
)
def test_no_crash_loses_a_checkpoint_or_shows_half_of_one(
    recording: Record, place: Path, retention: Retention, stay: list[int]
) -> None:
    recorder, promises = recording(retention)
    num_points = 0
    for what, wrong in violations(place, recorder, promises, NUM_RANDOM):
        num_points += 1
        assert not wrong, f"point {num_points}, {what}: {wrong}"
    assert num_points >= 5_000
    assert sorted(promises.needed) == stay  # so retention had its say


def _replace_by_removal(self: Storage, folder: Path, *parts: str) -> None:
    if self.path(*parts).exists():
        self.remove(*parts)
    self.publish(folder, *parts)


def _leave_names_unsynced(path: Path) -> None:
    """As Storage did, of folders that it made."""


@pytest.mark.parametrize(
    ("target", "name", "broken", "seen"),
    [
        (storage_module, "sync_tree", lambda path: None, "damaged"),
        (storage_module, "sync_folder", _leave_names_unsynced, "is lost"),
        (Storage, "replace", _replace_by_removal, "is lost"),
        (
            storage_module,
            "_make_folder",
            lambda path: path.mkdir(parents=True, exist_ok=True),
            "is lost",
        ),
    ],
    ids=["no sync of files", "no sync of names", "removed, then published", "unsynced folders"],
)
def test_a_protocol_that_is_not_sound_is_found_out(
    recording: Record,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: Any,
    name: str,
    broken: Any,
    seen: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(target, name, broken)
        recorder, promises = recording(KEEP_ONE)
    assert any(
        seen in text
        for _, wrong in violations(place, recorder, promises, num_random=0)
        for text in wrong
    )
