"""A build killed at any moment leaves nothing in sight, and the next one goes on from it."""

import json
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from eagleray.actors.data import build, build_dataset, last_digest
from eagleray.platform.config import DataConfig
from eagleray.platform.errors import NotFoundError
from eagleray.platform.storage import Storage

PROGRAM = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from eagleray.actors.data import build, build_dataset
    from eagleray.platform.config import DataConfig
    from eagleray.platform.storage import Storage

    root, settings, phase = Path(sys.argv[1]), sys.argv[2], sys.argv[3]

    build.UNIT_BYTES = 300_000

    def wait_to_be_killed(progress):
        if progress.phase == phase and getattr(progress, "bytes", 0) >= 700_000 * (
            phase == "encode"
        ):
            print("reached", flush=True)
            time.sleep(600)

    config = DataConfig.model_validate_json(settings)
    build_dataset(config, lambda path: root / path, Storage(root / "storage"), wait_to_be_killed)
    """
)
SETTINGS = {
    "sources": [{"path": "a.jsonl"}],
    "tokenizer": {"kind": "bpe", "vocab_size": 300},
    "seq_len": 32,
    "eval_fraction": 0.1,
}


OF_FEATURES = {
    "sources": [{"path": "a.jsonl"}],
    "features": {"columns": ["n", "word", "pixels"], "categories": ["word"]},
    "eval_fraction": 0.1,
}


@pytest.mark.parametrize(
    ("phase", "settings"),
    [
        ("tokenizer", SETTINGS),
        ("encode", SETTINGS),
        ("publish", SETTINGS),
        ("encode", OF_FEATURES),
        ("publish", OF_FEATURES),
    ],
)
def test_a_killed_build_is_invisible_and_the_next_gives_the_same_digest(
    tmp_path: Path, phase: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(2)
    words = [f"word{number}" for number in range(50)]
    records = (
        {
            "text": " ".join(draw.choices(words, k=300)),
            "n": n,
            "word": draw.choice(words),
            "pixels": [n / 3] * 9,
        }
        for n in range(1000)
    )
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    program = PROGRAM
    if phase == "publish":
        # The last moment before the dataset appears: all files are written, under a hidden name.
        program = program.replace(
            "config =",
            "import eagleray.platform.storage as storage\n"
            "storage.sync_tree = lambda path: wait_to_be_killed(type('P', (), {'phase': phase}))\n"
            "config =",
            1,
        )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), json.dumps(settings), phase],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reached\n"
        process.send_signal(signal.SIGKILL)
    storage = Storage(tmp_path / "storage")
    assert storage.names("datasets") == []
    with pytest.raises(NotFoundError):
        last_digest(storage)
    (left,) = storage.path("datasets").glob(".build-*")
    units = [path.name for path in (left / "units").glob("0*")]
    assert len(units) == {"tokenizer": 0, "encode": 2, "publish": 8}[phase]
    config = DataConfig.model_validate(settings)
    monkeypatch.setattr(build, "UNIT_BYTES", 300_000)
    dataset = build_dataset(config, lambda path: tmp_path / path, storage)
    elsewhere = build_dataset(config, lambda path: tmp_path / path, Storage(tmp_path / "other"))
    assert dataset.digest == elsewhere.digest
    assert dataset.verify() == []
    hidden = [path.name for path in storage.path("datasets").glob(".*")]
    assert hidden == [".building.lock"]
