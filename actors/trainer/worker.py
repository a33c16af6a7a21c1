"""A training worker on Ray Train: it finds its seat and its actors, then runs the loop.

Ray Train creates the workers, and all of them anew when one dies; nothing of a worker survives but
what it handed to the checkpoint store and the recorder.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import ray.train

from eagleray.actors.checkpoint.client import StoreClient
from eagleray.actors.data.batch import Batch
from eagleray.actors.data.loader_client import LoaderClient
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.trainer.loop import run_loop
from eagleray.actors.trainer.recorder import Fatal
from eagleray.actors.trainer.recorder_actor import CALL_TIMEOUT_S, RecorderClient
from eagleray.actors.trainer.seams import BatchSource, LoopSpec, Seat
from eagleray.actors.trainer.stepper import NonFiniteLossError
from eagleray.platform.errors import EagleRayError, ServiceError
from eagleray.platform.telemetry import bind_log_context, configure_logging


@dataclass(frozen=True)
class RunActors:
    """Handles of the actors of one run; they outlive its workers."""

    recorder: Any
    store: Any
    loaders: Mapping[str, Sequence[Any]]
    """Node id -> the loaders there."""
    evictor: Any = None
    run_id: str = ""
    reading: Any = None
    """A LoaderSpec, if there are no loaders: each worker reads for itself."""


class LoaderSource:
    """A loader's actor as a BatchSource for the loop; asks for the next step while one is trained.

    Args:
        client: Of the loader.
        batch_size: Global batch in samples.
    """

    def __init__(self, client: LoaderClient, batch_size: int) -> None:
        self._client, self._batch_size = client, batch_size
        self._ahead: tuple[int, Any] | None = None

    def batch(self, step: int, rank: int, world_size: int, mixture: Mixture | None) -> Batch:
        """This rank's part of a step's global batch."""
        ahead, self._ahead = self._ahead, None
        asked = ahead[1] if ahead and ahead[0] == step else None
        asked = asked or self._client.ask(step, rank, world_size, mixture)
        batch = self._client.take(step, asked)
        end = mixture.end if mixture else None
        if end is None or (step + 2) * self._batch_size <= end:
            self._ahead = step + 1, self._client.ask(step + 1, rank, world_size, mixture)
        return batch

    def eval_batch(self, index: int) -> np.ndarray:
        """Held-out tokens."""
        return self._client.eval_batch(index).tokens


class _OwnSource:
    """A loader in this process as a BatchSource for the loop."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def batch(self, step: int, rank: int, world_size: int, mixture: Mixture | None) -> Batch:
        batch: Batch = self._server.batch(step, rank, world_size, mixture)
        return batch

    def eval_batch(self, index: int) -> np.ndarray:
        tokens: np.ndarray = self._server.eval_batch(index, 0, 1).tokens
        return tokens


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
    if recorder.ask("fatal") is not None:
        return
    store = StoreClient(actors.store, spec.train.checkpoint.write_timeout_s + CALL_TIMEOUT_S)
    try:
        with _source(actors, seat, context.get_local_rank(), spec) as source:
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


@contextmanager
def _source(
    actors: RunActors, seat: Seat, local_rank: int, spec: LoopSpec
) -> Iterator[BatchSource]:
    """Where this worker's batches come from."""
    if actors.reading is not None:
        # Only here: it brings Redis and the cache with it.
        from eagleray.actors.data.loader_actor import LoaderServer  # noqa: PLC0415

        with closing(LoaderServer(actors.reading, seat.rank, seat.world_size)) as server:
            yield _OwnSource(server)
        return
    node_id = ray.get_runtime_context().get_node_id()
    loaders = actors.loaders.get(node_id) or next(iter(actors.loaders.values()))
    loader = loaders[local_rank % len(loaders)]
    yield LoaderSource(LoaderClient(loader, CALL_TIMEOUT_S), spec.train.batch_size)
