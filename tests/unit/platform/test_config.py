"""The configuration: precedence, one override function, and errors that list every problem."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.platform.config import (
    ConfigError,
    FeatureCacheConfig,
    Problem,
    ProjectConfig,
    config_digest,
    load_config,
    parse_overrides,
    with_overrides,
)
from eagleray.platform.config.values import parse_bytes, parse_seconds
from eagleray.platform.errors import UsageError


def write(folder: Path, text: str) -> Path:
    path = folder / "eagleray.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_give_way_to_the_file_and_the_file_to_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\ntrain: {steps: 50, batch_size: 8}\n")
    loaded = load_config(path, ["train.steps=70", "train.optimizer.lr=3e-4"])
    assert loaded.config.train.steps == 70
    assert loaded.config.train.batch_size == 8
    assert loaded.config.train.optimizer.lr == pytest.approx(3e-4)
    assert loaded.config.data.seq_len == ProjectConfig(name="a").data.seq_len


def test_every_problem_of_a_file_is_reported_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "name: Bad Name\n"
        "trian: {steps: 1}\n"
        "train: {stepz: 3, steps: x}\n"
        "data: {tokenizer: {kind: bpe, vocab_sise: 3}}\n"
        "redis: {max_bytes: 5 bananas}\n",
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    problems = {problem.path: problem for problem in caught.value.problems}
    assert set(problems) == {
        "name", "trian", "train.stepz", "train.steps", "data.tokenizer.vocab_sise",
        "redis.max_bytes",
    }  # fmt: skip
    assert problems["trian"].hint == "train"
    assert problems["train.stepz"].hint == "train.steps"
    assert problems["data.tokenizer.vocab_sise"].hint == "data.tokenizer.vocab_size"
    assert "512MB" in problems["redis.max_bytes"].rule
    assert caught.value.exit_code == 2
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "path", "rule"),
    [
        ("model: {dim: 190}", "model", "multiple of num_heads"),
        ("model: {num_heads: 6, num_kv_heads: 4}", "model", "multiple of num_kv_heads"),
        ("train: {batch_size: 10, num_workers: 3}", "train", "multiple of num_workers"),
        ("train: {steps: 5, schedule: {warmup_steps: 6}}", "train", "must not exceed steps 5"),
        ("data: {seq_len: 4096}", "(the whole file)", "must not exceed model.max_seq_len"),
        ("storage: {uri: 's3://bucket'}", "storage.uri", "s3:// is not supported"),
        (
            "tune: {space: {a: {kind: float, low: 0, high: 1, log: true}}}",
            "tune.space.a",
            "above 0",
        ),
        ("tune: {space: {a: {kind: int, low: 3, high: 2}}}", "tune.space.a", "below high"),
    ],
)
def test_impossible_combinations_name_both_values(
    tmp_path: Path, text: str, path: str, rule: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, f"name: a\n{text}\n"))
    (problem,) = caught.value.problems
    assert problem.path == path
    assert rule in problem.rule


def test_a_yaml_mistake_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"line 3, column \d+: not valid YAML"):
        load_config(write(tmp_path, "name: a\ntrain: {steps: 1\n"))


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "just text\n"])
def test_a_file_that_is_not_a_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"not a mapping"):
        load_config(write(tmp_path, text))


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="eagleray init"):
        load_config(tmp_path)


def test_an_undecodable_file_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "eagleray.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        load_config(path)


@pytest.mark.parametrize("text", ["train.steps", "=3", ""])
def test_an_override_without_path_or_value_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="path=value"):
        parse_overrides([text])


def test_an_override_into_a_plain_value_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\ndata: {sources: [{path: x}]}\n")
    with pytest.raises(UsageError, match="not an index below 1"):
        load_config(path, ["data.sources.3.path=y"])
    with pytest.raises(UsageError, match=r"override name\.x"):
        load_config(path, ["name.x=y"])
    assert load_config(path, ["data.sources.0.path=y"]).config.data.sources[0].path == "y"


def test_changing_a_kind_drops_the_keys_of_the_old_one() -> None:
    config = with_overrides(ProjectConfig(name="a"), {"data.tokenizer.vocab_size": 1000})
    changed = with_overrides(
        config, {"data.tokenizer.kind": "file", "data.tokenizer.path": "t.json"}
    )
    assert changed.data.tokenizer.model_dump() == {"kind": "file", "path": "t.json"}
    same = with_overrides(config, {"data.tokenizer.kind": "bpe"})
    assert same.data.tokenizer == config.data.tokenizer


def test_more_domains_than_can_be_mixed_are_refused(tmp_path: Path) -> None:
    sources = ", ".join(f"{{path: a, domain: d{n}, where: {{n: [{n}]}}}}" for n in range(65))
    path = write(tmp_path, f"name: a\ndata: {{sources: [{sources}]}}\n")
    with pytest.raises(ConfigError, match="sources name 65 domains; at most 64"):
        load_config(path)


def test_a_kind_that_chooses_no_variant_leaves_its_neighbours(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\ndata: {sources: [{path: raw}]}\n")
    (source,) = load_config(path, ["data.sources.0.kind=text"]).config.data.sources
    assert (source.kind, source.path) == ("text", "raw")


def test_keys_of_the_search_space_are_dotted_paths_themselves() -> None:
    space = {"kind": "float", "low": 0.1, "high": 1.0}
    config = with_overrides(
        ProjectConfig(name="a"),
        {"tune.space.train.optimizer.lr": space, "tune.overrides.train.steps": 3},
    )
    assert set(config.tune.space) == {"train.optimizer.lr"}
    assert config.tune.overrides == {"train.steps": 3}


def test_overrides_are_validated_as_a_whole() -> None:
    with pytest.raises(ConfigError, match="multiple of num_workers"):
        with_overrides(ProjectConfig(name="a"), {"train.num_workers": 5})


def test_the_digest_depends_on_meaning_not_on_spelling(tmp_path: Path) -> None:
    one = load_config(write(tmp_path, "name: a\nredis: {max_bytes: 1MB}\n")).config
    two = load_config(write(tmp_path, "redis: {max_bytes: 1000000}\nname: a\n")).config
    three = load_config(write(tmp_path, "name: a\nredis: {max_bytes: 2MB}\n")).config
    assert config_digest(one) == config_digest(two) != config_digest(three)


def test_secrets_do_not_reach_the_resolved_form() -> None:
    config = with_overrides(ProjectConfig(name="a"), {"redis.url": "redis://:hunter2@host:1"})
    assert "hunter2" not in repr(config)
    assert "hunter2" not in config.model_dump_json()


def test_relative_paths_start_from_the_files_folder(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, "name: a\nstorage: {uri: 'file://store'}\n"))
    assert loaded.storage_path == tmp_path / "store"
    assert loaded.resolve("/abs") == Path("/abs")


def test_the_error_survives_pickling() -> None:
    error = ConfigError("file", (Problem("a.b", "1", "must be 2", "a.c"),))
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.problems == error.problems


@given(st.integers(min_value=0, max_value=10**12))
def test_plain_numbers_of_bytes_mean_themselves(count: int) -> None:
    assert parse_bytes(str(count)) == count == parse_bytes(f"{count}B")


@pytest.mark.parametrize(
    ("text", "seconds"), [("250ms", 0.25), ("30s", 30), ("5m", 300), ("2h", 7200), ("1.5", 1.5)]
)
def test_durations_are_read_with_their_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "override", ["cluster.place_timeout_s=.inf", "train.optimizer.weight_decay=.nan"]
)
def test_no_wait_is_endless_and_no_figure_is_no_number(override: str) -> None:
    key, value = parse_overrides([override]).popitem()
    with pytest.raises(ConfigError, match="finite"):
        with_overrides(ProjectConfig(name="a"), {key: value})


def test_the_schema_explains_every_key() -> None:
    schema = ProjectConfig.model_json_schema()
    steps = schema["$defs"]["TrainConfig"]["properties"]["batch_size"]
    assert "constant whatever the number of workers" in steps["description"]


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"shared_bytes": "1MB"}, r"shared_bytes 1000000 must be 0 or at least 4000000"),
        ({"disk_bytes": "1MB", "disk_path": "/x"}, r"disk_bytes 1000000 must be 0 or at least"),
        ({"disk_bytes": "1GB"}, r"disk_bytes 1000000000 needs disk_path"),
        ({"disk_path": "x"}, r"disk_path 'x' must be absolute"),
    ],
)
def test_segments_of_the_cache_need_room_and_a_place(values: dict[str, str], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        FeatureCacheConfig.model_validate(values)
    assert not FeatureCacheConfig().has_segments
    assert FeatureCacheConfig.model_validate({"shared_bytes": "4MB"}).has_segments
