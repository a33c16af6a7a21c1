"""Each process of a run imports what it needs: the others' libraries are seconds at every start."""

import subprocess
import sys

import pytest
import torch

from eagleray.actors.trainer.stepper import EagerAdamW

TRAINING = """
import torch
import eagleray.actors.trainer.process
from eagleray.actors.trainer.stepper import EagerAdamW
layer = torch.nn.Linear(2, 2)
optimizer = EagerAdamW(layer.parameters())
layer(torch.ones(2)).sum().backward()
optimizer.step()
optimizer.zero_grad(set_to_none=True)
"""


@pytest.mark.parametrize(
    ("program", "unwanted"),
    [
        (TRAINING, {"torch._dynamo", "redis", "tokenizers", "ray.train", "eagleray.project"}),
        ("import eagleray.actors.trainer.worker", {"torch", "redis", "eagleray.project"}),
        ("import eagleray.actors.trainer.gang", {"torch", "ray.train", "redis"}),
        ("import eagleray.actors.trainer.controller_parts", {"torch", "eagleray.project"}),
        ("import eagleray.actors.checkpoint.actor", {"torch", "ray.train", "eagleray.project"}),
        ("import eagleray.actors.data.loader_actor", {"torch", "ray.train", "tokenizers"}),
        ("import eagleray.actors.trainer.recorder_actor", {"torch", "ray.train", "numpy"}),
    ],
    ids=[
        "training process",
        "worker",
        "gang",
        "controller",
        "checkpoint store",
        "loader",
        "recorder",
    ],
)
def test_a_process_imports_nothing_that_it_does_not_use(program: str, unwanted: set[str]) -> None:
    code = f"{program}\nimport sys; print(sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_eager_optimizer_computes_what_torchs_does() -> None:
    weights = []
    for make in (EagerAdamW, torch.optim.AdamW):
        torch.manual_seed(1)
        layer = torch.nn.Linear(8, 8)
        optimizer = make(layer.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
        for number in range(20):
            optimizer.zero_grad(set_to_none=True)
            layer(torch.full((8,), float(number))).square().sum().backward()
            optimizer.step()
        weights.append(layer.weight.detach())
    assert torch.equal(*weights)
