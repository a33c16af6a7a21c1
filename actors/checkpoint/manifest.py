"""A checkpoint on storage: PyTorch DCP files, committed by a manifest that is written last.

    runs/<run>/checkpoints/<step>/
        __0_0.distcp, ..., .metadata    arrays, in PyTorch's distributed checkpoint format
        manifest.json                   size and SHA-256 of each file, step, sample log, metrics
        manifest.sha256                 the manifest's own digest, in hexadecimal

DCP itself has no integrity check: a flipped bit loads silently. So no file is opened before its
digest was compared with the manifest's, a folder with a file that its manifest does not name is
refused, and a folder without a manifest does not exist. Early checkpoints of format 1 have no
`manifest.sha256`; where it is missing, the manifest is believed.
Format and version: docs/formats.md#checkpoint.

DCP is imported by the first write or read: it brings torch, seconds that the store's process would
else spend while the workers start.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagleray.actors.checkpoint.shard_file import Pacer, WrittenFile
from eagleray.actors.checkpoint.state import Checkpoint
from eagleray.platform.errors import IntegrityError, NotFoundError, StorageError
from eagleray.platform.storage import Storage, canonical_json, digest_bytes

FORMAT = 1
MANIFEST = "manifest.json"
CHECKSUM = "manifest.sha256"
_BLOCK_BYTES = 1 << 20

_NFS = ".nfs"
"""So begin the names that NFS gives to files which were removed while somebody read them."""


@dataclass(frozen=True)
class Damage:
    """A file of a checkpoint that is not as it was written."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"checkpoint file {self.path} {self.reason}"


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        storage: The project's storage.
        run_id: The run.
        max_bytes_per_s: Pace of `write`; None: as fast as it can.
    """

    def __init__(self, storage: Storage, run_id: str, max_bytes_per_s: int | None = None) -> None:
        self.storage, self._run_id = storage, run_id
        self._pacer = Pacer(max_bytes_per_s)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return [step for step in self.all_steps() if (self.path(step) / MANIFEST).exists()]

    def all_steps(self) -> list[int]:
        """Steps of all folders, also of those that lost their manifest, ascending."""
        names = self.storage.names(*self.place())
        return sorted(int(name) for name in names if name.isdigit())

    def write(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint; it appears whole, replacing one of the same step.

        Returns:
            The digest of its manifest.

        Raises:
            StorageError: It could not be written; nothing of it is visible.
        """
        name = f"{checkpoint.step:08d}"
        with self.storage.staging_folder(*self.place()) as folder:
            files = {
                name: file._asdict()
                for name, file in _save(checkpoint, folder, self._pacer).items()
            }
            manifest = canonical_json(
                {
                    "format": FORMAT, "step": checkpoint.step, "files": files,
                    "samples": checkpoint.samples, "meta": checkpoint.meta,
                }
            )  # fmt: skip
            (folder / CHECKSUM).write_text(digest_bytes(manifest), encoding="ascii")
            (folder / MANIFEST).write_bytes(manifest)
            self.storage.replace(folder, *self.place(name))
        return digest_bytes(manifest)

    def manifest(self, step: int) -> dict[str, Any]:
        """What a checkpoint holds.

        Raises:
            NotFoundError: There is no complete checkpoint of this step.
            IntegrityError: It is damaged, or its format is not one that this version reads.
        """
        data = self._read(step, MANIFEST)
        with contextlib.suppress(NotFoundError):
            expected = self._read(step, CHECKSUM)
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
        return digest_bytes(self.storage.read(*self.place(f"{step:08d}"), MANIFEST))

    def verify(self, step: int) -> None:
        """Read every byte of a checkpoint.

        Raises:
            NotFoundError: There is no complete checkpoint of this step.
            IntegrityError: A file is missing, or is not the one that was written.
        """
        for found in self.damage(step):
            raise IntegrityError(str(found), _damaged(self._run_id))

    def damage(
        self, step: int, on_bytes: Callable[[int], None] = lambda num_bytes: None
    ) -> Iterator[Damage]:
        """Read every byte of a checkpoint and name each file that is not as it was written.

        Args:
            step: The checkpoint's.
            on_bytes: Told how many more bytes were read.

        Raises:
            NotFoundError: There is no complete checkpoint of this step.
            IntegrityError: The manifest is damaged, so nothing is known of the other files.
        """
        expected = self.manifest(step)["files"]
        folder = self.path(step)
        try:
            present = {path.name for path in folder.iterdir()}
        except FileNotFoundError:
            raise NotFoundError(f"checkpoint {folder} was removed meanwhile") from None
        for name, file in expected.items():
            reason = _difference(folder / name, file, on_bytes)
            if reason:
                yield Damage(folder / name, reason)
        for name in sorted(present - expected.keys() - {MANIFEST, CHECKSUM}):
            if not name.startswith(_NFS):
                yield Damage(folder / name, "is not named by the manifest: parts of two writes mix")

    def load(self, step: int) -> Checkpoint:
        """Verify and read a checkpoint.

        Raises:
            NotFoundError: There is no complete checkpoint of this step.
            IntegrityError: It is damaged.
        """
        from eagleray.actors.checkpoint.dcp import read_arrays  # noqa: PLC0415 - see the top

        self.verify(step)
        manifest = self.manifest(step)
        try:
            arrays = read_arrays(self.path(step))
        except (ValueError, OSError) as error:
            raise IntegrityError(
                f"checkpoint {self.path(step)} does not load: {error}", _damaged(self._run_id)
            ) from error
        return Checkpoint(step, arrays, manifest["samples"], manifest["meta"])

    def remove(self, step: int) -> None:
        """Remove a checkpoint in one step."""
        self.storage.remove(*self.place(f"{step:08d}"))

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Exclude all others that ask for the lock of this name."""
        with self.storage.locked(*self.place(name)):
            yield

    def remove_unfinished(self) -> None:
        """Remove what a killed writer left half written; only for the run's one writer."""
        self.storage.remove_unfinished(*self.place())

    def _read(self, step: int, name: str) -> bytes:
        try:
            return self.storage.read(*self.place(f"{step:08d}"), name)
        except OSError as error:
            raise IntegrityError(
                f"{name} of checkpoint {step} of {self._run_id} cannot be read: "
                f"{error.strerror or error}",
                _damaged(self._run_id),
            ) from error

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, if there is one."""
        return self.storage.path(*self.place(f"{step:08d}"))

    def place(self, *parts: str) -> tuple[str, ...]:
        """The parts of a path in storage below the folder."""
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


def _difference(path: Path, written: dict[str, Any], on_bytes: Callable[[int], None]) -> str:
    """How a file differs from what was written; empty if it does not."""
    digest = hashlib.sha256()
    try:
        num_bytes = path.stat().st_size
        if num_bytes != written["bytes"]:
            on_bytes(written["bytes"])
            return f"has {num_bytes} bytes, {written['bytes']} were written"
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                on_bytes(len(block))
    except FileNotFoundError:
        on_bytes(written["bytes"])
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if digest.hexdigest() != written["sha256"]:
        return f"has SHA-256 {digest.hexdigest()}, {written['sha256']} was written"
    return ""


def _save(checkpoint: Checkpoint, folder: Path, pacer: Pacer) -> dict[str, WrittenFile]:
    from eagleray.actors.checkpoint.dcp import write_arrays  # noqa: PLC0415 - see the top

    try:
        return write_arrays(checkpoint.arrays, folder, pacer)
    except OSError as error:
        raise StorageError(
            f"checkpoint {checkpoint.step} cannot be written to {folder.parent}: {error}",
            "check that the storage has room; the run goes on from memory until it can be written",
        ) from error


def _damaged(run_id: str) -> str:
    return f"`eagleray resume {run_id}` goes on from the newest intact one; remove this folder"
