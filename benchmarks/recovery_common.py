"""What all ways of benchmarks.recovery share: model, project, and notes of steps."""

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from eagleray.platform.model.config import DecoderConfig

MODEL = DecoderConfig(
    vocab_size=512, dim=192, num_layers=4, num_heads=6, num_kv_heads=2, head_dim=32, ffn_dim=512,
    max_seq_len=128,
)  # fmt: skip
SEQ_LEN, BATCH, WORLD_SIZE, EVERY = 64, 16, 2, 10


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank."""

    time_s: float
    step: int
    rank: int
    pid: int


def write_project(folder: Path) -> None:
    """A project that trains the decoder on made-up text."""
    words = " ".join(f"word{number % 97}" for number in range(400))
    lines = [json.dumps({"text": f"{words} {number}"}) + "\n" for number in range(200)]
    (folder / "text.jsonl").write_text("".join(lines))
    (folder / "eagleray.yaml").write_text(
        f"""\
name: recovery
storage: {{uri: store}}
redis: {{mode: "off"}}
cluster: {{num_cpus: 4, object_store_bytes: 200MB, start_timeout_s: 120}}
data:
  sources: [{{path: text.jsonl}}]
  tokenizer: {{vocab_size: {MODEL.vocab_size}}}
  seq_len: {SEQ_LEN}
model: {{dim: {MODEL.dim}, num_layers: {MODEL.num_layers}, num_heads: {MODEL.num_heads},
  num_kv_heads: {MODEL.num_kv_heads}, ffn_dim: {MODEL.ffn_dim}, max_seq_len: {MODEL.max_seq_len}}}
train:
  num_workers: 2
  steps: 1000000
  batch_size: {BATCH}
  micro_batch_size: {BATCH}
  max_failures: 1000
  max_hangs: 1000
  log_every_steps: 1
  eval: {{every_steps: 1000000, num_batches: 1}}
  checkpoint: {{every_steps: {EVERY}}}
"""
    )


def note(folder: Path, step: int, rank: int) -> None:
    """One line, in one write."""
    descriptor = os.open(folder / "steps", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, f"{time.time()} {step} {rank} {os.getpid()}\n".encode())
    os.close(descriptor)


def steps_of(folder: Path) -> list[Step]:
    """What was noted so far."""
    with contextlib.suppress(FileNotFoundError):
        lines = [line.split() for line in (folder / "steps").read_text().splitlines()]
        return [
            Step(float(t), int(s), int(r), int(p))
            for t, s, r, p in (x for x in lines if len(x) == 4)
        ]
    return []
