"""The mixture that a configuration asks for, over the domains of a built dataset."""

from collections.abc import Sequence
from fractions import Fraction

from eagleray.actors.data.dataset import Dataset, Split
from eagleray.actors.data.mixer import Mixer, MixerSpec
from eagleray.actors.data.mixture import Mixture, named_weights
from eagleray.platform.config import (
    BanditMixtureConfig,
    DataConfig,
    DoremiMixtureConfig,
    FixedMixtureConfig,
    PhasedMixtureConfig,
)
from eagleray.platform.errors import DataError


def stratified(sizes: Sequence[int]) -> Mixture:
    """Weights in the ratio of the sizes: all domains end their epochs together."""
    return Mixture.constant([Fraction(size) for size in sizes])


def mixture_for(
    data: DataConfig, dataset: Dataset, batch_size: int, steps: int, split: Split = "train"
) -> Mixture:
    """What the batches of a run are drawn from; of one that follows the losses, the beginning.

    Args:
        data: Names the domains' weights, and whether a domain may be read more than once.
        dataset: Has the domains.
        batch_size: Samples per global batch: phases begin at steps.
        steps: Of the whole run.
        split: Of the dataset.

    Raises:
        DataError: A weight names no domain of the dataset, or the run needs more of a domain than
            there is and `data.on_exhausted` is fail.
    """
    sizes = dataset.sizes(split)
    if spec := mixer_spec(data, dataset):
        return Mixer(spec, batch_size).mixture
    mixture = _planned(data, dataset.domains, sizes, batch_size)
    if data.on_exhausted == "fail":
        _check_enough(mixture, dataset.domains, sizes, batch_size, steps)
    return mixture


def mixer_spec(data: DataConfig, dataset: Dataset) -> MixerSpec | None:
    """What decides the weights during the run; None if they are known beforehand."""
    if isinstance(data.mixture, DoremiMixtureConfig | BanditMixtureConfig):
        return MixerSpec(data.mixture, dataset.domains, dataset.sizes("train"))
    return None


def _planned(
    data: DataConfig, domains: Sequence[str], sizes: Sequence[int], batch_size: int
) -> Mixture:
    config = data.mixture
    if isinstance(config, FixedMixtureConfig):
        return Mixture.constant(_weights(config.weights, domains))
    if not isinstance(config, PhasedMixtureConfig):
        return stratified(sizes)
    first = 0
    mixture = Mixture.constant(_weights(config.phases[0].weights, domains))
    for number, phase in enumerate(config.phases, start=1):
        is_last = number == len(config.phases)
        length = None if is_last or phase.steps is None else phase.steps * batch_size
        mixture = mixture.then(first, _weights(phase.weights, domains), length)
        first += length or 0
    return mixture


def _weights(weights: dict[str, float], domains: Sequence[str]) -> list[Fraction]:
    unknown = sorted(set(weights) - set(domains))
    if unknown:
        raise DataError(
            f"data.mixture weighs {', '.join(unknown)}, and the dataset has the domains "
            f"{', '.join(domains)}",
            "build the dataset again, or correct the weights",
        )
    return named_weights(weights, domains)


def _check_enough(
    mixture: Mixture, domains: Sequence[str], sizes: Sequence[int], batch_size: int, steps: int
) -> None:
    drawn = mixture.drawn_at(steps * batch_size)
    short = [
        f"{name} has {size:,} samples and {count:,} are drawn"
        for name, size, count in zip(domains, sizes, drawn, strict=True)
        if count > size
    ]
    if short:
        raise DataError(
            f"{steps:,} steps of {batch_size:,} samples need more than one epoch of "
            f"{len(short)} of {len(domains)} domains: {'; '.join(short)} (data.on_exhausted=fail)",
            "lower train.steps or their weights, add text, or set data.on_exhausted=repeat",
        )
