"""A training process: it holds one rank's state, attempt after attempt.

The run's gang creates it, and some more as spares; whoever takes a dead one's place is such a
spare, which has loaded torch and taken a step already. What survives with the process: model,
optimizer and the rest of `RankTrainer`. Batches, figures and snapshots go to the run's actors.
"""

import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray

from eagleray.actors.checkpoint.client import StoreClient
from eagleray.actors.data.batch import Batch
from eagleray.actors.data.loader_client import LoaderClient
from eagleray.actors.data.mixture import Mixture
from eagleray.actors.trainer.collectives import PeerLostError
from eagleray.actors.trainer.journal import StepJournal
from eagleray.actors.trainer.loop import PausedError, RankTrainer, StateLostError
from eagleray.actors.trainer.memory_needs import asked_for, is_out_of_memory, out_of_memory
from eagleray.actors.trainer.process_group import Address, Group, set_device
from eagleray.actors.trainer.recorder import Fatal
from eagleray.actors.trainer.recorder_actor import CALL_TIMEOUT_S, RecorderClient
from eagleray.actors.trainer.run_actors import RunActors
from eagleray.actors.trainer.seams import BatchSource, LoopSpec
from eagleray.actors.trainer.seating import End, Outcome, Plan
from eagleray.platform.errors import EagleRayError, ServiceError
from eagleray.platform.telemetry import bind_log_context, configure_logging

logger = logging.getLogger(__name__)

# Longer than any other rank may be busy alone: with a checkpoint, or with the first batches.
_GROUP_TIMEOUT_S = 600.0
_SPARE_ROWS = 64
"""Steps whose ids are kept beside those of four intervals between checkpoints."""
_AUTO_ROWS = 16_384


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


class TrainProcess:
    """What runs in the actor. `pid`, `pause` and `sever` may be called while `run` runs.

    Args:
        spec: What to train.
        actors: Of the run.
        gang: Told of what a recovery waits for.
        stacks: Folder for the stacks of its threads, which it writes at SIGUSR2.
    """

    def __init__(self, spec: LoopSpec, actors: RunActors, gang: Any, stacks: Path) -> None:
        configure_logging()
        bind_log_context(run=actors.run_id)
        self._spec, self._actors, self._gang = spec, actors, gang
        self._recorder = RecorderClient(actors.recorder)
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._trainer: RankTrainer | None = None
        self._journal: StepJournal | None = None
        self._paused = threading.Event()
        stacks.mkdir(parents=True, exist_ok=True)
        self._stacks = (stacks / f"{os.getpid()}.txt").open("a")
        faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)

    def warm_up(self) -> None:
        """Load what training needs, and take a step on nothing."""
        # Which of several GPUs it will use is known when it sits.
        if self._trainer is None and self._spec.train.device == "cpu":
            self._trainer = RankTrainer(self._spec)
            self._trainer.warm_up()

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def open_journal(self, world_size: int) -> str:
        """Where its journal is found, which is made for a number of ranks."""
        train = self._spec.train
        steps = train.checkpoint.every_steps
        # Snapshots that wait for storage are two at most, beside the one that is taken.
        rows = _AUTO_ROWS if steps == "auto" else 4 * steps + _SPARE_ROWS
        ids = train.batch_size // world_size
        if self._journal is None or not self._journal.fits(rows, ids):
            if self._journal is not None:
                self._journal.close()
            self._journal = StepJournal.create(rows, ids)
        return self._journal.path

    def listen(self) -> Address:
        """As rank 0 of the next attempt: where its ranks will meet."""
        return self._new_group().listen()

    def run(self, plan: Plan, address: Address | None) -> Outcome:
        """Take part in an attempt, to its end.

        A failure that a restart cannot mend is noted with the recorder before it is told.
        """
        seat = plan.seat
        bind_log_context(rank=seat.rank)
        trainer: RankTrainer | None = None
        group = self._group if seat.rank == 0 and address else self._new_group()
        assert group is not None
        try:
            if self._recorder.ask("fatal") is not None:
                return Outcome(End.FAILED)
            set_device(plan.gpu)
            trainer = self._trainer = self._trainer or RankTrainer(self._spec)
            if address is not None:
                group.meet(address, seat)
            self._tell(seat.rank, "met")
            self._train(trainer, plan)
            return Outcome(End.FINISHED, trainer.standing, trainer.is_noted)
        except PausedError:
            return Outcome(End.PAUSED, trainer.standing if trainer else None, True)
        except PeerLostError as error:
            return self._interrupted(End.INTERRUPTED, trainer, str(error))
        except StateLostError as error:
            return self._interrupted(End.LOST, trainer, str(error))
        except ServiceError as error:
            # A dead or slow actor may be back at the next attempt.
            return self._interrupted(End.INTERRUPTED, trainer, error.what, is_own=True)
        except EagleRayError as error:
            return self._failed(error)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return self._starved(error, trainer)
        finally:
            group.leave()
            self._paused.clear()
            if trainer is not None:
                trainer.drop()

    def pause(self) -> None:
        """Let all ranks of the attempt end after their next step, with a snapshot."""
        self._paused.set()

    def sever(self) -> None:
        """End the attempt: this process waits for a peer that will not come."""
        with self._lock:
            group = self._group
        if group is not None:
            group.sever()

    def _train(self, trainer: RankTrainer, plan: Plan) -> None:
        seat, spec = plan.seat, self._spec
        timeout_s = spec.train.checkpoint.write_timeout_s + CALL_TIMEOUT_S
        store = StoreClient(self._actors.store, timeout_s)
        opened = (StepJournal.open(path) for path in plan.inherited)
        inherited = [journal for journal in opened if journal is not None]
        with _source(self._actors, plan, spec) as source:
            trainer.run(
                seat, source, store, self._recorder, plan.bond, self._journal, inherited,
                lambda phase: self._tell(seat.rank, phase), wants_pause=self._paused.is_set,
            )  # fmt: skip

    def _new_group(self) -> Group:
        backend = "nccl" if self._spec.train.device == "cuda" else "gloo"
        with self._lock:
            self._group = Group(backend, _GROUP_TIMEOUT_S)
            return self._group

    def _tell(self, rank: int, phase: str) -> None:
        if rank == 0:
            self._gang.reached.remote(phase)

    def _interrupted(
        self, end: End, trainer: RankTrainer | None, message: str, *, is_own: bool = False
    ) -> Outcome:
        logger.warning("attempt interrupted: %s", message)
        if trainer is None:
            return Outcome(End.LOST, message=message)
        said = message if is_own else ""
        return Outcome(end, trainer.standing, trainer.is_noted, said)

    def _failed(self, error: EagleRayError) -> Outcome:
        fatal = Fatal(type(error).__name__, error.what, error.fix, error.exit_code)
        self._recorder.ask("fail", fatal)
        return Outcome(End.FAILED, message=error.what)

    def _starved(self, error: Exception, trainer: RankTrainer | None) -> Outcome:
        """How an attempt ends in which memory could not be had.

        Where not even the first step of the attempt found room, the next attempt will not either.
        """
        asked = asked_for(str(error))
        what = f"an allocation of {asked}" if asked else "an allocation"
        cause = f"{what} failed ({type(error).__name__})"
        named = out_of_memory(cause, self._spec)
        if trainer is None or not trainer.has_stepped:
            return self._failed(named)
        trainer.abandon()
        return self._interrupted(End.INTERRUPTED, trainer, named.what, is_own=True)


@contextmanager
def _source(actors: RunActors, plan: Plan, spec: LoopSpec) -> Iterator[BatchSource]:
    """Where this worker's batches come from."""
    seat = plan.seat
    node_id = ray.get_runtime_context().get_node_id()
    loaders = actors.loaders.get(node_id)
    if not loaders:
        # None are wanted, or the node came later. Only here: it brings Redis and the cache with it.
        from eagleray.actors.data.loader_actor import LoaderServer  # noqa: PLC0415

        with closing(LoaderServer(actors.reading, seat.rank, seat.world_size)) as server:
            yield _OwnSource(server)
        return
    loader = loaders[plan.local_rank % len(loaders)]
    yield LoaderSource(LoaderClient(loader, CALL_TIMEOUT_S), spec.train.batch_size)
