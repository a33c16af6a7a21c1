"""`ray start` without what a head does not need; run by path: `python -P start.py start ...`.

Ray's command line imports the command lines of Serve, Jobs and the State API to offer them too, and
does without those that cannot be imported: 2 of its 3.3 CPU-seconds, on the way of every start.
Nothing of ours is imported here for the same reason.
"""

import os
import sys
from typing import Any

_LEFT_OUT = (
    "ray.dashboard.modules.job.cli",
    "ray.serve.scripts",
    "ray.util.state.state_cli",
)
_HOOK_VARIABLE = "RAY_START_HOOK"


def configure(parameters: Any, head: bool) -> None:
    """Leave the Ray Client server out, for which `ray start` has no option.

    Nothing of ours uses it and it would listen needlessly. Ray calls this before all else.
    """
    # What Ray starts from here on must not call it again.
    os.environ.pop(_HOOK_VARIABLE, None)
    if head:
        parameters.ray_client_server_port = None


def main() -> None:
    """Run Ray's command line."""
    # None in place of a module makes its import fail.
    sys.modules.update(dict.fromkeys(_LEFT_OUT))  # type: ignore[arg-type]
    os.environ[_HOOK_VARIABLE] = f"{__name__}.{configure.__name__}"
    # Only now: the lines above must come first.
    from ray.scripts.scripts import main as ray_command_line  # noqa: PLC0415

    ray_command_line()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
