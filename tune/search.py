"""Bayesian search over a sweep's history with Optuna's Gaussian-process sampler.

Ray's own OptunaSearch tells a trial that early stopping ended at a low rung as complete with that
rung's value, so the model learns to prefer what was stopped early. Here the study is rebuilt from
the history at each suggestion: the model sees the values of one rung only, the highest that enough
trials reached (as BOHB does: Falkner et al. 2018, arXiv:1807.01774); running trials are pending
points; diverged and failed ones count as the worst value seen.
"""

import math
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from scipy.stats import qmc

from eagleray.platform.config import ChoiceSpace, FloatSpace, IntSpace, Space
from eagleray.tune.history import SweepHistory, Trial, TrialStatus
from eagleray.tune.pruning import value_at

_BAD = (TrialStatus.DIVERGED, TrialStatus.FAILED)
_SEEDS = 2**32  # NumPy's legacy generator, which Optuna seeds, takes no more


class GpSearch:
    """Suggests parameters; the same history and seed give the same suggestion.

    Args:
        space: Dotted path -> values.
        startup_trials: Quasi-random suggestions before the model is asked.
        seed: Seeds the start-up points and the sampler.
        levels: Steps at which values may be compared: the rungs and the full length.
        first: Values of the project's file; tried first where they lie in the space.
    """

    def __init__(
        self,
        space: dict[str, Space],
        startup_trials: int,
        seed: int,
        levels: list[int],
        first: dict[str, Any] | None = None,
    ) -> None:
        self._distributions = {path: distribution(values) for path, values in space.items()}
        self._startup_trials, self._seed, self._levels = startup_trials, seed, levels
        self._first = {
            path: value
            for path, value in (first or {}).items()
            if path in self._distributions and _contains(self._distributions[path], value)
        }

    def suggest(self, history: SweepHistory) -> dict[str, Any]:
        """Parameters of the next trial."""
        number = len(history.trials)
        if number == 0 and len(self._first) == len(self._distributions):
            return dict(self._first)
        if number < self._startup_trials:
            return self._quasi_random(number)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.GPSampler(seed=(self._seed + number) % _SEEDS, n_startup_trials=0)
        study = optuna.create_study(sampler=sampler)
        self._tell(study, history)
        return dict(study.ask(self._distributions).params)

    def _quasi_random(self, number: int) -> dict[str, Any]:
        """A point of the scrambled Sobol sequence, which fills the space evenly at any length."""
        sequence = qmc.Sobol(len(self._distributions), scramble=True, rng=self._seed)
        if number:
            sequence.fast_forward(number)
        shares = sequence.random(1)[0]
        return {
            path: _at(dist, float(share))
            for (path, dist), share in zip(self._distributions.items(), shares, strict=True)
        }

    def _tell(self, study: optuna.Study, history: SweepHistory) -> None:
        level = self._modelled_level(history)
        known = {t.number: value_at(t, level) for t in history.trials if t.status not in _BAD}
        values = [value for value in known.values() if value is not None]
        worst = max(values, default=0.0)
        for trial in history.trials:
            value = worst if trial.status in _BAD else known[trial.number]
            if value is not None:
                study.add_trial(self._frozen(trial, value))
            elif trial.status is TrialStatus.RUNNING:
                study.enqueue_trial(trial.params)
                study.ask(self._distributions)

    def _modelled_level(self, history: SweepHistory) -> int:
        enough = len(self._distributions) + 1
        for level in sorted(self._levels, reverse=True):
            if sum(value_at(trial, level) is not None for trial in history.trials) >= enough:
                return level
        return min(self._levels)

    def _frozen(self, trial: Trial, value: float) -> optuna.trial.FrozenTrial:
        return optuna.trial.create_trial(
            params=trial.params, distributions=self._distributions, value=value
        )


def distribution(space: Space) -> BaseDistribution:
    """The space in Optuna's terms."""
    match space:
        case FloatSpace():
            return FloatDistribution(space.low, space.high, log=space.log)
        case IntSpace():
            return IntDistribution(space.low, space.high, log=space.log)
        case ChoiceSpace():
            return CategoricalDistribution(space.values)


def _at(dist: BaseDistribution, share: float) -> Any:
    """The value at a share in [0, 1) of a distribution's range."""
    if isinstance(dist, CategoricalDistribution):
        return dist.choices[int(share * len(dist.choices))]
    assert isinstance(dist, FloatDistribution | IntDistribution), "these are all that a Space has"
    if isinstance(dist, IntDistribution):
        low, high = dist.low - 0.5, dist.high + 0.5
        value = _between(low, high, share, log=dist.log)
        return min(dist.high, max(dist.low, round(value)))
    return min(dist.high, max(dist.low, _between(dist.low, dist.high, share, log=dist.log)))


def _between(low: float, high: float, share: float, *, log: bool) -> float:
    if log:
        return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return low + share * (high - low)


def _contains(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return bool(distribution._contains(distribution.to_internal_repr(value)))
    except (ValueError, TypeError):
        return False
