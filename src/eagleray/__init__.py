"""Eagleray: raw text to a served model on your own Ray cluster."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eagleray.platform.errors import EagleRayError

if TYPE_CHECKING:
    from eagleray.project import Project, TrainedRun

__version__ = "0.1.0"

__all__ = ["EagleRayError", "Project", "TrainedRun", "__version__"]


def __getattr__(name: str) -> Any:
    # Each process of a run imports this package, and only the driver's needs a project.
    if name in {"Project", "TrainedRun"}:
        return getattr(import_module("eagleray.project"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
