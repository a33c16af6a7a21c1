"""The gate: whether a model is good enough to be promoted, decided from recorded figures alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from eagleray.platform.config import EvalConfig

LOSS = "eval_loss"


@dataclass(frozen=True)
class Verdict:
    """What the gate says and why; `reasons` holds one sentence per rule that failed."""

    passed: bool
    reasons: tuple[str, ...] = ()


def judge(
    candidate: Mapping[str, float], incumbent: Mapping[str, float] | None, rules: EvalConfig
) -> Verdict:
    """Hold a candidate's figures against the limits and against the model it would replace.

    Two models are compared only if both were evaluated on the same held-out data; their figures
    then carry the same `eval_data`.

    Args:
        candidate: Figures of the model's record; `eval_loss` in nats per token.
        incumbent: Figures of the model that the alias names now; None if it names none.
        rules: Limits of the project.
    """
    loss = candidate.get(LOSS)
    if loss is None or not math.isfinite(loss):
        reason = f"it has no finite {LOSS}: imported models have none, serve them by name@version"
        return Verdict(False, (reason,))
    reasons = []
    if rules.max_loss is not None and loss > rules.max_loss:
        reasons.append(f"{LOSS} {loss:.4f} is above eval.max_loss {rules.max_loss:.4f}")
    if incumbent is not None and LOSS in incumbent and _comparable(candidate, incumbent):
        limit = incumbent[LOSS] * (1 + rules.tolerance)
        if loss > limit:
            reasons.append(
                f"{LOSS} {loss:.4f} is above {limit:.4f}, the promoted model's "
                f"{incumbent[LOSS]:.4f} with eval.tolerance {rules.tolerance:g}"
            )
    return Verdict(not reasons, tuple(reasons))


def _comparable(candidate: Mapping[str, float], incumbent: Mapping[str, float]) -> bool:
    return candidate.get("eval_data") == incumbent.get("eval_data")
