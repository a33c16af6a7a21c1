"""Drawing the next tokens of a step from its logits.

N requests that sample, V vocabulary, R those of them that draw at random.

Laws:
    * Stateless: the random number of a draw is a hash of the request's seed and the position in its
      output. A seed gives the same text alone, in a batch, after a preemption and on any replica,
      as far as the logits are the same.
    * A row's draw depends on that row alone.
    * Order of the rules: penalties, temperature, top-k, top-p, min-p. Tokens that tie with the last
      one that top-k or top-p keeps are kept as well.
Log-probabilities are those of the model, before penalties and temperature.
"""

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from eagleray.serve.engine.request import Request
from eagleray.serve.engine.sampled_token import SampledToken, TokenLogprob

# Most of the mass is nearly always in this many tokens; sorting all of 49,152 costs ten times more.
_TOP_P_CANDIDATES = 512


@torch.inference_mode()
def sample(
    logits_NV: Tensor,
    requests: Sequence[Request],
    likeliest: list[int] | None = None,
    ahead: Sequence[int] | None = None,
) -> list[SampledToken | None]:
    """Draw one token per row.

    Args:
        logits_NV: Of the model.
        requests: Of the rows.
        likeliest: The token of each row's largest logit, -1 where they are not finite, if known.
        ahead: How many tokens after its request's next one each row draws; by default none. Rows of
            requests with penalties draw the next one.

    Returns:
        In the order of the rows; None where the logits are not finite: the model has no answer.
    """
    adjusted_NV = _penalized(logits_NV, requests)
    if likeliest is not None:
        is_finite = [token >= 0 for token in likeliest]
    else:
        is_finite = logits_NV.sum(-1).isfinite().tolist()
    # Penalties may make another one the likeliest.
    is_known = likeliest is not None and adjusted_NV is logits_NV
    tokens = list(likeliest or ()) if is_known else adjusted_NV.argmax(-1).tolist()
    random_rows = [
        row for row, request in enumerate(requests)
        if is_finite[row] and not request.params.is_greedy
    ]  # fmt: skip
    if random_rows:
        positions = [requests[row].num_output + (ahead[row] if ahead else 0) for row in random_rows]
        drawn = _draw(adjusted_NV[random_rows], [requests[row] for row in random_rows], positions)
        for row, token in zip(random_rows, drawn, strict=True):
            tokens[row] = token
    return [
        SampledToken(token, _logprob(logits_NV[row], token, request)) if is_finite[row] else None
        for row, (token, request) in enumerate(zip(tokens, requests, strict=True))
    ]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a pure function of its arguments."""
    packed = struct.pack("<Qq", seed % 2**64, position)
    # 32 bits: times any float64 below 2**20 it stays strictly below that value.
    return int.from_bytes(hashlib.blake2b(packed, digest_size=4).digest(), "little") / 2**32


def _penalized(logits_NV: Tensor, requests: Sequence[Request]) -> Tensor:
    if not any(request.params.has_penalties for request in requests):
        return logits_NV
    logits_NV = logits_NV.clone()
    for row_V, request in zip(logits_NV, requests, strict=True):
        params = request.params
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(request.tokens)), device=row_V.device)
            values = row_V[seen]
            factor = params.repetition_penalty
            row_V[seen] = torch.where(values > 0, values / factor, values * factor)
        if request.num_output and (params.presence_penalty or params.frequency_penalty):
            output = torch.tensor(request.output, device=row_V.device)
            used, counts = torch.unique(output, return_counts=True)
            row_V[used] -= params.presence_penalty + params.frequency_penalty * counts
    return logits_NV


def _draw(logits_RV: Tensor, requests: Sequence[Request], positions: Sequence[int]) -> list[int]:
    temperatures = [[request.params.temperature] for request in requests]
    logits_RV = logits_RV / torch.tensor(temperatures, device=logits_RV.device)
    # float64: a cumulative sum over 50,000 float32 values misses 1 by more than rare tokens weigh.
    probs_RV = logits_RV.double().softmax(-1)
    restricted = [row for row, request in enumerate(requests) if request.params.restricts]
    if restricted:
        probs_RV[restricted] = _restricted(
            probs_RV[restricted], [requests[row] for row in restricted]
        )
    cumulative_RV = probs_RV.cumsum(-1)
    uniforms = [
        [uniform(request.seed, position)]
        for request, position in zip(requests, positions, strict=True)
    ]
    points_R1 = torch.tensor(uniforms, dtype=torch.float64, device=logits_RV.device)
    points_R1 *= cumulative_RV[:, -1:]
    # right=True: the first token whose cumulative mass exceeds the point, so never one of mass 0.
    tokens: list[int] = torch.searchsorted(cumulative_RV, points_R1, right=True)[:, 0].tolist()
    return tokens


def _restricted(probs_RV: Tensor, requests: Sequence[Request]) -> Tensor:
    vocabulary = probs_RV.shape[1]
    top_k = [min(request.params.top_k or vocabulary, vocabulary) for request in requests]
    if min(top_k) < vocabulary:
        largest = max(k for k in top_k if k < vocabulary)
        sorted_RK = probs_RV.topk(largest).values
        floors = [
            float(sorted_RK[row, k - 1]) if k < vocabulary else 0.0 for row, k in enumerate(top_k)
        ]
        probs_RV = _above(probs_RV, floors)
    if any(request.params.top_p < 1.0 for request in requests):
        probs_RV = _above(probs_RV, _top_p_floors(probs_RV, requests))
    if any(request.params.min_p for request in requests):
        likeliest = probs_RV.max(-1).values.tolist()
        floors = [
            request.params.min_p * p for request, p in zip(requests, likeliest, strict=True)
        ]  # fmt: skip
        probs_RV = _above(probs_RV, floors)
    return probs_RV


def _top_p_floors(probs_RV: Tensor, requests: Sequence[Request]) -> list[float]:
    """The least probability that each row keeps: of the token that completes the mass top_p."""
    top_p = [request.params.top_p for request in requests]
    # A row without top-p asks for no mass here, or it alone would make all rows be sorted.
    share_R1 = torch.tensor(
        [[share if share < 1.0 else 0.0] for share in top_p],
        dtype=torch.float64,
        device=probs_RV.device,
    )
    mass_R1 = share_R1 * probs_RV.sum(-1, keepdim=True)
    sorted_RK = probs_RV.topk(min(_TOP_P_CANDIDATES, probs_RV.shape[1])).values
    if bool((sorted_RK.sum(-1, keepdim=True) < mass_R1).any()):
        sorted_RK = probs_RV.sort(-1, descending=True).values
    before_RK = sorted_RK.cumsum(-1) - sorted_RK
    last_R1 = ((before_RK < mass_R1).sum(-1, keepdim=True) - 1).clamp_min(0)
    floors_R1 = sorted_RK.gather(-1, last_R1).masked_fill(share_R1 == 0.0, 0.0)
    floors: list[float] = floors_R1[:, 0].tolist()
    return floors


def _above(probs_RV: Tensor, floors: list[float]) -> Tensor:
    floors_R1 = torch.tensor(floors, dtype=probs_RV.dtype, device=probs_RV.device)[:, None]
    return probs_RV.masked_fill(probs_RV < floors_R1, 0.0)


def _logprob(logits_V: Tensor, token: int, request: Request) -> TokenLogprob | None:
    count = request.params.logprobs
    if count is None:
        return None
    logprobs_V = logits_V.log_softmax(-1)
    values, ids = logprobs_V.topk(min(count, logprobs_V.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs_V[token]), top)
