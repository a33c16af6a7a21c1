"""The end of a run: what is registered has done all that was asked for."""

from typing import Any

import numpy as np
import pytest

from eagleray.actors.checkpoint.manifest import CheckpointFolder
from eagleray.actors.checkpoint.state import Checkpoint
from eagleray.actors.trainer.finish import finish_run
from eagleray.platform.config import ProjectConfig
from eagleray.platform.errors import RunFailedError
from eagleray.platform.storage import Storage


@pytest.mark.parametrize(
    ("is_damaged", "named"),
    [(False, r"after step 8 of 10\n"), (True, r"after step 8 of 10: checkpoint .*")],
)
def test_a_run_that_did_fewer_steps_than_it_was_asked_for_is_not_registered(
    storage: Storage, is_damaged: bool, named: str
) -> None:
    folder = CheckpointFolder(storage, "r")
    for step in (8, 10) if is_damaged else (8,):
        folder.write(Checkpoint(step, {"model.w": np.zeros(3, np.float32)}, "", {}))
    if is_damaged:
        next(storage.path("runs", "r", "checkpoints", "00000010").glob("*.distcp")).unlink()
    config = ProjectConfig.model_validate({"name": "p", "train": {"steps": 10}})
    unused: Any = None
    with pytest.raises(RunFailedError, match=f"run r has no intact checkpoint {named}") as caught:
        finish_run(storage, config, "r", unused, unused, register_as="p")
    assert caught.value.fix == "eagleray resume r"
