"""What a draw gives: the token, and its log-probabilities if they were asked for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of the chosen token and of the likeliest ones, as (token id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SampledToken:
    """A drawn token; `logprob` only if the request asked for it."""

    token_id: int
    logprob: TokenLogprob | None
