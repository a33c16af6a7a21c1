"""What a configuration's mixture draws from a dataset."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eagleray.actors.data import Dataset
from eagleray.actors.data.loader import Loader
from eagleray.actors.data.mixing import mixture_for
from eagleray.actors.data.order import domains_of
from eagleray.platform.config import DataConfig
from eagleray.platform.errors import DataError

SOURCES = [{"path": "raw/a.jsonl", "domain": "a"}, {"path": "raw/b.jsonl", "domain": "b"}]


@pytest.fixture
def dataset(build: Callable[..., Dataset]) -> Dataset:
    return build(sources=SOURCES)


def config(mixture: dict[str, Any], **settings: Any) -> DataConfig:
    return DataConfig.model_validate({"sources": SOURCES, "mixture": mixture, **settings})


def drawn(dataset: Dataset, data: DataConfig, steps: range, batch_size: int = 8) -> list[int]:
    """Samples of each domain in the batches of these steps."""
    mixture = mixture_for(data, dataset, batch_size, steps.stop)
    with Loader(dataset, "train", 0, batch_size, None, 0, mixture) as loader:
        ids = np.concatenate([loader.batch(step).ids for step in steps])
    return np.bincount(domains_of(ids, dataset.sizes("train")), minlength=2).tolist()


def test_stratified_ends_the_epochs_of_all_domains_together(dataset: Dataset) -> None:
    a, b = dataset.sizes("train")
    assert drawn(dataset, config({}), range(a + b), batch_size=1) == [a, b]


def test_fixed_weights_are_kept_in_every_batch(dataset: Dataset) -> None:
    data = config({"kind": "fixed", "weights": {"b": 3, "a": 1}})
    assert drawn(dataset, data, range(10)) == [20, 60]
    assert drawn(dataset, data, range(3, 4)) == [2, 6]


def test_a_domain_without_a_weight_is_left_out(dataset: Dataset) -> None:
    assert drawn(dataset, config({"kind": "fixed", "weights": {"b": 2}}), range(5)) == [0, 40]


def test_phases_begin_at_their_steps(dataset: Dataset) -> None:
    phases = [
        {"steps": 3, "weights": {"a": 1}},
        {"steps": 4, "weights": {"a": 1, "b": 1}},
        {"weights": {"a": 0.25, "b": 0.75}},
    ]
    data = config({"kind": "phased", "phases": phases})
    assert drawn(dataset, data, range(3)) == [24, 0]
    assert drawn(dataset, data, range(3, 7)) == [16, 16]
    assert drawn(dataset, data, range(7, 20)) == [26, 78]


def test_a_run_that_needs_a_domain_twice_is_refused_if_so_asked(dataset: Dataset) -> None:
    a, _ = dataset.sizes("train")
    mixture = {"kind": "fixed", "weights": {"a": 1, "b": 1}}
    enough = config(mixture, on_exhausted="fail")
    mixture_for(enough, dataset, 2, a)
    with pytest.raises(DataError, match=rf"a has {a:,} samples and {a + 1:,} are drawn"):
        mixture_for(enough, dataset, 2, a + 1)
    mixture_for(config(mixture), dataset, 2, 10 * a)


def test_weights_of_other_domains_than_the_dataset_has_are_refused(
    build: Callable[..., Dataset],
) -> None:
    with pytest.raises(DataError, match="weighs b, and the dataset has the domains main"):
        mixture_for(config({"kind": "fixed", "weights": {"b": 1}}), build(), 8, 10)
