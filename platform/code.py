"""Which code ran: the version and the digest of every source file of this package."""

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from eagleray.platform.storage import canonical_json, digest_bytes, digest_file


@cache
def code_identity() -> dict[str, str]:
    """`{"version": ..., "source": <SHA-256 over the package's Python files>, <library>: ...}`."""
    spec = find_spec("eagleray")
    assert spec is not None, "this module is part of eagleray"
    assert spec.origin is not None, "eagleray is a regular package"
    package = Path(spec.origin).parent
    files = {path.name: digest_file(path) for path in package.glob("*.py")}
    for folder in (entry for entry in package.iterdir() if entry.is_dir()):
        # The four folders are links in a checkout: their content is the package's content.
        real = folder.resolve()
        for path in real.rglob("*.py"):
            files[f"{folder.name}/{path.relative_to(real)}"] = digest_file(path)
    libraries = {name: version(name) for name in ("torch", "ray", "numpy", "tokenizers")}
    return {
        "version": version("eagleray"),
        "source": digest_bytes(canonical_json(files)),
        **libraries,
    }
