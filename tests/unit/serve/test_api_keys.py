import json
import stat
from pathlib import Path

import pytest

from eagleray.platform.errors import NotFoundError, StorageError, UsageError
from eagleray.platform.storage import Storage
from eagleray.serve.api.keys import KeyStore


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


def test_a_key_lets_its_owner_in_and_nobody_else(storage: Storage) -> None:
    keys = KeyStore(storage, clock=lambda: 7.0)
    secret = keys.create("laptop")
    found = keys.verify(secret)
    assert found is not None
    assert (found.name, found.last4, found.created_s) == ("laptop", secret[-4:], 7.0)
    for wrong in ("", "er-", secret[:-1], secret + "x", secret.swapcase(), found.sha256):
        assert keys.verify(wrong) is None


def test_a_key_has_256_random_bits_and_only_its_digest_is_kept(storage: Storage) -> None:
    secret = KeyStore(storage).create("a")
    assert secret.startswith("er-")
    assert len(secret) == 3 + 43
    file = storage.path("keys.json")
    assert secret not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    KeyStore(storage).create("b")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_running_server_sees_keys_made_and_revoked_by_others(storage: Storage) -> None:
    server, cli = KeyStore(storage), KeyStore(storage)
    assert server.verify("er-none") is None
    secret = cli.create("a")
    assert server.verify(secret)
    cli.revoke("a")
    assert server.verify(secret) is None
    assert cli.all() == []


def test_names_are_unique_and_plain(storage: Storage) -> None:
    keys = KeyStore(storage)
    keys.create("a")
    with pytest.raises(UsageError, match="already"):
        keys.create("a")
    for name in ("", "-a", "a b", "x" * 64, "a/b"):
        with pytest.raises(UsageError, match="not a key's name"):
            keys.create(name)


def test_revoking_an_unknown_key_lists_those_there_are(storage: Storage) -> None:
    keys = KeyStore(storage)
    keys.create("phone")
    with pytest.raises(NotFoundError, match="phone"):
        keys.revoke("laptop")


@pytest.mark.parametrize("damage", ["{", "[]", '{"format": 9, "keys": []}', '{"format": 1}'])
def test_a_damaged_file_lets_nobody_in(
    storage: Storage, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = KeyStore(storage)
    secret = keys.create("a")
    assert keys.verify(secret)
    storage.put(damage.encode(), "keys.json")
    assert keys.verify(secret) is None
    assert "nobody is let in" in caplog.text
    with pytest.raises(StorageError, match=r"keys\.json"):
        keys.create("b")


def test_removing_the_file_lets_nobody_in(storage: Storage) -> None:
    keys = KeyStore(storage)
    secret = keys.create("a")
    assert keys.verify(secret)
    storage.remove("keys.json")
    assert keys.verify(secret) is None


def test_the_file_names_its_format(storage: Storage) -> None:
    KeyStore(storage).create("a")
    assert json.loads(storage.read("keys.json"))["format"] == 2
