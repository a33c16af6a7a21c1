"""Eagleray: raw text to a served model on your own Ray cluster."""

from eagleray.platform.errors import EagleRayError
from eagleray.project import Project, TrainedRun

__version__ = "0.1.0"

__all__ = ["EagleRayError", "Project", "TrainedRun", "__version__"]
