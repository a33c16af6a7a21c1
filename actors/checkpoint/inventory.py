"""What checkpoints a run has, which of them others need, and what a prune by hand would remove."""

from collections.abc import Callable
from dataclasses import dataclass

from eagleray.actors.checkpoint.manifest import MANIFEST, CheckpointFolder, Damage
from eagleray.actors.checkpoint.retention import BEST_BY, Retention, kept_forever
from eagleray.platform.errors import IntegrityError, NotFoundError
from eagleray.platform.ledger import Ledger
from eagleray.platform.registry import Registry
from eagleray.platform.storage import Storage


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint as its manifest describes it."""

    step: int
    written_s: float
    bytes: int
    eval_loss: float | None
    kept_forever: bool
    intact: bool | None
    """False: its manifest is damaged. None: nobody knows before its bytes are read."""


@dataclass(frozen=True)
class PrunePlan:
    """Why each checkpoint stays, and which do not."""

    stay: dict[int, str]
    remove: list[int]


def entries(folder: CheckpointFolder) -> list[CheckpointEntry]:
    """The checkpoints of a run, oldest first; those that vanish meanwhile are left out."""
    marked, found = kept_forever(folder), []
    for step in folder.steps():
        try:
            written_s = (folder.path(step) / MANIFEST).stat().st_mtime
        except FileNotFoundError:
            continue
        try:
            manifest = folder.manifest(step)
        except NotFoundError:
            continue
        except IntegrityError:
            found.append(CheckpointEntry(step, written_s, 0, None, step in marked, False))
            continue
        num_bytes = sum(file["bytes"] for file in manifest["files"].values())
        loss = manifest["meta"].get(BEST_BY)
        found.append(CheckpointEntry(step, written_s, num_bytes, loss, step in marked, None))
    return found


def damages(
    folder: CheckpointFolder, step: int, on_bytes: Callable[[int], None] = lambda num_bytes: None
) -> list[Damage]:
    """All that is wrong with a checkpoint, its manifest included.

    Raises:
        NotFoundError: It was removed meanwhile.
    """
    path = folder.path(step) / MANIFEST
    if path.parent.is_dir() and not path.exists():
        return [Damage(path, "is missing")]
    try:
        return list(folder.damage(step, on_bytes))
    except IntegrityError as error:
        return [Damage(path, f"is damaged: {error.what}")]


def plan_prune(
    storage: Storage,
    run_id: str,
    retention: Retention,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> PrunePlan:
    """What a rule would remove of a run; never its newest intact checkpoint, nor a model's.

    Those that are newer than the newest intact one are damaged: they count for nothing, and go.

    Raises:
        IntegrityError: No checkpoint is intact, so each may be the one to be repaired; or a record
            of a model is damaged, so nobody knows what it names.
    """
    folder = CheckpointFolder(storage, run_id)
    steps = folder.steps()
    newest = _newest_intact(folder, steps, on_bytes)
    if steps and newest is None:
        raise IntegrityError(
            f"none of the {len(steps)} checkpoints of run {run_id} is intact: none is removed",
            f"restore one from a copy; `eagleray checkpoints verify {run_id}` says what is wrong",
        )
    stay = retention.reasons(folder, (s for s in steps if newest is not None and s <= newest))
    stay |= {step: "kept for ever" for step in kept_forever(folder) & set(steps)}
    named = models_of(storage, run_id)
    stay |= {step: f"model {named[step]}" for step in steps if step in named}
    if newest is not None:
        stay[newest] = "the newest intact one"
    return PrunePlan(dict(sorted(stay.items())), [step for step in steps if step not in stay])


def models_of(storage: Storage, run_id: str) -> dict[int, str]:
    """Step -> a registered model that was made of the run's checkpoint of this step.

    Raises:
        IntegrityError: A model's record is damaged.
    """
    registry, ledger = Registry(storage), Ledger(storage)
    found = {}
    for name in registry.names():
        for version in registry.versions(name):
            record = ledger.lineage(version.record).find("checkpoint")
            if record is not None and record.body["run_id"] == run_id:
                found[int(record.body["step"])] = version.spec
    return found


def _newest_intact(
    folder: CheckpointFolder, steps: list[int], on_bytes: Callable[[int], None]
) -> int | None:
    for step in reversed(steps):
        try:
            if not damages(folder, step, on_bytes):
                return step
        except NotFoundError:
            continue
    return None
