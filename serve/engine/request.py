"""One request inside the engine, and the states it goes through.

    WAITING --admit--> RUNNING --finish--> FINISHED {stop, length, cancelled, deadline, error}
       ^                  |
       `----- preempt ----'     (WAITING --finish--> FINISHED as well: cancel, deadline, displaced)

A preempted request keeps its tokens and loses its KV blocks; admitted again, it computes them anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from eagleray.serve.engine.guesses import PromptLookup
from eagleray.serve.engine.sampling_params import SamplingParams


class RequestState(StrEnum):
    """Where a request is; only FINISHED is terminal."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """The model's end token or a stop string."""
    LENGTH = "length"
    """max_tokens or the end of the context."""
    CANCELLED = "cancelled"
    """The client went away or asked for it."""
    DEADLINE = "deadline"
    """Its time was up."""
    DISPLACED = "displaced"
    """It waited, and its owner had more places than another one that came."""
    ERROR = "error"
    """The step that computed it failed."""


@dataclass(eq=False)
class Request:
    """The tokens of one completion and how far they are computed.

    Owned by the scheduler: its methods alone change the state. `tokens` is the prompt followed by
    what was generated; the first `num_computed` of them have keys and values in `block_table`.

    Attributes:
        request_id: Unique in the engine.
        tokens: Prompt, then output.
        num_prompt: How many of them are the prompt.
        params: Sampling and stopping rules.
        max_tokens: Most tokens to generate; prompt and these fit into context and pool.
        seed: Seeds this completion's samples.
        deadline_s: Clock reading after which it is given up.
        owner: Whose it is; owners share seats and places evenly.
        order: Place in the order of arrival; set by the scheduler.
    """

    request_id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    max_tokens: int
    seed: int
    deadline_s: float
    owner: str = ""
    order: int = -1
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    num_computed: int = 0
    num_preemptions: int = 0
    num_reused: int = 0
    """Tokens that were not computed for it, as an earlier request begins alike."""
    block_table: list[int] = field(default_factory=list)
    block_names: list[bytes] = field(default_factory=list)
    """Of its full blocks, as far as they were needed."""
    lookup: PromptLookup | None = None
    """Guesses for it, once it decodes; None if nothing is guessed."""
    num_named: int = 0
    """Blocks of the table that the pool has been told the names of."""

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> Sequence[int]:
        """The tokens generated so far (a copy)."""
        return self.tokens[self.num_prompt :]

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are still to be computed; 1 when decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def is_finished(self) -> bool:
        """It will not change any more."""
        return self.state is RequestState.FINISHED
