"""How the next token is chosen and when to stop: validated once, for every protocol.

HTTP and gRPC both build a `SamplingParams`; whatever passes here, the engine can run.
"""

import math
from dataclasses import dataclass
from typing import Any

from eagleray.serve.engine.refusals import InvalidRequestError

MAX_CHOICES = 8
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
_MAX_TOP_K = 1_000_000
_SEEDS = 1 << 64


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping rules of one request.

    Attributes:
        max_tokens: Most tokens to generate; None: as many as the limits of the server allow.
        temperature: 0 chooses the likeliest token; 1 samples from the model's distribution.
        top_p: Sample among the likeliest tokens that together hold this mass (Holtzman et al.
            2020, arXiv:1904.09751).
        top_k: Sample among this many likeliest tokens; 0: all.
        min_p: Leave out tokens less likely than this share of the likeliest one
            (arXiv:2407.01082).
        presence_penalty: Subtracted from the logit of every token generated before.
        frequency_penalty: Subtracted once per time that a token was generated.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in the prompt
            or the output (Keskar et al. 2019, arXiv:1909.05858).
        seed: Equal seeds give equal samples; None: a fresh one.
        stop: Texts that end the output; none of them is ever part of it.
        n: Independent completions of each prompt.
        logprobs: How many likeliest tokens to report beside the chosen one; None: no logprobs.
        ignore_eos: Go on after the model's end token.

    Raises:
        InvalidRequestError: A value has the wrong type or breaks its bounds.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _whole("top_k", self.top_k, 0, _MAX_TOP_K)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, above_low=True)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        _whole("n", self.n, 1, MAX_CHOICES)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise _wrong("ignore_eos", self.ignore_eos, "true or false")
        self._check_stop()

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is always chosen."""
        # Below this the division by the temperature leaves only the maximum in float32.
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Earlier tokens change the logits."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def restricts(self) -> bool:
        """Sampling leaves out part of the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def _check_stop(self) -> None:
        if not isinstance(self.stop, tuple):
            raise _wrong("stop", self.stop, "a list of strings")
        if len(self.stop) > MAX_STOPS:
            raise _wrong("stop", f"{len(self.stop)} strings", f"at most {MAX_STOPS} strings")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise _wrong("stop", text, f"strings of 1 to {MAX_STOP_CHARACTERS} characters")


def seed_of_choice(seed: int, choice: int) -> int:
    """The seed of the i-th completion of a prompt: choice 0 keeps the request's own."""
    return (seed + choice * 0x9E3779B97F4A7C15) % _SEEDS


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(name, value, f"a whole number in [{low}, {high}]")


def _number(name: str, value: Any, low: float, high: float, *, above_low: bool = False) -> None:
    rule = f"a number in {'(' if above_low else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(name, value, rule)
    if not low <= value <= high or (above_low and value == low):
        raise _wrong(name, value, rule)


def _wrong(name: str, value: Any, rule: str) -> InvalidRequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidRequestError(f"{name} is {shown}; it must be {rule}", f"change {name}", name)
