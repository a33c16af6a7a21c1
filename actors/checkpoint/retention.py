"""Which checkpoints of a run stay when a new one is on storage, and marks that keep one for ever.

    runs/<run>/checkpoints/<step>.keep    empty; beside the checkpoint, so none of its bytes change

Laws:
    * What `keep_forever` returned for is removed by nobody: mark and removal exclude each other.
    * A mark belongs to its step: it outlives a replacement of the checkpoint. Who removes the file
      lets go of it.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.platform.errors import StorageError

BEST_BY = "eval_loss"
_MARK = ".keep"
_LOCK = "retention"


@dataclass(frozen=True)
class Retention:
    """The rule by which checkpoints stay: the newest, the best, and every so many steps."""

    keep: int
    keep_every_steps: int | None = None

    def reasons(self, folder: CheckpointFolder, steps: Iterable[int]) -> dict[int, str]:
        """Why a checkpoint of these steps stays, for each one that does."""
        ordered = sorted(steps)
        every = self.keep_every_steps
        found = {step: f"a multiple of {every}" for step in ordered if every and not step % every}
        found |= dict.fromkeys(_best(folder, ordered), "the best held-out loss")
        found |= dict.fromkeys(ordered[-self.keep :], f"among the newest {self.keep}")
        return found | dict.fromkeys(kept_forever(folder) & set(ordered), "kept for ever")


def prune(folder: CheckpointFolder, retention: Retention, written: int) -> None:
    """Remove what need not stay now that the checkpoint of a step is written.

    Later ones were damaged and passed over; kept, they would push intact ones out.

    Raises:
        StorageError: Some could not be removed.
    """
    steps = folder.steps()
    stay = retention.reasons(folder, (step for step in steps if step <= written))
    remove(folder, (step for step in steps if step not in stay))


def remove(folder: CheckpointFolder, steps: Iterable[int]) -> list[int]:
    """Remove checkpoints, but those that are kept for ever.

    Returns:
        The steps that were removed.
    """
    removed = []
    for step in steps:
        with folder.locked(_LOCK):
            if step not in kept_forever(folder):
                folder.remove(step)
                removed.append(step)
    return removed


def keep_forever(folder: CheckpointFolder, step: int) -> None:
    """Mark a checkpoint so that nothing of ours removes it.

    Raises:
        NotFoundError: There is no complete checkpoint of this step.
        IntegrityError: Its manifest is damaged.
    """
    with folder.locked(_LOCK):
        folder.manifest(step)
        folder.storage.put(b"", *folder.place(f"{step:08d}{_MARK}"))


def kept_forever(folder: CheckpointFolder) -> set[int]:
    """Steps that are marked."""
    names = folder.storage.names(*folder.place())
    stems = (name.removesuffix(_MARK) for name in names if name.endswith(_MARK))
    return {int(stem) for stem in stems if stem.isdigit()}


def _best(folder: CheckpointFolder, steps: Iterable[int]) -> list[int]:
    scored = []
    for step in steps:
        with contextlib.suppress(StorageError):  # damaged: not the best of anything
            loss = folder.manifest(step)["meta"].get(BEST_BY)
            if loss is not None:
                scored.append((loss, step))
    return [min(scored)[1]] if scored else []
