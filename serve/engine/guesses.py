"""Guesses of a request's next tokens, from what it has said before: prompt lookup decoding.

(Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; the checking is speculative decoding,
Leviathan et al. 2023, arXiv:2211.17192.) Where the newest tokens have occurred before, what then
followed is guessed to follow again. A step computes the guesses beside the newest token, and as
many are taken as are what would have been drawn: the output stays the same, in fewer steps.
"""

from collections.abc import Sequence

_RUN = 3
"""Tokens that must have occurred before."""
_PATIENCE = 3
"""Guesses in a row of which nothing was taken before a pause."""
_PAUSE = 32
"""Tokens that are drawn without guessing then."""


class PromptLookup:
    """Guesses for one request.

    Args:
        most: Longest guess.
    """

    def __init__(self, most: int) -> None:
        self._most = self._length = most
        self._follows: dict[tuple[int, ...], int] = {}
        self._num_seen = _RUN
        self._num_missed = 0
        self._silent_until = 0

    def guess(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow; `tokens` only grow from call to call."""
        for end in range(self._num_seen, len(tokens)):
            self._follows[tuple(tokens[end - _RUN : end])] = end
        self._num_seen = max(self._num_seen, len(tokens))
        if len(tokens) < max(_RUN, self._silent_until):
            return ()
        place = self._follows.get(tuple(tokens[-_RUN:]))
        if place is None:
            return ()
        guess: list[int] = []
        for at in range(place, place + min(most, self._length)):
            # What goes round in a circle goes on behind its end.
            guess.append(tokens[at] if at < len(tokens) else guess[at - len(tokens)])
        return tuple(guess)

    def tell(self, num_guessed: int, num_taken: int, num_tokens: int) -> None:
        """Say how many of a guess were taken, and how many tokens there are now."""
        if num_taken == num_guessed:
            self._length = min(self._most, 2 * self._length)
        elif not num_taken:
            self._length = max(1, self._length // 2)
        self._num_missed = 0 if num_taken else self._num_missed + 1
        if self._num_missed >= _PATIENCE:
            self._num_missed, self._silent_until = 0, num_tokens + _PAUSE
