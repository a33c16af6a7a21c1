"""What the disturbed runs must equal."""

from eagleray.project import TrainedRun

STEPS = 200


def assert_same(run: TrainedRun, undisturbed: TrainedRun) -> None:
    """The same weights from the same samples, each exactly once."""
    assert (run.steps, run.samples, run.missing, run.doubled) == (STEPS, STEPS * 8, 0, 0)
    assert run.model is not None
    assert undisturbed.model is not None
    assert run.model.artifact == undisturbed.model.artifact
    assert run.eval_loss == undisturbed.eval_loss
