"""A small corpus and datasets built from it."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagleray.actors.data import BuildProgress, Dataset, build_dataset
from eagleray.platform.config import DataConfig
from eagleray.platform.storage import Storage

WORDS = ["the", "people", "of", "these", "united", "states", "in", "congress", "assembled", "peace"]


def documents(count: int, seed: int = 0) -> list[str]:
    """Texts of 20 to 120 words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(20, 120))) + "." for _ in range(count)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with raw/a.jsonl and raw/b.jsonl: 120 documents."""
    folder = tmp_path / "project"
    (folder / "raw").mkdir(parents=True)
    texts = documents(120)
    for name, part in (("a", texts[:60]), ("b", texts[60:])):
        lines = (json.dumps({"text": text}) + "\n" for text in part)
        (folder / "raw" / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def build(corpus: Path, storage: Storage) -> Callable[..., Dataset]:
    """Builds from the corpus; keywords are settings of `data`."""

    def run(
        storage: Storage = storage,
        root: Path = corpus,
        on_progress: Callable[[BuildProgress], None] | None = None,
        **settings: Any,
    ) -> Dataset:
        defaults: dict[str, Any] = {
            "sources": [{"path": "raw/*.jsonl"}],
            "tokenizer": {"kind": "bpe", "vocab_size": 320},
            "seq_len": 16,
            "eval_fraction": 0.2,
        }
        config = DataConfig.model_validate(defaults | settings)
        return build_dataset(config, lambda path: root / path, storage, on_progress)

    return run
