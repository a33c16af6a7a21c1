"""What travels with a job: our code as real files and the project's file, by content, bounded."""

import io
import os
import zipfile
from pathlib import Path

import pytest
import yaml

import eagleray
from eagleray.platform.config import ProjectConfig, load_config
from eagleray.platform.errors import UsageError
from eagleray.platform.jobs import MAX_BYTES, Package, prepare

CONFIG = """\
name: test
redis: {url: "redis://:hush@h:1"}
data:
  sources: [{path: "data/*.jsonl"}, {path: /abs/x.txt, kind: text}]
  tokenizer: {kind: file, path: tok.json}
tune:
  space:
    train.optimizer.lr: {kind: float, low: 1e-4, high: 1e-2, log: true}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "big.jsonl").write_text("{}" * 1000)
    (folder / "eagleray.yaml").write_text(CONFIG)
    return folder


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A package with one folder behind a link, as in a checkout."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "linked.py").write_text("LINKED = 1\n")
    package = tmp_path / "eagleray"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__pycache__" / "x.pyc").write_bytes(b"x")
    (package / ".hidden").write_text("x")
    (package / "__init__.py").write_text("")
    (package / "platform").symlink_to("../elsewhere")
    return package


def contents(package: Package) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(package.data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_linked_folders_travel_as_real_files_and_leftovers_stay(project: Path, code: Path) -> None:
    sent = contents(prepare(load_config(project), ["version"], code).code)
    assert sent == {"eagleray/__init__.py": b"", "eagleray/platform/linked.py": b"LINKED = 1\n"}


def test_our_own_package_travels_whole_and_well_under_the_limit(project: Path) -> None:
    shipment = prepare(load_config(project), ["version"], Path(eagleray.__file__).parent)
    names = {name for name, _ in shipment.code.files}
    assert {"eagleray/__main__.py", "eagleray/platform/errors.py"} <= names
    assert {"actors", "tune", "serve"} <= {name.split("/")[1] for name in names}
    assert shipment.code.num_bytes < MAX_BYTES / 4


def test_only_the_projects_file_travels_never_its_data(project: Path, code: Path) -> None:
    assert list(contents(prepare(load_config(project), ["train"], code).project)) == [
        "eagleray.yaml"
    ]


def test_paths_in_the_sent_file_mean_the_same_anywhere(project: Path, code: Path) -> None:
    sent = contents(prepare(load_config(project), ["train"], code).project)["eagleray.yaml"]
    tree = yaml.safe_load(sent)
    assert tree["storage"]["uri"] == str(project / ".eagleray")
    assert [s["path"] for s in tree["data"]["sources"]] == [
        str(project / "data" / "*.jsonl"),
        "/abs/x.txt",
    ]
    assert tree["data"]["tokenizer"]["path"] == str(project / "tok.json")


def test_the_sent_file_is_the_same_configuration(project: Path, code: Path) -> None:
    loaded = load_config(project)
    sent = contents(prepare(loaded, ["train"], code).project)["eagleray.yaml"]
    again = ProjectConfig.model_validate(yaml.safe_load(sent))
    assert again.tune == loaded.config.tune
    assert again.redis == loaded.config.redis


def test_overrides_that_name_files_are_made_absolute_and_others_are_left_alone(
    project: Path, code: Path
) -> None:
    arguments = ["train", "storage.uri=out", "data.sources.0.path=x.jsonl", "train.steps=5", "-v"]
    shipment = prepare(load_config(project), arguments, code)
    assert shipment.arguments == (
        "train",
        f"storage.uri={project / 'out'}",
        f"data.sources.0.path={project / 'x.jsonl'}",
        "train.steps=5",
        "-v",
    )
    assert len(shipment.overrides) == 3


def test_equal_content_has_the_same_name_whatever_its_times(project: Path, code: Path) -> None:
    loaded = load_config(project)
    first = prepare(loaded, ["version"], code)
    os.utime(code / "__init__.py", (1, 1))
    assert prepare(loaded, ["version"], code).code.uri == first.code.uri


def test_changed_content_has_another_name(project: Path, code: Path) -> None:
    loaded = load_config(project)
    first = prepare(loaded, ["version"], code)
    (code / "__init__.py").write_text("CHANGED = 1\n")
    second = prepare(loaded, ["version"], code)
    assert second.code.uri != first.code.uri
    assert second.project.uri == first.project.uri


def test_too_much_is_refused_with_the_largest_files(project: Path, code: Path) -> None:
    (code / "weights.bin").write_bytes(bytes(MAX_BYTES + 1))
    with pytest.raises(UsageError, match=r"20 MB; largest: eagleray/weights.bin \(20.0 MB"):
        prepare(load_config(project), ["version"], code)


@pytest.mark.parametrize("arguments", [[], ["--json"], ["eagleray"]])
def test_a_submission_needs_a_verb(project: Path, code: Path, arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="no verb"):
        prepare(load_config(project), arguments, code)


@pytest.mark.parametrize("option", ["-c", "--config", "--config=x"])
def test_another_configuration_file_is_refused(project: Path, code: Path, option: str) -> None:
    with pytest.raises(UsageError, match="stands after `--`"):
        prepare(load_config(project), ["train", option, "x"], code)


def test_our_own_name_before_the_verb_is_accepted(project: Path, code: Path) -> None:
    assert prepare(load_config(project), ["eagleray", "version"], code).arguments == ("version",)
