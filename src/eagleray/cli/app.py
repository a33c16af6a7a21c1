"""The command line: it only gathers the verbs; each group's module says what its verbs do."""

from typing import Annotated

import typer

from eagleray import __version__
from eagleray.cli import (
    bench,
    chaos,
    checkpoints,
    cluster,
    data,
    jobs,
    models,
    project,
    report,
    serve,
    train,
    tune,
)
from eagleray.cli.console import console, run_app
from eagleray.platform.telemetry import configure_logging

app = typer.Typer(
    name="eagleray",
    help="Raw text to a served model on your own Ray cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
groups = (
    project, cluster, data, tune, train, checkpoints, report, models, serve, bench, jobs, chaos
)  # fmt: skip
for group in groups:
    group.register(app)


@app.callback()
def common(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what happens, on standard error.")
    ] = False,
) -> None:
    """Raw text to a served model on your own Ray cluster."""
    configure_logging(verbose)


@app.command()
def version() -> None:
    """Print the version."""
    console.print(f"eagleray {__version__}")


def main() -> None:
    """Entry point of the `eagleray` script."""
    run_app(app)
