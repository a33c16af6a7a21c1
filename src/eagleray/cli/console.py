"""What every verb shares: options, output for people and scripts, how errors end a process."""

import contextlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eagleray.platform.errors import EagleRayError
from eagleray.platform.interruption import Before, interruptions_to

logger = logging.getLogger(__name__)

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", help="The project's file, or the folder that holds it.")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides: train.steps=100"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be done; do nothing.")
]

INTERRUPTED = 130  # 128 + SIGINT, as shells say it
TERMINATED = 143  # 128 + SIGTERM
# Ctrl-C, and the SystemExit that SIGTERM becomes.
INTERRUPTIONS = (KeyboardInterrupt, SystemExit)
_is_terminated = threading.Event()
_has_told = threading.Event()
_SHORTEST = 12  # characters of a last column that is cut


def exit_code(interruption: BaseException) -> int:
    """The exit code that tells which of INTERRUPTIONS it was."""
    return INTERRUPTED if isinstance(interruption, KeyboardInterrupt) else TERMINATED


def tell_stopped(text: str) -> None:
    """Say how to go on after an interruption; `run_app` then adds nothing."""
    _has_told.set()
    errors.print(text, markup=False)


@contextlib.contextmanager
def told_stopping(text: str) -> Iterator[None]:
    """Say at once that an interruption was heard, as what follows it may take seconds."""

    def tell(number: int, frame: FrameType | None, before: Before) -> None:
        if not _has_told.is_set():
            tell_stopped(f"{text}; once more ends it at once")
        before(number, frame)

    with interruptions_to(tell):
        yield


def _terminate(*_: object) -> None:
    _is_terminated.set()
    sys.exit(TERMINATED)


def _is_termination(end: SystemExit) -> bool:
    # In `ray.get` it becomes SystemExit(1); while Ray connects, its own handler gives the number.
    return _is_terminated.is_set() or end.code == int(signal.SIGTERM)


def emit(document: Any, as_json: bool, show: Callable[[], None]) -> None:
    """Print a result: as JSON for scripts, else by `show` for people."""
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2, sort_keys=True, default=str) + "\n")
    else:
        show()


def table(title: str, columns: list[str], rows: list[list[Any]]) -> Table:
    """A plain table of values."""
    made = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in columns:
        # A path or digest that is cut cannot be copied.
        made.add_column(column, overflow="fold")
    for row in rows:
        # A text from a run or a model may look like markup; it is none.
        made.add_row(*("" if value is None else escape(str(value)) for value in row))
    return made


def print_lines(columns: list[str], rows: list[list[str]], *, is_cut: bool = False) -> None:
    """A table of one line for each row, whatever its length: to be copied, or read by grep and awk.

    With `is_cut` the last column is cut on a terminal to what fits.
    """
    if is_cut:  # What came with line breaks becomes one line as well.
        rows = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    room = max(widths[-1], len(columns[-1]))
    if is_cut and console.is_terminal:
        room = max(_SHORTEST, console.width - sum(width + 2 for width in widths[:-1]))
    for row, style in [(columns, "bold"), *((row, "") for row in rows)]:
        if any(row):
            cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
            line = "  ".join([*cells, _cut(row[-1], room)]).rstrip()
            console.print(line, style=style, markup=False, soft_wrap=True)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def run_app(app: Callable[[], None]) -> None:
    """Run the command line; a user's mistake ends in one message and its exit code.

    SIGTERM ends it as Ctrl-C does: what was begun is taken down, a run says that it was stopped.
    """
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED and not _has_told.is_set():
            errors.print("interrupted")
        raise SystemExit(TERMINATED if _is_termination(end) else end.code) from None
    except EagleRayError as error:
        _fail(error)
    except KeyboardInterrupt:
        if not _has_told.is_set():
            errors.print("interrupted")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away, as `| head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _fail(error: EagleRayError) -> None:
    logger.debug("where it was raised", exc_info=error)
    errors.print("[bold red]error:[/] ", end="")
    errors.print(error.what, markup=False)
    if error.fix:
        errors.print(f"  next: {error.fix}", markup=False)
    sys.exit(error.exit_code)
