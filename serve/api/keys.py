"""API keys: 256 random bits, known to their owner alone; at rest there is only a digest.

    <storage>/keys.json, mode 0600
    {"format": 2, "keys": [{"name", "sha256", "last4", "created_s",
                            "requests_per_s", "concurrency", "tokens_per_min"}]}

SHA-256 without salt or stretching is enough: nobody can guess 256 random bits, and equal keys do
not exist. A server that runs sees keys made and revoked by others at its next request. Format 1
had no limits.
"""

import hashlib
import hmac
import json
import logging
import math
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from eagleray.platform.errors import NotFoundError, StorageError, UsageError
from eagleray.platform.storage import Storage, canonical_json
from eagleray.serve.api.allowance import KeyLimits

logger = logging.getLogger(__name__)

PREFIX = "er-"
FORMAT = 2
_FORMATS = (1, 2)
_FILE = "keys.json"
_RANDOM_BYTES = 32
_MAX_KEYS = 1000
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
_Signature = tuple[int, int, int]


@dataclass(frozen=True)
class ApiKey:
    """What is kept of a key: enough to recognise it, not enough to use it."""

    name: str
    sha256: str
    last4: str
    created_s: float
    requests_per_s: float | None = None
    concurrency: int | None = None
    tokens_per_min: int | None = None

    @property
    def limits(self) -> KeyLimits:
        """What it may use; where it says nothing, `serve.key_limits` does."""
        return KeyLimits(self.requests_per_s, self.concurrency, self.tokens_per_min)


class KeyStore:
    """The keys of one storage; any number of processes may change them at once.

    Args:
        storage: The project's storage.
        clock: Seconds since the epoch.
    """

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.time) -> None:
        self._storage, self._clock = storage, clock
        self._seen: _Signature | None = None
        self._keys: tuple[ApiKey, ...] = ()

    def create(self, name: str, limits: KeyLimits | None = None) -> str:
        """Make a key.

        Args:
            name: What it is for.
            limits: What it may use, beside what holds for every key.

        Returns:
            The key itself; it cannot be shown again.

        Raises:
            UsageError: The name is taken or breaks the naming rule, a limit is not above 0, or
                there are too many keys.
            ConflictError: Somebody changed the keys at the same moment; nothing changed.
        """
        before, keys = self._load()
        if not _NAME.match(name):
            raise UsageError(
                f"{name!r} is not a key's name: letters, digits, '.', '_' and '-', at most 63",
                "choose another",
            )
        if any(key.name == name for key in keys):
            raise UsageError(
                f"there is a key {name!r} already", "choose another name, or revoke it"
            )
        if len(keys) >= _MAX_KEYS:
            raise UsageError(f"there are {len(keys)} keys, the most kept", "revoke unused ones")
        given = {} if limits is None else asdict(limits)
        for limit, value in given.items():
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{limit} {value} must be above 0", "leave it out for no limit")
        secret = PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
        made = ApiKey(name, _digest(secret), secret[-4:], self._clock(), **given)
        self._save(before, [*keys, made])
        return secret

    def revoke(self, name: str) -> ApiKey:
        """Make a key worthless from the next request on.

        Raises:
            NotFoundError: There is none of this name.
            ConflictError: Somebody changed the keys at the same moment; nothing changed.
        """
        before, keys = self._load()
        for key in keys:
            if key.name == name:
                self._save(before, [other for other in keys if other is not key])
                return key
        known = ", ".join(key.name for key in keys) or "none"
        raise NotFoundError(f"there is no key {name!r} (keys: {known})", "see `eagleray keys list`")

    def all(self) -> list[ApiKey]:
        """Every key, oldest first."""
        return self._load()[1]

    def verify(self, secret: str) -> ApiKey | None:
        """The key that was presented, or None.

        An unreadable file lets nobody in.
        """
        self._refresh()
        digest = _digest(secret)
        # Every key is compared, each in constant time: the answer's timing tells nothing.
        matches = [key for key in self._keys if hmac.compare_digest(key.sha256, digest)]
        return matches[0] if matches else None

    def _refresh(self) -> None:
        signature = self._signature()
        if signature == self._seen:
            return
        try:
            self._keys = tuple(self.all())
        except StorageError:
            logger.exception("keys unreadable: nobody is let in file=%s", _FILE)
            self._keys = ()
        self._seen = signature

    def _signature(self) -> _Signature | None:
        """Changes whenever the file does: each write makes a new inode."""
        try:
            status = self._storage.path(_FILE).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _load(self) -> tuple[bytes | None, list[ApiKey]]:
        try:
            data = self._storage.read(_FILE)
        except NotFoundError:
            return None, []
        except OSError as error:
            raise StorageError(
                f"{self._storage.path(_FILE)} cannot be read: {error.strerror}",
                "check its owner; it must be readable by whoever serves",
            ) from error
        return data, _parsed(data, str(self._storage.path(_FILE)))

    def _save(self, before: bytes | None, keys: list[ApiKey]) -> None:
        content = {"format": FORMAT, "keys": [asdict(key) for key in keys]}
        self._storage.compare_and_set(before, canonical_json(content), _FILE)
        # For an instant the digests may be readable to others: they are of no use to them.
        self._storage.path(_FILE).chmod(0o600)


def _parsed(data: bytes, path: str) -> list[ApiKey]:
    try:
        content: Any = json.loads(data)
        if content["format"] not in _FORMATS:
            raise StorageError(
                f"{path} has format {content['format']}, this eagleray reads up to {FORMAT}",
                "use the eagleray version that wrote it, or a newer one",
            )
        return [ApiKey(**key) for key in content["keys"]]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is damaged: {error}", "restore it, or remove it") from error


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
