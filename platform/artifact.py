"""Model artifacts: content-addressed folders in the layout that transformers and vLLM load.

The digest of an artifact is the SHA-256 of its files' names and digests, so two exports of equal
weights are one artifact, and one changed byte is seen.
"""

from collections.abc import Callable
from pathlib import Path

from eagleray.platform.errors import IntegrityError, NotFoundError
from eagleray.platform.storage import Storage, canonical_json, digest_bytes, digest_file


def publish_artifact(storage: Storage, fill: Callable[[Path], None]) -> str:
    """Let `fill` write an artifact's files into a folder, and publish it under its digest.

    Returns:
        The digest; the files are at `<storage>/artifacts/<digest>/`.
    """
    with storage.staging_folder("artifacts") as folder:
        fill(folder)
        digest = artifact_digest(folder)
        storage.publish(folder, "artifacts", digest)
    return digest


def artifact_digest(folder: Path) -> str:
    """The digest of a folder's files."""
    files = {path.name: digest_file(path) for path in sorted(folder.iterdir()) if path.is_file()}
    return digest_bytes(canonical_json(files))


def verify_artifact(storage: Storage, digest: str) -> Path:
    """The folder of an artifact, after reading all of its bytes.

    Raises:
        NotFoundError: There is no such artifact.
        IntegrityError: A file was changed, added or lost.
    """
    folder = storage.path("artifacts", digest)
    if not folder.is_dir():
        raise NotFoundError(f"storage has no artifact {digest}", "import or train the model again")
    found = artifact_digest(folder)
    if found != digest:
        raise IntegrityError(
            f"artifact {digest} has content of digest {found}",
            "restore it, or export the model again",
        )
    return folder
