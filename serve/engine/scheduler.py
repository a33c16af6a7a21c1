"""Which tokens the next step computes: continuous batching as a pure state machine.

A step has a budget of tokens. Every decoding request takes one, oldest first; the rest goes to
chunks of prompts, oldest first, so a long prompt never stops the others' tokens. No prompt takes
more than half of what is left while others want some, so a short one is not stuck behind a long.

Laws:
    * A free seat goes to the owner that has fewest, and among an owner's requests to the one that
      came first. When blocks run out the youngest running request is preempted, so the oldest
      running one always advances and every request that `Request.max_tokens` allows to fit alone
      finishes.
    * Everything is bounded: running and waiting requests together by `max_running + max_queued`.
      Where that is full, an owner that has fewer of these places than another gets them from it:
      who came last of those that wait for their first seat gives way.
    * Guesses take what is left over: they preempt nobody and hold no block that a running request
      may need for its next token.
    * Blocks belong to running requests only; a request that ends or is preempted holds none.
    * What a request has in common with the beginning of an earlier one is not computed again as
      long as the pool keeps it; at least its last token is computed, for there is one to draw.
Not thread-safe: the engine calls it under its lock.
"""

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from eagleray.platform.errors import UsageError
from eagleray.serve.engine.block_pool import BlockPool, PoolIntegrityError, block_names
from eagleray.serve.engine.guesses import PromptLookup
from eagleray.serve.engine.refusals import QueueFullError
from eagleray.serve.engine.request import FinishReason, Request, RequestState

_MAX_ROWS = 16
"""Rows up to which a step of decodes takes little longer for each."""


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of one engine.

    Raises:
        UsageError: A step cannot hold one token of every running request.
    """

    max_running: int
    max_queued: int
    step_tokens: int

    def __post_init__(self) -> None:
        if self.step_tokens < self.max_running:
            raise UsageError(
                f"serve.step_tokens {self.step_tokens} is below serve.max_running "
                f"{self.max_running}: a step must hold one token of every running request",
                f"set serve.step_tokens to at least {self.max_running}",
            )


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one request that a step computes.

    `samples`: it ends with the request's last token, so the next one is drawn from its logits.
    `guesses` are computed behind that one, as if they had been drawn; `length` counts them.
    """

    request: Request
    start: int
    length: int
    samples: bool
    guesses: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """What is computed."""
        end = self.start + self.length - len(self.guesses)
        return [*self.request.tokens[self.start : end], *self.guesses]

    @property
    def num_rows(self) -> int:
        """Tokens at its end whose logits are needed."""
        return 1 + len(self.guesses) if self.samples else 0

    @classmethod
    def of(cls, request: Request, length: int) -> "Chunk":
        """The next `length` uncomputed tokens of a request."""
        return cls(request, request.num_computed, length, length == request.num_uncomputed)


@dataclass(frozen=True)
class StepPlan:
    """One step: what it computes, and what was decided on the way.

    `chunks` starts with the `num_decodes` chunks of one token, those with guesses follow; `expired`
    ran out of time.
    """

    chunks: tuple[Chunk, ...]
    num_decodes: int
    expired: tuple[Request, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.length for chunk in self.chunks)


class Scheduler:
    """Requests in order of arrival, their blocks, and the plan of each step."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, guessed_tokens: int = 0) -> None:
        self.limits, self.pool = limits, pool
        self._guessed_tokens = guessed_tokens
        self.num_guessed_tokens = self.num_taken_tokens = 0
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._by_id: dict[str, Request] = {}
        self._next_order = 0
        self.num_preemptions = 0
        self.num_reused_tokens = 0
        self.finished: Counter[FinishReason] = Counter()

    @property
    def num_waiting(self) -> int:
        """Requests without a seat."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a seat and blocks."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """There is something to plan."""
        return bool(self._waiting or self._running)

    def submit(self, requests: Sequence[Request], retry_after_s: float = 1.0) -> list[Request]:
        """Queue requests of one owner, all or none.

        Returns:
            Requests of others that had to give way; they have ended.

        Raises:
            QueueFullError: They would exceed the bound.
        """
        limit = self.limits.max_running + self.limits.max_queued
        displaced = self._displaced(requests, len(self._by_id) + len(requests) - limit)
        if displaced is None:
            raise QueueFullError(len(self._by_id), limit, retry_after_s)
        for request in displaced:
            self.finish(request, FinishReason.DISPLACED)
        for request in requests:
            request.order = self._next_order
            self._next_order += 1
            self._by_id[request.request_id] = request
            self._waiting.append(request)
        return displaced

    def cancel(self, request_id: str) -> Request | None:
        """End a request in whatever state it is; None if there is none (any more)."""
        request = self._by_id.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.CANCELLED)
        return request

    def requests(self) -> Iterator[Request]:
        """Every unfinished request, running ones first."""
        yield from self._running
        yield from self._waiting

    def plan(self, now_s: float) -> StepPlan:
        """Decide the next step; requests whose deadline has passed end first."""
        expired = [request for request in self.requests() if request.deadline_s <= now_s]
        for request in expired:
            self.finish(request, FinishReason.DEADLINE)
        decodes = self._with_guesses(self._plan_decodes())
        plain = [chunk for chunk in decodes if not chunk.guesses]
        guessed = [chunk for chunk in decodes if chunk.guesses]
        used = sum(chunk.length for chunk in decodes)
        prefills = self._plan_prefills(self.limits.step_tokens - used)
        return StepPlan((*plain, *guessed, *prefills), len(plain), tuple(expired))

    def advance(self, plan: StepPlan, sampled: Mapping[str, Sequence[int]]) -> list[Request]:
        """Record that a step was computed.

        Args:
            plan: The step.
            sampled: Request id -> the tokens drawn, for the chunks that sample: the next one, and
                one more for each guess that was right.

        Returns:
            The requests that got tokens. Those that ended meanwhile are left alone.
        """
        grown = []
        for chunk in plan.chunks:
            request = chunk.request
            if request.is_finished:
                continue
            request.num_computed += chunk.length - len(chunk.guesses)
            if chunk.samples:
                drawn = sampled[request.request_id]
                request.tokens += drawn
                request.num_computed += len(drawn) - 1
                self._tell(chunk, len(drawn) - 1)
                grown.append(request)
            self._name_full_blocks(request)
        return grown

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request and free its blocks; ending it again changes nothing."""
        if request.is_finished:
            return
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
            self._release(request)
        else:
            self._waiting.remove(request)
        del self._by_id[request.request_id]
        request.state, request.finish_reason = RequestState.FINISHED, reason
        self.finished[reason] += 1

    def check_integrity(self) -> None:
        """Prove that every block has its owner and every request its place.

        Raises:
            PoolIntegrityError: Something was lost or doubled.
        """
        self.pool.check_integrity([request.block_table for request in self._running])
        for request in self._waiting:
            if request.block_table or request.num_computed:
                raise PoolIntegrityError(f"waiting request {request.request_id} holds blocks")
        if len(self._by_id) != len(self._running) + len(self._waiting):
            raise PoolIntegrityError(
                f"{len(self._by_id)} requests are known, {len(self._running)} run and "
                f"{len(self._waiting)} wait"
            )

    def _displaced(self, requests: Sequence[Request], excess: int) -> list[Request] | None:
        """Who gives way to requests that are `excess` too many; None if nobody has to."""
        if excess <= 0:
            return []
        places = Counter(request.owner for request in self._by_id.values())
        owner = requests[0].owner
        largest = max(places, key=lambda other: places[other])
        if places[largest] - excess < places[owner] + len(requests):
            return None
        youngest = [
            request for request in reversed(self._waiting)
            if request.owner == largest and not request.num_preemptions
        ]  # fmt: skip
        return youngest[:excess] if len(youngest) >= excess else None

    def _plan_decodes(self) -> list[Chunk]:
        chunks = []
        for request in list(self._running):
            if request.state is not RequestState.RUNNING or request.num_uncomputed != 1:
                continue
            if self._make_room(request):
                chunks.append(Chunk.of(request, 1))
        return chunks

    def _with_guesses(self, decodes: list[Chunk]) -> list[Chunk]:
        """The chunks, with guesses as long as there are few: many rows cost what they compute."""
        room = min(_MAX_ROWS, self.limits.step_tokens) - len(decodes)
        if not self._guessed_tokens or room <= 0:
            return decodes
        found = []
        for chunk in decodes:
            guesses = self._guesses(chunk.request, min(room, self._guessed_tokens))
            room -= len(guesses)
            found.append(replace(chunk, length=1 + len(guesses), guesses=guesses))
        return found

    def _guesses(self, request: Request, most: int) -> tuple[int, ...]:
        # What is drawn last is not guessed: nobody needs what comes after it.
        most = min(most, request.max_tokens - request.num_output - 1)
        if most <= 0 or request.params.has_penalties:
            return ()
        if request.lookup is None:
            request.lookup = PromptLookup(self._guessed_tokens)
        guesses = request.lookup.guess(request.tokens, most)
        needed = self.pool.blocks_for(request.num_computed + 1 + len(guesses))
        lacking = needed - len(request.block_table)
        if lacking > 0:
            is_spare = self.pool.num_free - lacking >= len(self._running)
            blocks = self.pool.allocate(lacking) if is_spare else None
            if blocks is None:
                return ()
            request.block_table += blocks
        return guesses

    def _tell(self, chunk: Chunk, num_taken: int) -> None:
        request = chunk.request
        if chunk.guesses and request.lookup is not None:
            self.num_guessed_tokens += len(chunk.guesses)
            self.num_taken_tokens += num_taken
            request.lookup.tell(len(chunk.guesses), num_taken, len(request.tokens))

    def _make_room(self, request: Request) -> bool:
        """Give a decoding request a slot for its token; False if it had to be preempted itself."""
        while len(request.block_table) < self.pool.blocks_for(request.num_computed + 1):
            blocks = self.pool.allocate(1)
            if blocks is not None:
                request.block_table += blocks
                continue
            # The youngest is at the end: never one that this step already counts on.
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _plan_prefills(self, budget: int) -> list[Chunk]:
        share = max(1, budget // 2)
        takes: dict[Request, int] = {}
        candidates = iter([request for request in self._running if request.num_uncomputed > 1])
        while budget:
            request = next(candidates, None) or self._admit_next()
            if request is None:
                break
            takes[request] = min(request.num_uncomputed, share, budget)
            budget -= takes[request]
        for request, take in takes.items():
            takes[request] += min(budget, request.num_uncomputed - take)
            budget -= takes[request] - take
        return [Chunk.of(request, take) for request, take in takes.items()]

    def _admit_next(self) -> Request | None:
        """Seat who is next, if a seat and blocks for all of its tokens are free."""
        if not self._waiting or len(self._running) >= self.limits.max_running:
            return None
        seats = Counter(request.owner for request in self._running)
        # Of several first ones `min` takes the first, and they are in order of arrival.
        request = min(self._waiting, key=lambda waiting: seats[waiting.owner])
        found = self._match(request)
        needed = self.pool.blocks_for(len(request.tokens)) - len(found)
        # One more block for each request that runs, or the newcomer would be preempted at once: so
        # nor does whoever was preempted in this very step come back in it.
        has_room = needed + len(self._running) <= self.pool.num_free
        blocks = self.pool.allocate(needed) if has_room else None
        if blocks is None:
            self.pool.release(found)
            return None
        self._waiting.remove(request)
        request.block_table, request.state = found + blocks, RequestState.RUNNING
        request.num_computed = len(found) * self.pool.block_tokens
        request.num_named = len(found)
        if not request.num_preemptions:  # else it may be its own
            request.num_reused = request.num_computed
        self.num_reused_tokens += request.num_computed
        bisect.insort(self._running, request, key=_by_arrival)
        return request

    def _match(self, request: Request) -> list[int]:
        """Take the kept blocks that a waiting request begins with."""
        if not self.pool.keeps_prefixes:
            return []
        size, tokens = self.pool.block_tokens, request.tokens
        request.block_names = block_names(tokens, size, request.block_names)
        return self.pool.match(request.block_names[: (len(tokens) - 1) // size])

    def _name_full_blocks(self, request: Request) -> None:
        if not self.pool.keeps_prefixes:
            return
        size, before = self.pool.block_tokens, len(request.block_names)
        # A block is full when its last token is computed.
        full = request.num_computed // size
        if full > before:
            computed = request.tokens[: request.num_computed]
            request.block_names = block_names(computed, size, request.block_names)
        for number in range(request.num_named, full):
            self.pool.keep(request.block_table[number], request.block_names[number])
        request.num_named = max(request.num_named, full)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self._waiting, request, key=_by_arrival)

    def _release(self, request: Request) -> None:
        self.pool.release(request.block_table)
        request.block_table, request.num_computed, request.num_named = [], 0, 0


def _by_arrival(request: Request) -> int:
    return request.order
