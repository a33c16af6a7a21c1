"""The section `data.features`: what it takes, and every combination that cannot be."""

from typing import Any

import pytest

from eagleray.platform.config import (
    ConfigError,
    FeaturesConfig,
    ProjectConfig,
    resolved_json,
    validated,
    with_overrides,
)


def load(features: dict[str, Any] | None, **data: Any) -> ProjectConfig:
    sources = [{"kind": "csv", "path": "a.csv"}]
    tree = {"name": "a", "data": {"sources": sources, "features": features} | data}
    return validated(tree, "the test")


def problem(features: dict[str, Any], **data: Any) -> str:
    with pytest.raises(ConfigError) as failed:
        load(features, **data)
    (only,) = failed.value.problems
    return str(only)


def test_data_are_text_unless_features_are_asked_for() -> None:
    assert load(None).data.features is None
    assert load({}).data.features == FeaturesConfig()
    config = with_overrides(ProjectConfig(name="a"), {"data.features.label": "y"})
    assert config.data.features == FeaturesConfig(label="y")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("fail", "fail"), ("nan", "nan"), (float("nan"), "nan"), (0, 0.0), (-1.5, -1.5)],
)
def test_an_empty_cell_may_be_bad_nan_or_a_number(given: Any, meant: Any) -> None:
    features = load({"missing": given}).data.features
    assert features is not None
    assert features.missing == meant


@pytest.mark.parametrize("given", ["zero", True, None, [0], float("inf"), 1e39, "0"])
def test_anything_else_is_no_empty_cell(given: Any) -> None:
    assert problem({"missing": given}).startswith("data.features.missing = ")
    assert "must be fail, nan or a number that float32 can hold" in problem({"missing": given})


@pytest.mark.parametrize(
    ("features", "rule"),
    [
        ({"columns": []}, "data.features.columns = []: List should have at least 1 item"),
        ({"columns": ["x", "y", "x"]}, "data.features: columns names 'x' twice"),
        ({"categories": ["x", "x"]}, "data.features: categories names 'x' twice"),
        ({"columns": ["x", "y"], "label": "y"}, "label 'y' is one of the columns too"),
        (
            {"columns": ["carrier"], "categories": ["carriers"]},
            "'carriers' is neither one of the columns nor the label: did you mean 'carrier'?",
        ),
        ({"labels": "y"}, "is not a key that exists here (did you mean `data.features.label`?)"),
    ],
)
def test_names_that_contradict_each_other_are_refused(features: dict[str, Any], rule: str) -> None:
    assert rule in problem(features)


def test_the_label_may_be_a_category() -> None:
    assert load({"columns": ["x"], "label": "y", "categories": ["y"]}).data.features is not None


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        ({"sources": [{"kind": "text", "path": "docs"}]}, "source docs has kind text: use jsonl"),
        ({"sources": [{"path": "a", "text_field": "body"}]}, "text_field 'body' of source a is"),
        ({"tokenizer": {"vocab_size": 500}}, "tokenizer of kind bpe is for text"),
        ({"tokenizer": {"kind": "file", "path": "t.json"}}, "tokenizer of kind file is for text"),
        ({"seq_len": 64}, "seq_len 64 is for text"),
        ({"mixture": {"kind": "doremi"}}, "mixture of kind doremi follows the losses of a"),
    ],
)
def test_settings_of_text_are_refused_beside_features(data: dict[str, Any], rule: str) -> None:
    assert rule in problem({}, **data)


def test_a_configuration_that_was_written_out_whole_is_taken_back() -> None:
    config = load({"label": "y", "missing": "nan"})
    assert validated(resolved_json(config), "its own") == config


def test_the_length_of_samples_of_text_does_not_matter_to_rows() -> None:
    tree = {"name": "a", "data": {"features": {}}, "model": {"max_seq_len": 64}}
    assert validated(tree, "the test").model.max_seq_len == 64
