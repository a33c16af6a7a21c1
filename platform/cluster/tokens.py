"""A cluster's token: one secret of 256 bits, in a file that only its user can read.

Whoever holds it can run code on the cluster. It is made anew by each `up` and for each private
cluster, and is never written anywhere else.
"""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eagleray.platform.errors import AuthenticationError

_USUAL_FILE = Path("~/.ray/auth_token")


@dataclass(frozen=True)
class Access:
    """A token and the variables by which Ray's own code finds the same token."""

    token: str | None
    variables: Mapping[str, str]

    @classmethod
    def from_file(cls, path: Path) -> "Access":
        """The token in a file.

        Raises:
            AuthenticationError: It cannot be read.
        """
        return cls(read_token(path), {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Access":
        """The token where Ray looks for it: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, the home folder.

        None of them: the cluster is taken to be open; it refuses us if it is not.
        """
        if token := environment.get("RAY_AUTH_TOKEN"):
            return cls(token, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})
        if path := environment.get("RAY_AUTH_TOKEN_PATH"):
            return cls.from_file(Path(path))
        usual = _USUAL_FILE.expanduser()
        return cls.from_file(usual) if usual.exists() else cls(None, {})


def write_token(path: Path) -> None:
    """Make a new secret of 256 random bits that only this user can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    temporary.replace(path)


def read_token(path: Path) -> str:
    """The secret in a token file.

    Raises:
        AuthenticationError: It cannot be read, or is empty.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AuthenticationError(
            f"the cluster's token {path} cannot be read: {error}",
            "run as the user who started the cluster, or `eagleray down`, then `eagleray up`",
        ) from error
    if not token:
        raise AuthenticationError(
            f"the cluster's token {path} is empty",
            "start the cluster anew: `eagleray down`, `eagleray up`",
        )
    return token
