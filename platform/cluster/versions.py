"""Which versions a client and a cluster run, and the refusal to mix them.

Ray requires the same Ray and the same Python up to the patch level on every node and client; we
require the same Eagleray too, because its actors are imported by name on the cluster.
"""

import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version

from eagleray import __version__
from eagleray.platform.errors import InfeasibleError

VERSION_LABEL = "eagleray-version"
"""Node label by which a cluster that nobody recorded tells which Eagleray it runs."""

_FIX = "run the same versions on both sides: `eagleray down`, then `eagleray up` with this install"


class VersionSkewError(InfeasibleError):
    """Client and cluster run versions that must not be mixed."""


@dataclass(frozen=True)
class Versions:
    """What must be equal on both sides; an empty text is not known and matches anything."""

    ray: str
    python: str
    eagleray: str

    @classmethod
    def here(cls) -> "Versions":
        """Those of this process."""
        python = ".".join(str(part) for part in sys.version_info[:3])
        return cls(version("ray"), python, __version__)


def check_same(cluster: Versions, client: Versions, where: str) -> None:
    """Refuse to go on with versions that differ.

    Raises:
        VersionSkewError: At least one differs; the message names both sides of each.
    """
    theirs, ours = asdict(cluster), asdict(client)
    skewed = [name for name in theirs if theirs[name] and ours[name] and theirs[name] != ours[name]]
    if skewed:
        named = "; ".join(f"{name} {theirs[name]} there, {ours[name]} here" for name in skewed)
        raise VersionSkewError(f"the cluster at {where} runs other versions: {named}", _FIX)
