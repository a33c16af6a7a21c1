"""`serve.weights`: refused where the kernels cannot serve it, never served otherwise in silence."""

from collections.abc import Callable
from pathlib import Path

import pytest

from eagleray.platform.config import ConfigError, LoadedConfig, load_config
from eagleray.platform.errors import InfeasibleError
from eagleray.platform.storage import Storage
from eagleray.serve import backend
from eagleray.serve.spec import resolve


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_heads_that_the_kernels_do_not_know_are_refused_with_what_to_do(
    weights: str, tmp_path: Path, make_project: Callable[..., LoadedConfig],
    register_tiny: Callable[..., str],
) -> None:  # fmt: skip
    project = make_project(tmp_path, weights=weights, model="tiny")
    register_tiny(Storage(project.storage_path), 1)
    # Its heads have 12 channels.
    with pytest.raises(InfeasibleError, match=f"serve.weights {weights} needs") as caught:
        backend.open_model(resolve(project))
    assert "set serve.weights to exact" in caught.value.fix


def test_other_weights_are_a_mistake_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "eagleray.yaml").write_text("name: tiny\nserve: {weights: int2}\n")
    with pytest.raises(ConfigError, match=r"serve\.weights"):
        load_config(tmp_path)
