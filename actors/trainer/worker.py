"""A training worker on Ray Train: it finds its seat and its actors, then runs the loop.

Ray Train creates the workers, and all of them anew when one dies; nothing of a worker survives but
what it handed to the checkpoint store and the recorder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import ray.train

from eagleray.actors.checkpoint.client import StoreClient
from eagleray.actors.data.batch import Batch
from eagleray.actors.data.loader_client import LoaderClient
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.trainer.loop import LoopSpec, Seat, run_loop
from eagleray.actors.trainer.recorder import Fatal
from eagleray.actors.trainer.recorder_actor import CALL_TIMEOUT_S, RecorderClient
from eagleray.actors.trainer.stepper import NonFiniteLossError
from eagleray.platform.errors import EagleRayError, ServiceError
from eagleray.platform.telemetry import bind_log_context, configure_logging


@dataclass(frozen=True)
class RunActors:
    """Handles of the actors of one run; they outlive its workers."""

    recorder: Any
    store: Any
    loaders: Mapping[str, Any]
    """Node id -> the loader there."""
    evictor: Any = None
    run_id: str = ""


class LoaderSource:
    """The loader's actor as a BatchSource for the loop."""

    def __init__(self, client: LoaderClient) -> None:
        self._client = client

    def batch(self, step: int, rank: int, world_size: int, mixture: Mixture | None) -> Batch:
        """This rank's part of a step's global batch."""
        return self._client.batch(step, rank, world_size, mixture)

    def eval_batch(self, index: int) -> np.ndarray:
        """Held-out tokens."""
        return self._client.eval_batch(index).tokens


def train_worker(spec: LoopSpec, actors: RunActors) -> None:
    """Ray Train's entry point of one worker.

    A failure that a restart cannot mend is noted before it ends the attempt. The driver ends the
    run when it sees the note; workers of an attempt that was quicker see it too, and return.
    """
    context = ray.train.get_context()
    seat = Seat(context.get_world_rank(), context.get_world_size())
    configure_logging()
    bind_log_context(run=actors.run_id, rank=seat.rank)
    recorder = RecorderClient(actors.recorder)
    node_id = ray.get_runtime_context().get_node_id()
    if recorder.ask("fatal") is not None:
        return
    loader = actors.loaders.get(node_id) or next(iter(actors.loaders.values()))
    source = LoaderSource(LoaderClient(loader, CALL_TIMEOUT_S))
    store = StoreClient(actors.store, spec.train.checkpoint.write_timeout_s + CALL_TIMEOUT_S)
    try:
        run_loop(seat, spec, source, store, recorder)
    except NonFiniteLossError as error:
        fix = "lower train.optimizer.lr or train.clip_grad_norm, or look at the data of that step"
        recorder.ask("fail", Fatal(type(error).__name__, f"training stopped: {error}", fix, 1))
        raise
    except EagleRayError as error:
        # A dead or slow actor may be back at the next attempt; no restart mends anything else.
        if not isinstance(error, ServiceError):
            recorder.ask(
                "fail", Fatal(type(error).__name__, error.what, error.fix, error.exit_code)
            )
        raise
