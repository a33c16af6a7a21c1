"""Tokens: secret, new each time, looked for where Ray looks."""

from pathlib import Path

import pytest

from eagleray.platform.cluster.tokens import Access, read_token, write_token
from eagleray.platform.errors import AuthenticationError


def test_a_token_has_256_bits_and_only_its_user_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "cluster" / "token"
    write_token(path)
    assert len(bytes.fromhex(read_token(path))) == 32
    assert path.stat().st_mode & 0o777 == 0o600


def test_each_token_is_new_and_replaces_the_old_whole(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_token(path)
    first = read_token(path)
    write_token(path)
    assert read_token(path) != first
    assert [entry.name for entry in tmp_path.iterdir()] == ["token"]


@pytest.mark.parametrize(("content", "complaint"), [(None, "cannot be read"), ("\n", "is empty")])
def test_a_token_that_cannot_be_used_is_an_authentication_error(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(AuthenticationError, match=complaint):
        read_token(path)


def test_access_by_file_names_the_file_and_keeps_the_secret_out_of_the_environment(
    tmp_path: Path,
) -> None:
    path = tmp_path / "token"
    write_token(path)
    access = Access.from_file(path)
    assert access.variables == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    assert access.token == read_token(path)


def test_a_token_in_the_environment_comes_before_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_token(path)
    both = {"RAY_AUTH_TOKEN": "secret", "RAY_AUTH_TOKEN_PATH": str(path)}
    assert Access.from_environment(both).token == "secret"
    del both["RAY_AUTH_TOKEN"]
    assert Access.from_environment(both).token == read_token(path)


def test_without_any_token_the_cluster_is_taken_to_be_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Access.from_environment({}) == Access(None, {})


def test_the_token_of_the_home_folder_is_the_last_resort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_token(tmp_path / ".ray" / "auth_token")
    assert Access.from_environment({}).token == read_token(tmp_path / ".ray" / "auth_token")
