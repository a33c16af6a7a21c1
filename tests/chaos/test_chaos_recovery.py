"""What a fault costs: a dead process not a step, a dead place nothing at all, a hung one its time."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from eagleray.actors.trainer.progress import Progress
from eagleray.project import Project, TrainedRun
from tests.chaos.faults import Once, child, rank
