"""What `ray start` has no option for; Ray calls this through RAY_START_HOOK before it starts."""

from typing import Any


def configure(parameters: Any, head: bool) -> None:
    """Leave the Ray Client server out: nothing of ours uses it and it would listen needlessly."""
    if head:
        parameters.ray_client_server_port = None
