"""A large corpus is encoded by many processes, which may die, to the very same bytes."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from eagleray.actors.data import BuildProgress, Dataset, build_dataset
from eagleray.actors.data import build as module
from eagleray.actors.data.units import Encoder
from eagleray.platform.config import DataConfig
from eagleray.platform.errors import DataError
from eagleray.platform.storage import Storage

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180), pytest.mark.usefixtures("ray_cluster")]
Build = Callable[..., Dataset]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds 400 documents; in parts of 5 KB on the cluster unless `alone`."""
    texts = (f"document {i} " + "of the people and of the union " * (i % 7 + 1) for i in range(400))
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text("".join(lines))

    def run(
        name: str,
        *,
        alone: bool = False,
        on_progress: Callable[[BuildProgress], None] | None = None,
        **settings: Any,
    ) -> Dataset:
        defaults: dict[str, Any] = {
            "sources": [{"path": "a.jsonl"}],
            "tokenizer": {"kind": "bpe", "vocab_size": 300},
            "seq_len": 16,
            "eval_fraction": 0.1,
        }
        config = DataConfig.model_validate(defaults | settings)
        with monkeypatch.context() as patch:
            if not alone:
                patch.setattr(module, "UNIT_BYTES", 5000)
                patch.setattr(module, "PARALLEL_BYTES", 0)
                patch.setattr(Encoder, "encode", lambda *_: pytest.fail("not on the cluster"))
            return build_dataset(
                config,
                lambda path: tmp_path / path,
                Storage(tmp_path / name),
                on_progress,
                None if alone else contextlib.nullcontext,
            )

    return run


def encoders() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ray::Map(" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_many_processes_give_the_same_bytes_though_one_is_killed(build: Build) -> None:
    alone = build("alone", alone=True)
    killed: list[int] = []
    seen: list[BuildProgress] = []

    def kill_one() -> None:
        # Its first unit takes a process seconds, for it imports what it needs.
        deadline = time.monotonic() + 60
        while not killed and time.monotonic() < deadline:
            for process in encoders():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    killed.append(process.pid)
                    return
            time.sleep(0.01)

    killer = threading.Thread(target=kill_one)

    def look(progress: BuildProgress) -> None:
        seen.append(progress)
        if progress.phase == "cluster":
            killer.start()

    together = build("together", on_progress=look)
    killer.join(60)
    assert together.digest == alone.digest
    assert together.verify() == []
    assert killed
    assert not [thread.name for thread in threading.enumerate() if "usage" in thread.name]
    assert [*dict.fromkeys(p.phase for p in seen)][-2:] == ["cluster", "encode"]
    assert (seen[-1].fraction, seen[-1].documents) == (1.0, 400)
    assert not list(Path(together.folder).parent.glob(".build-*"))


def test_rows_of_numbers_are_encoded_by_many_processes_to_the_same_bytes(
    build: Build, tmp_path: Path
) -> None:
    records = ({"n": n, "x": n / 7, "word": f"word {n % 11}"} for n in range(600))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    of_kind = {"tokenizer": {}, "seq_len": 128, "features": {"categories": ["word"]}}
    alone = build("alone", alone=True, **of_kind)
    together = build("together", **of_kind)
    assert together.digest == alone.digest
    assert together.verify() == []


def test_what_is_wrong_with_a_record_arrives_as_it_is(build: Build, tmp_path: Path) -> None:
    (tmp_path / "tok.json").write_bytes(build("alone", alone=True).tokenizer_json)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": 7}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:401 has a int in field 'text'"):
        build("together", tokenizer={"kind": "file", "path": "tok.json"})
