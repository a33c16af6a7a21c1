"""What a request may ask of one engine: checked when it is submitted, whatever protocol it uses.

A request that passes can finish alone in the pool, so it is never queued for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from eagleray.serve.engine.refusals import InvalidRequestError
from eagleray.serve.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class RequestLimits:
    """Sizes that follow from the model and the configuration.

    Attributes:
        vocab_size: Token ids are below it.
        context_tokens: Longest prompt and output together.
        pool_tokens: Slots of the whole KV pool.
        max_new_tokens: Largest `max_tokens`.
    """

    vocab_size: int
    context_tokens: int
    pool_tokens: int
    max_new_tokens: int

    def check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """The number of tokens that may be generated for a prompt.

        Raises:
            InvalidRequestError: The prompt is empty, too long or has unknown tokens, or
                `max_tokens` is beyond a limit.
        """
        if not prompt:
            raise InvalidRequestError(
                "the prompt has no tokens; at least 1 is needed", "send some text", "prompt"
            )
        room = min(self.context_tokens, self.pool_tokens) - len(prompt)
        if room < 1:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} tokens; it and at least 1 to generate must fit into "
                f"the context of {self.context_tokens} and the KV pool of {self.pool_tokens}",
                "shorten the prompt",
                "prompt",
            )
        for token in prompt:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequestError(
                    f"token id {token} is outside the vocabulary [0, {self.vocab_size})",
                    "send ids of this model's tokenizer",
                    "prompt",
                )
        if params.max_tokens is None:
            return min(room, self.max_new_tokens)
        if params.max_tokens > self.max_new_tokens:
            raise InvalidRequestError(
                f"max_tokens {params.max_tokens} is above this server's limit "
                f"{self.max_new_tokens}",
                f"ask for at most {self.max_new_tokens}",
                "max_tokens",
            )
        if params.max_tokens > room:
            raise InvalidRequestError(
                f"the prompt's {len(prompt)} tokens and max_tokens {params.max_tokens} exceed the "
                f"context of {self.context_tokens} or the KV pool of {self.pool_tokens}",
                f"ask for at most {room}, or shorten the prompt",
                "max_tokens",
            )
        return params.max_tokens
