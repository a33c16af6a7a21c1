"""The engine: one thread that owns the model and turns submitted prompts into streams of tokens.

Life of a request: `submit` checks it and queues it -> the scheduler seats it when a seat and KV
blocks are free -> each step computes a chunk of it beside everybody else's -> its tokens go to its
`TokenStream` as text -> it ends by the model's end token, a stop string, its token limit, its
deadline, `cancel`, or the failure of a step; its blocks are free from that moment.

Laws:
    * `submit`, `cancel`, `stats` and `drain` may be called from any thread and never wait for a
      step.
    * An exception inside a step ends that step's requests with an error and is logged; the engine
      goes on. After `_MAX_FAILED_STEPS` failures in a row it dies: `is_healthy` turns false, all
      requests end with an error, and whoever runs it replaces it.
"""

import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from eagleray.platform.errors import DeadlineExceededError
from eagleray.serve.engine.detokenizer import OutputPiece, OutputText, TokenBytes
from eagleray.serve.engine.limits import RequestLimits
from eagleray.serve.engine.model_runner import Runner, StepOutput
from eagleray.serve.engine.refusals import EngineStoppedError, InvalidRequestError
from eagleray.serve.engine.request import FinishReason, Request
from eagleray.serve.engine.sampled_token import SampledToken
from eagleray.serve.engine.sampling import sample
from eagleray.serve.engine.sampling_params import SamplingParams, seed_of_choice
from eagleray.serve.engine.scheduler import Scheduler, StepPlan
from eagleray.serve.engine.stream import Delta, StreamTiming, TokenStream

logger = logging.getLogger(__name__)

_MAX_FAILED_STEPS = 8
_IDLE_WAIT_S = 60.0
_JOIN_TIMEOUT_S = 30.0
# Weight of the newest request in the mean duration that Retry-After is derived from.
_DURATION_WEIGHT = 0.1
_MAX_RETRY_AFTER_S = 60.0


class Vocabulary(TokenBytes, Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def eos_ids(self) -> AbstractSet[int]:
        """Tokens that end the output."""
        ...


@dataclass(frozen=True)
class EngineStats:
    """A consistent snapshot of the engine's counters; the totals only grow."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_preemptions: int
    num_steps: int
    num_failed_steps: int
    num_computed_tokens: int
    num_reused_tokens: int
    num_guessed_tokens: int
    num_taken_tokens: int
    num_kept_blocks: int
    num_output_tokens: int
    finished: dict[FinishReason, int]


@dataclass
class _Open:
    request: Request
    stream: TokenStream
    text: OutputText


class Engine:
    """Continuous batching on a background thread.

    Args:
        runner: Computes steps; used by the engine's thread only.
        scheduler: Plans them; used under the engine's lock only.
        vocabulary: Decodes tokens and knows which ones end the output.
        limits: What a request may ask for.
        timeout_s: Longest life of a request.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        vocabulary: Vocabulary,
        limits: RequestLimits,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self._runner, self._scheduler, self._vocabulary = runner, scheduler, vocabulary
        self._timeout_s, self._clock = timeout_s, clock
        self._work = threading.Condition()
        self._open: dict[str, _Open] = {}
        self._is_accepting = True
        self._is_stopping = False
        self._is_checked = False
        self._num_steps = self._num_failed_steps = self._failed_in_row = 0
        self._num_computed = self._num_output = 0
        self._mean_duration_s = 1.0
        self._thread = threading.Thread(target=self._run, name="eagleray-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """The thread lives and takes requests."""
        return self._thread.is_alive() and self._is_accepting

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        timeout_s: float | None = None,
        owner: str = "",
    ) -> list[TokenStream]:
        """Queue prompts, all or none.

        Args:
            prompts: Token ids of each.
            params: Sampling rules of all of them.
            timeout_s: Deadline from now; never beyond the engine's own.
            owner: Whose they are; owners share seats and places evenly.

        Returns:
            `params.n` streams per prompt, prompt by prompt.

        Raises:
            InvalidRequestError: A prompt or a rule breaks a limit; nothing was queued.
            QueueFullError: There is no place for all of them.
            EngineStoppedError: The engine takes no more requests.
        """
        places = self._scheduler.limits.max_running + self._scheduler.limits.max_queued
        if len(prompts) * params.n > places:
            raise InvalidRequestError(
                f"{len(prompts)} prompts with n {params.n} are {len(prompts) * params.n} "
                f"completions; this server holds {places} in all",
                "send fewer at once",
                "n" if params.n > places else "prompt",
            )
        lengths = [self.limits.check(prompt, params) for prompt in prompts]
        now_s = self._clock()
        deadline_s = now_s + min(timeout_s or self._timeout_s, self._timeout_s)
        opened = []
        for prompt, max_tokens in zip(prompts, lengths, strict=True):
            seed = secrets.randbits(64) if params.seed is None else params.seed
            for choice in range(params.n):
                request = Request(
                    uuid.uuid4().hex,
                    list(prompt),
                    len(prompt),
                    params,
                    max_tokens,
                    seed_of_choice(seed, choice),
                    deadline_s,
                    owner,
                )
                timing = StreamTiming(len(prompt), now_s)
                stream = TokenStream(request.request_id, timing, self.cancel)
                text = OutputText(self._vocabulary, params.stop)
                opened.append(_Open(request, stream, text))
        with self._work:
            if not self.is_healthy:
                raise EngineStoppedError("the engine takes no more requests", "retry elsewhere")
            displaced = self._scheduler.submit(
                [entry.request for entry in opened], self._retry_after_s()
            )
            for request in displaced:
                self._close(request, FinishReason.DISPLACED)
            self._open.update((entry.request.request_id, entry) for entry in opened)
            self._work.notify_all()
        return [entry.stream for entry in opened]

    def cancel(self, request_id: str) -> None:
        """End a request wherever it is; an unknown or finished one is left alone."""
        with self._work:
            request = self._scheduler.cancel(request_id)
            if request is not None:
                self._close(request, FinishReason.CANCELLED)
                self._work.notify_all()

    def stats(self) -> EngineStats:
        """Counters of this moment."""
        with self._work:
            scheduler = self._scheduler
            return EngineStats(
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_blocks=scheduler.pool.num_blocks,
                num_free_blocks=scheduler.pool.num_free,
                num_preemptions=scheduler.num_preemptions,
                num_steps=self._num_steps,
                num_failed_steps=self._num_failed_steps,
                num_computed_tokens=self._num_computed,
                num_reused_tokens=scheduler.num_reused_tokens,
                num_guessed_tokens=scheduler.num_guessed_tokens,
                num_taken_tokens=scheduler.num_taken_tokens,
                num_kept_blocks=scheduler.pool.num_kept,
                num_output_tokens=self._num_output,
                finished=dict(scheduler.finished),
            )

    def check_integrity(self) -> None:
        """Prove that blocks and requests add up.

        Raises:
            PoolIntegrityError: They do not.
        """
        with self._work:
            self._scheduler.check_integrity()

    def drain(self, timeout_s: float) -> None:
        """Take no more requests and wait for those inside to end.

        Raises:
            DeadlineExceededError: Some are still running; they go on.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._work:
            self._is_accepting = False
            while self._open and self._thread.is_alive():
                if not self._work.wait(deadline_s - time.monotonic()):
                    raise DeadlineExceededError(
                        f"{len(self._open)} requests are still running after {timeout_s:g} s",
                        "wait longer, or shut down",
                    )

    def shutdown(self, timeout_s: float = _JOIN_TIMEOUT_S) -> None:
        """Stop after the current step; requests inside end with an error."""
        with self._work:
            self._is_accepting, self._is_stopping = False, True
            self._work.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._abandon("the server is shutting down")

    def _run(self) -> None:
        try:
            while self._await_work():
                self._step()
        except Exception:  # the thread must not die unseen: readers are waiting for it
            logger.exception("engine died")
            self._abandon("the engine died")

    def _await_work(self) -> bool:
        with self._work:
            while not self._is_stopping and not self._scheduler.has_work:
                if not self._is_checked:
                    self._scheduler.check_integrity()
                    self._is_checked = True
                self._work.wait(_IDLE_WAIT_S)
            self._is_checked = False
            return not self._is_stopping

    def _step(self) -> None:
        with self._work:
            plan = self._scheduler.plan(self._clock())
            for request in plan.expired:
                self._close(request, FinishReason.DEADLINE)
            now_s = self._clock()
            for chunk in plan.chunks:
                timing = self._open[chunk.request.request_id].stream.timing
                timing.started_s = timing.started_s or now_s
                timing.num_reused = min(chunk.request.num_reused, chunk.request.num_prompt)
        if not plan.chunks:
            return
        begun_s = self._clock()
        try:
            output = self._runner.run(plan)
            sampled = _drawn(output)
        except Exception as error:  # noqa: BLE001 whatever it meets, other requests must go on
            self._fail_step(plan, error)
            return
        with self._work:
            self._num_steps += 1
            self._failed_in_row = 0
            self._num_computed += plan.num_tokens
            self._charge(plan, self._clock() - begun_s)
            self._commit(plan, sampled)
            self._work.notify_all()

    def _charge(self, plan: StepPlan, seconds: float) -> None:
        for chunk in plan.chunks:
            opened = self._open.get(chunk.request.request_id)
            if opened is not None:
                opened.stream.timing.compute_s += seconds * chunk.length / plan.num_tokens

    def _commit(self, plan: StepPlan, sampled: dict[str, list[SampledToken]]) -> None:
        for chunk in plan.chunks:
            request = chunk.request
            if chunk.samples and not sampled[request.request_id]:
                self._end(request, FinishReason.ERROR, error="the model gave no finite logits")
        tokens = {
            request_id: [token.token_id for token in drawn]
            for request_id, drawn in sampled.items()
        }  # fmt: skip
        for request in self._scheduler.advance(plan, tokens):
            for token in sampled[request.request_id]:
                # One of several may be the last.
                if not request.is_finished:
                    self._extend(request, token)

    def _extend(self, request: Request, token: SampledToken) -> None:
        """Deliver a new token, and end the request if it was the last one."""
        opened = self._open[request.request_id]
        timing = opened.stream.timing
        timing.num_output += 1
        timing.first_token_s = timing.first_token_s or self._clock()
        self._num_output += 1
        params = request.params
        if token.token_id in self._vocabulary.eos_ids and not params.ignore_eos:
            self._end(request, FinishReason.STOP)
            return
        piece = opened.text.push(token.token_id, token.logprob)
        if opened.text.is_stopped:
            self._end(request, FinishReason.STOP, piece)
        elif timing.num_output >= request.max_tokens:
            self._end(request, FinishReason.LENGTH, piece)
        elif piece.text or piece.logprobs:
            opened.stream.put(Delta(piece.text, piece.logprobs))

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        piece: OutputPiece | None = None,
        error: str = "",
    ) -> None:
        self._scheduler.finish(request, reason)
        self._close(request, reason, piece, error)

    def _close(
        self,
        request: Request,
        reason: FinishReason,
        piece: OutputPiece | None = None,
        error: str = "",
    ) -> None:
        """Give the reader the rest and the reason of a request that will not go on."""
        opened = self._open.pop(request.request_id, None)
        if opened is None:
            return
        timing = opened.stream.timing
        timing.finished_s = self._clock()
        duration_s = timing.finished_s - timing.submitted_s
        self._mean_duration_s += _DURATION_WEIGHT * (duration_s - self._mean_duration_s)
        rest = opened.text.flush()
        text = (piece.text if piece else "") + rest.text
        logprobs = (piece.logprobs if piece else ()) + rest.logprobs
        opened.stream.put(Delta(text, logprobs, reason, error))

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        logger.error(
            "step failed requests=%d tokens=%d",
            len(plan.chunks),
            plan.num_tokens,
            exc_info=error,
        )
        with self._work:
            self._num_steps += 1
            self._num_failed_steps += 1
            self._failed_in_row += 1
            for chunk in plan.chunks:
                self._end(chunk.request, FinishReason.ERROR, error=type(error).__name__)
            self._work.notify_all()
        if self._failed_in_row >= _MAX_FAILED_STEPS:
            raise EngineStoppedError(f"{self._failed_in_row} steps in a row failed") from error

    def _abandon(self, error: str) -> None:
        with self._work:
            self._is_accepting = False
            for opened in list(self._open.values()):
                # Not through the scheduler: it may be what broke.
                self._close(opened.request, FinishReason.ERROR, error=error)
            self._work.notify_all()

    def _retry_after_s(self) -> float:
        """Mean time until a place is free: a request's duration over the seats."""
        seconds = self._mean_duration_s / self._scheduler.limits.max_running
        return float(min(_MAX_RETRY_AFTER_S, max(1.0, round(seconds))))


def _drawn(output: StepOutput) -> dict[str, list[SampledToken]]:
    """Request id -> its next tokens: one, and one more for each guess that is what was drawn.

    They end before logits that are not finite.
    """
    rows = [(chunk, ahead) for chunk in output.sampling for ahead in range(chunk.num_rows)]
    requests = [chunk.request for chunk, _ in rows]
    drawn = iter(sample(output.logits_NV, requests, output.likeliest, [ahead for _, ahead in rows]))
    found = {}
    for chunk in output.sampling:
        tokens = [next(drawn) for _ in range(chunk.num_rows)]
        taken: list[SampledToken] = []
        for token, guess in zip(tokens, (*chunk.guesses, None), strict=True):
            if token is None:
                break
            taken.append(token)
            if token.token_id != guess:
                break
        found[chunk.request.request_id] = taken
    return found
