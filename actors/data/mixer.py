"""Weights that follow the losses of the domains, decided during the run and replayed exactly.

Steps are counted in intervals of U. When interval i has been trained, its losses decide the weights
of interval i + 2: one interval lies between, so that loaders may read ahead. Everything that
decisions follow from is in the state, so a resumed run goes on with the same ones, bit for bit.

Two policies (D = domains, L_d = mean loss of domain d in the interval, w_d = its weight):
    doremi: w_d <- w_d * exp(rate * max(0, L_d - reference_d)), normalized. The update of DoReMi
        (Xie et al. 2023, arXiv:2305.10429), on the model itself as in Sheared LLaMA (Xia et al.
        2024, arXiv:2310.06694).
    bandit: R_d <- decay * R_d + (1 - decay) * L_d; w_d = (1 - D e) softmax(e' R)_d + e, with e from
        sqrt(ln D / (D t)). Online Data Mixing (Albalak et al. 2023, arXiv:2312.02406); every
        domain's loss is known after an interval, so no importance weights are needed.
Both end with a floor: no domain gets less than `floor` of the samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from eagleray.actors.data.mixture import MAX_PERIOD, Mixture, quotas_of
from eagleray.platform.config import BanditMixtureConfig, DoremiMixtureConfig

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
OnlineConfig = DoremiMixtureConfig | BanditMixtureConfig

_UNITS_PER_NAT = 2**20
"""Losses are added as whole numbers: their sum is the same in any order, over any ranks."""


@dataclass(frozen=True)
class MixerSpec:
    """What a mixer is made of.

    Attributes:
        config: The policy.
        domains: Names, in the order of the dataset.
        sizes: Samples of each; the first two intervals are drawn in their ratio.
    """

    config: OnlineConfig
    domains: tuple[str, ...]
    sizes: tuple[int, ...]


class Mixer:
    """Decides weights. Every rank may hold one; only rank 0's decisions count.

    Args:
        spec: Policy and domains.
        batch_size: Samples per step.
    """

    def __init__(self, spec: MixerSpec, batch_size: int) -> None:
        self._config, self._domains, self.sizes = spec.config, spec.domains, spec.sizes
        self._per_interval = spec.config.every_steps * batch_size
        total = sum(spec.sizes)
        first = _floored([size / total for size in spec.sizes], spec.config.floor)
        self._weights = np.array(first)
        self._losses = np.full(len(first), np.nan)
        self._rewards = np.zeros(len(first))
        self._decisions = 0
        self._sums_2D = np.zeros((2, len(first)), dtype=np.int64)
        num_samples = 2 * self._per_interval
        start = Mixture.constant(_fractions(first))
        self.mixture = start.then(0, _fractions(first), num_samples).until(num_samples)

    @property
    def weights(self) -> dict[str, float]:
        """The weights that were decided last, by domain."""
        return dict(zip(self._domains, self._weights.tolist(), strict=True))

    @property
    def losses(self) -> dict[str, float | None]:
        """The losses that they follow from, in nats per token; None: nothing was drawn."""
        return {
            name: None if math.isnan(loss) else loss
            for name, loss in zip(self._domains, self._losses.tolist(), strict=True)
        }

    def add(self, domain_B: IntArray, loss_B: FloatArray, tokens: int) -> None:
        """Count one step's losses; see `sums_with`."""
        self._sums_2D = self.sums_with(domain_B, loss_B, tokens)

    def sums_with(self, domain_B: IntArray, loss_B: FloatArray, tokens: int) -> IntArray:
        """`sums` and one step's losses, which are not counted yet: `set_sums` does.

        Args:
            domain_B: Domain of each sample.
            loss_B: Mean loss of each sample, in nats per token.
            tokens: Tokens of each sample.
        """
        sums_2D = self._sums_2D.copy()
        units_B = np.rint(loss_B * (tokens * _UNITS_PER_NAT)).astype(np.int64)
        np.add.at(sums_2D[0], domain_B, units_B)
        np.add.at(sums_2D[1], domain_B, tokens)
        return sums_2D

    def decisions_due(self, done: int) -> int:
        """How often it must have decided when all is done that is due after `done` steps."""
        return done // self._config.every_steps

    def is_due(self, done: int) -> bool:
        """Whether an interval ends with `done` steps."""
        return done % self._config.every_steps == 0

    @property
    def decisions(self) -> int:
        """Intervals whose losses have decided."""
        return self._decisions

    def sums(self) -> IntArray:
        """Loss and tokens of each domain since the interval began, int64 [2, D].

        To be added over all ranks for a decision, and for a state that is to be kept.
        """
        return self._sums_2D.copy()

    def set_sums(self, sums: IntArray) -> None:
        """Take over what another process has counted since the interval began."""
        self._sums_2D = sums.copy()

    def decision(self, sums: IntArray) -> FloatArray:
        """Choose the weights of the interval after the next; nothing changes before `apply`.

        Args:
            sums: Of all ranks, int64 [2, D].

        Returns:
            float64 [4, D] for all ranks: weights, rewards, losses (NaN: nothing was drawn), and
            the weights in whole samples of a period.
        """
        loss_D, tokens_D = sums[0] / _UNITS_PER_NAT, sums[1]
        # A domain that the interval did not draw from keeps what is known of it.
        seen_D = tokens_D > 0
        mean_D = np.divide(loss_D, tokens_D, out=np.zeros_like(loss_D), where=seen_D)
        rewards_D = self._rewards
        if isinstance(self._config, DoremiMixtureConfig):
            weights_D = self._doremi(mean_D, seen_D, self._config)
        else:
            weights_D, rewards_D = self._bandit(mean_D, seen_D, self._config)
        weights = _floored(weights_D.tolist(), self._config.floor)
        quotas = quotas_of(_fractions(weights), min(self._per_interval, MAX_PERIOD))
        losses_D = np.where(seen_D, mean_D, np.nan)
        return np.array([weights, rewards_D, losses_D, quotas], dtype=np.float64)

    def apply(self, decision: FloatArray) -> None:
        """Extend the mixture by the interval that rank 0 decided; every rank does."""
        self._weights, self._rewards, self._losses = (row.copy() for row in decision[:3])
        self._decisions += 1
        self._sums_2D = np.zeros_like(self._sums_2D)
        first = self._next_first()
        quotas = [Fraction(int(quota)) for quota in decision[3]]
        extended = self.mixture.then(first, quotas, self._per_interval)
        # A segment counts what came before it, so that what is behind the loaders can go.
        kept = extended.since(max(0, first - 2 * self._per_interval))
        self.mixture = kept.until(first + self._per_interval)

    def state(self, sums: IntArray) -> dict[str, Any]:
        """Plain values; floats keep all their bits in JSON.

        Args:
            sums: Of all ranks.
        """
        return {
            "mixture": self.mixture.state(),
            "weights": self._weights.tolist(),
            "rewards": self._rewards.tolist(),
            "losses": [None if math.isnan(loss) else loss for loss in self._losses.tolist()],
            "decisions": self._decisions,
            "sums": sums.tolist(),
        }

    def load_state(self, state: Mapping[str, Any], *, is_first: bool) -> None:
        """Go on from a state of rank 0; the sums in it belong to the first rank alone."""
        self.mixture = Mixture.from_state(state["mixture"])
        self._weights = np.array(state["weights"])
        self._rewards = np.array(state["rewards"])
        # Earlier versions did not keep them.
        losses = state.get("losses") or [None] * len(self._losses)
        self._losses = np.array([math.nan if loss is None else loss for loss in losses])
        self._decisions = int(state["decisions"])
        sums = np.array(state["sums"], dtype=np.int64)
        self._sums_2D = sums if is_first else np.zeros_like(sums)

    def _next_first(self) -> int:
        assert self.mixture.end is not None, "an online mixture is never decided to the end"
        return self.mixture.end

    def _doremi(
        self, mean_D: FloatArray, seen_D: npt.NDArray[np.bool_], config: DoremiMixtureConfig
    ) -> FloatArray:
        reference_D = np.array([config.reference.get(name, 0.0) for name in self._domains])
        excess_D = np.where(seen_D, np.maximum(mean_D - reference_D, 0.0), 0.0)
        # Without a floor a weight may become zero, and its logarithm no number.
        least = np.finfo(np.float64).tiny
        exponents = np.log(np.maximum(self._weights, least)) + config.rate * excess_D
        # The largest exponent is taken off first, so that none overflows.
        grown: FloatArray = np.exp(exponents - exponents.max())
        return _normalized(grown)

    def _bandit(
        self, mean_D: FloatArray, seen_D: npt.NDArray[np.bool_], config: BanditMixtureConfig
    ) -> tuple[FloatArray, FloatArray]:
        num_domains, turn = len(mean_D), self._decisions + 1
        blended = config.decay * self._rewards + (1 - config.decay) * mean_D
        rewards_D = np.where(seen_D, mean_D if turn == 1 else blended, self._rewards)

        def explored(decisions: int) -> float:
            return min(
                1 / num_domains, math.sqrt(math.log(num_domains) / (num_domains * decisions))
            )

        before, now = explored(max(1, turn - 1)), explored(turn)
        exponents = before * rewards_D / config.temperature
        soft: FloatArray = np.exp(exponents - exponents.max())
        mixed: FloatArray = (1 - num_domains * now) * _normalized(soft) + now
        return mixed, rewards_D


def _normalized(values: FloatArray) -> FloatArray:
    shares: FloatArray = values / values.sum()
    return shares


def _floored(weights: Sequence[float], floor: float) -> list[float]:
    """The weights, mixed with equal ones so that none is below the floor."""
    return [(1 - len(weights) * floor) * weight + floor for weight in weights]


def _fractions(weights: Sequence[float]) -> list[Fraction]:
    return [Fraction(weight) for weight in weights]
