"""A checkpoint on storage: PyTorch DCP files, committed by a manifest that is written last.

    runs/<run>/checkpoints/<step>/
        __0_0.distcp, .metadata     arrays, in PyTorch's distributed checkpoint format
        manifest.json               size and SHA-256 of each file, step, sample log, metrics
        manifest.sha256             the manifest's own digest, in hexadecimal

DCP itself has no integrity check: a flipped bit loads silently. So no file is opened before its
digest was compared with the manifest's, and a folder without a manifest does not exist. Early
checkpoints of format 1 have no `manifest.sha256`; where it is missing, the manifest is believed.
Format and version: docs/formats.md#checkpoint.

DCP is imported by the first write or read: it brings torch, seconds that the store's process would
else spend while the workers start.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from eagleray.actors.checkpoint.state import Checkpoint
from eagleray.platform.errors import IntegrityError, NotFoundError, StorageError
from eagleray.platform.storage import Storage, canonical_json, digest_bytes, digest_file

FORMAT = 1
MANIFEST = "manifest.json"
CHECKSUM = "manifest.sha256"


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, storage: Storage, run_id: str) -> None:
        self._storage, self._run_id = storage, run_id

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        names = (name for name in self._storage.names(*self._place()) if name.isdigit())
        return sorted(
            int(name) for name in names if self._storage.path(*self._place(name), MANIFEST).exists()
        )

    def write(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint; it appears whole, replacing one of the same step.

        Returns:
            The digest of its manifest.

        Raises:
            StorageError: It could not be written; nothing of it is visible.
        """
        name = f"{checkpoint.step:08d}"
        with self._storage.staging_folder(*self._place()) as folder:
            _save(checkpoint, folder)
            files = {
                path.name: {"bytes": path.stat().st_size, "sha256": digest_file(path)}
                for path in sorted(folder.iterdir())
            }
            manifest = canonical_json(
                {
                    "format": FORMAT, "step": checkpoint.step, "files": files,
                    "samples": checkpoint.samples, "meta": checkpoint.meta,
                }
            )  # fmt: skip
            (folder / CHECKSUM).write_text(digest_bytes(manifest), encoding="ascii")
            (folder / MANIFEST).write_bytes(manifest)
            if self._storage.path(*self._place(name)).exists():
                self._storage.remove(*self._place(name))
            self._storage.publish(folder, *self._place(name))
        return digest_bytes(manifest)

    def manifest(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds.

        Raises:
            NotFoundError: There is no complete checkpoint of this step.
            IntegrityError: It is damaged, or its format is not one that this version reads.
        """
        data = self._storage.read(*self._place(f"{step:08d}"), MANIFEST)
        with contextlib.suppress(NotFoundError):
            expected = self._storage.read(*self._place(f"{step:08d}"), CHECKSUM)
            if digest_bytes(data).encode() != expected:
                raise IntegrityError(
                    f"{MANIFEST} of checkpoint {step} of {self._run_id} does not have the digest "
                    f"in {CHECKSUM}",
                    _damaged(self._run_id),
                )
        try:
            manifest: dict[str, Any] = json.loads(data)
            found = manifest["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise IntegrityError(
                f"the manifest of checkpoint {step} of {self._run_id} is damaged: {error!r}",
                _damaged(self._run_id),
            ) from error
        if found != FORMAT:
            raise IntegrityError(
                f"checkpoint {step} of {self._run_id} has format {found}, "
                f"this eagleray reads {FORMAT}",
                "use the eagleray version that wrote it",
            )
        return manifest

    def digest(self, step: int) -> str:
        """The digest of a checkpoint's manifest."""
        return digest_bytes(self._storage.read(*self._place(f"{step:08d}"), MANIFEST))

    def verify(self, step: int) -> None:
        """Read every byte of a checkpoint.

        Raises:
            NotFoundError: There is no complete checkpoint of this step.
            IntegrityError: A file is missing, or is not the one that was written.
        """
        folder = self._storage.path(*self._place(f"{step:08d}"))
        for name, expected in self.manifest(step)["files"].items():
            path = folder / name
            if not path.exists():
                raise IntegrityError(f"checkpoint {path} is missing", _damaged(self._run_id))
            if path.stat().st_size != expected["bytes"] or digest_file(path) != expected["sha256"]:
                raise IntegrityError(
                    f"checkpoint file {path} is not the one that was written (SHA-256 differs)",
                    _damaged(self._run_id),
                )

    def load(self, step: int) -> Checkpoint:
        """Verify and read a checkpoint.

        Raises:
            NotFoundError: There is no complete checkpoint of this step.
            IntegrityError: It is damaged.
        """
        from eagleray.actors.checkpoint.dcp import read_arrays  # noqa: PLC0415 - see the top

        self.verify(step)
        manifest = self.manifest(step)
        folder = self._storage.path(*self._place(f"{step:08d}"))
        try:
            arrays = read_arrays(folder)
        except ValueError as error:
            raise IntegrityError(
                f"checkpoint {folder} does not load: {error}", _damaged(self._run_id)
            ) from error
        return Checkpoint(step, arrays, manifest["samples"], manifest["meta"])

    def remove(self, step: int) -> None:
        """Remove a checkpoint in one step."""
        self._storage.remove(*self._place(f"{step:08d}"))

    def remove_unfinished(self) -> None:
        """Remove what a killed writer left half written; only for the run's one writer."""
        self._storage.remove_unfinished(*self._place())

    def _place(self, *parts: str) -> tuple[str, ...]:
        return ("runs", self._run_id, "checkpoints", *parts)


def newest_intact(folder: CheckpointFolder) -> tuple[Checkpoint | None, list[StorageError]]:
    """The newest checkpoint that verifies, and what was wrong with each newer one."""
    damaged: list[StorageError] = []
    for step in reversed(folder.steps()):
        try:
            return folder.load(step), damaged
        except (IntegrityError, NotFoundError) as error:
            damaged.append(error)
    return None, damaged


def _save(checkpoint: Checkpoint, folder: Path) -> None:
    from eagleray.actors.checkpoint.dcp import write_arrays  # noqa: PLC0415 - see the top

    try:
        write_arrays(checkpoint.arrays, folder)
    except OSError as error:
        raise StorageError(
            f"checkpoint {checkpoint.step} cannot be written to {folder.parent}: {error}",
            "check that the storage has room; the run goes on from memory until it can be written",
        ) from error


def _damaged(run_id: str) -> str:
    return f"`eagleray resume {run_id}` goes on from the newest intact one; remove this folder"
