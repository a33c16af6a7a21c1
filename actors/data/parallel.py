"""Units of a build on a Ray cluster, by Ray Data: as many at a time as it has cores."""

import logging
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import ray.data

from eagleray.actors.data.units import Encoder, Unit
from eagleray.platform.errors import EagleRayError, ServiceError


def encode_all(encoder: Encoder, units: Sequence[Unit]) -> Iterator[int]:
    """Encode units on the cluster that Ray is connected to; gives each index when it is finished.

    Args:
        encoder: What they need lies in it, or in its folder.
        units: What is not there yet.

    Raises:
        DataError: As `Encoder.encode`.
        OSError: As `Encoder.encode`.
        ServiceError: The processes died again and again.
    """
    rows = [{"unit": pickle.dumps(unit)} for unit in units]
    # Ray Data would ask localhost:9090 for counters, in a thread that never ends, to report them.
    os.environ["RAY_DATA_USAGE_DISABLED"] = "1"
    try:
        with _quiet():
            finished = (
                ray.data.from_items(rows, override_num_blocks=len(rows))
                .map(_encode, fn_args=(encoder,), num_cpus=1)  # type: ignore[arg-type]
                .iter_rows()
            )
            for row in finished:
                if row["error"] is not None:
                    raise row["error"]
                yield row["index"]
    except ray.exceptions.RayError as error:
        raise ServiceError(
            f"the processes that encode the corpus failed: {str(error).splitlines()[0]}",
            "build again: what they finished is kept",
        ) from error


def _encode(row: dict[str, Any], encoder: Encoder) -> dict[str, Any]:
    unit: Unit = pickle.loads(row["unit"])
    error: Exception | None = None
    try:
        # Ray repeats what a process did that died afterwards.
        if encoder.found(unit) is None:
            encoder.encode(unit)
    except EagleRayError as problem:
        # As a value: an exception would be wrapped, and tried again elsewhere.
        error = problem
    except OSError as problem:
        error = OSError(problem.errno, problem.strerror)
    return {"index": unit.index, "error": error}


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray Data tells its plan and draws its own bars; whoever called shows how far it is."""
    context, logger = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    before = context.enable_progress_bars, context.print_on_execution_start, logger.level
    context.enable_progress_bars = context.print_on_execution_start = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars, context.print_on_execution_start, level = before
        logger.setLevel(level)
