"""Batches as an iterable with a state, for a training loop of one's own.

    with BatchStream(dataset, batch_size=32, rank=rank, world_size=world_size) as stream:
        for batch in stream:                  # to the end of the epoch; again: the next one
            train(torch.from_numpy(batch.tokens))
        state = stream.state_dict()

Laws:
    * No sample is dropped: a batch that begins before the end of an epoch belongs to it, and is
      filled up from the next one. So there is no epoch without a batch, whatever the sizes.
    * All ranks get equally many batches, and their parts make up the same global batch whatever the
      number of ranks: a state may be loaded at another world size.
    * `load_state_dict` applies at once, also to an iterator that is under way; `state_dict` right
      after it gives the same state back.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from eagleray.actors.cache import FeatureCache
from eagleray.actors.data.batch import Batch
from eagleray.actors.data.dataset import Dataset, Split
from eagleray.actors.data.loader import Loader
from eagleray.actors.data.mixing import stratified
from eagleray.actors.data.mixture import Mixture
from eagleray.platform.errors import DataError

VERSION = 1


class BatchStream:
    """One rank's batches of a split, epoch after epoch. Not for several threads.

    It reads ahead by itself: iterate it directly, without worker processes in between.

    Args:
        dataset: Where samples come from.
        batch_size: Global batch in samples; a multiple of `world_size`.
        rank: Which part of each batch this is.
        world_size: Of how many.
        split: Of the dataset.
        seed: Of the sample order.
        mixture: Of the domains; None: in the ratio of their sizes.
        cache: Looked up before the shards are read; owned by the stream from now on.
        prefetch_batches: Steps read ahead; 0: none; None: as many as pays, perhaps none.
        fetchers: Threads that read ahead; None: as many as pays.
        timeout_s: How long the next batch may take; None: without end, as a read that hangs can
            only be left alone if another thread made it.

    Raises:
        ValueError: The batch does not divide by the ranks, or there is no such rank.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        split: Split = "train",
        seed: int = 0,
        mixture: Mixture | None = None,
        cache: FeatureCache | None = None,
        prefetch_batches: int | None = None,
        fetchers: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._mixture = mixture or stratified(dataset.sizes(split))
        self._loader = Loader(
            dataset,
            split,
            seed,
            batch_size,
            cache,
            prefetch_batches,
            self._mixture,
            rank,
            world_size,
            fetchers=fetchers,
            timeout_s=timeout_s,
        )
        self._epoch_samples = dataset.num_samples(split)
        self._step = 0

    @property
    def step(self) -> int:
        """The step that the next batch is of."""
        return self._step

    @property
    def epoch(self) -> int:
        """How often as many samples were given out as the split has."""
        return self._step * self._loader.batch_size // self._epoch_samples

    def __iter__(self) -> Iterator[Batch]:
        """This rank's batches from here to the end of the epoch.

        Raises:
            IntegrityError: A block of a shard is damaged; names shard and block.
            DeadlineExceededError: A batch did not come within `timeout_s`; names the shard. The
                next call asks for the same batch again.
        """
        epoch = self.epoch
        while self.epoch == epoch:
            batch = self._loader.batch(self._step)
            # Before the caller has it: a state that is taken while it trains names what comes next.
            self._step += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, in plain values; under 1 KB unless the mixture has many phases."""
        return {"version": VERSION, "step": self._step, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken.

        Raises:
            DataError: It is of another dataset, order or batch size, or of a later version.
        """
        if state.get("version") != VERSION:
            raise DataError(
                f"the state has version {state.get('version')}, this program reads {VERSION}",
                "use the program that wrote it",
            )
        for name, ours in self._identity().items():
            if state.get(name) != ours:
                raise DataError(
                    f"the state is of {name} {state.get(name)}, this stream of {ours}",
                    f"make the stream with the {name} of the state, or start without it",
                )
        self._step = int(state["step"])

    def close(self) -> None:
        """Stop reading ahead. Repeatable."""
        self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _identity(self) -> dict[str, Any]:
        """What the samples of a step follow from."""
        loader = self._loader
        return {
            "dataset": loader.dataset.digest,
            "split": loader.split,
            "seed": loader.order_seed,
            "batch_size": loader.batch_size,
            "mixture": self._mixture.state(),
        }
