"""`eagleray init`: whatever the folder is called, what it writes is valid."""

from pathlib import Path

import pytest

from eagleray.cli.project import init
from eagleray.platform.config import load_config


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("my-project", "my-project"),
        ("2024", "2024"),
        ("null", "null"),
        ("A \u00e9 B", "a-b"),
        ("\u00e9", "project"),
    ],
)
def test_any_folder_gives_a_valid_file(tmp_path: Path, folder: str, name: str) -> None:
    init(tmp_path / folder)
    assert load_config(tmp_path / folder).config.name == name
