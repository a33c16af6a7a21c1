"""Verbs of jobs: submit, ps, logs, stop."""

import contextlib
import difflib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagleray.cli.console import (
    INTERRUPTED,
    ConfigOption,
    DryRunOption,
    JsonOption,
    console,
    emit,
    print_lines,
    table,
    tell_stopped,
)
from eagleray.platform.config import CONFIG_NAME, LoadedConfig, load_config
from eagleray.platform.errors import NotFoundError, RunFailedError, UsageError
from eagleray.platform.storage import Storage

if TYPE_CHECKING:
    from eagleray.platform.jobs import Job, JobRecords, Jobs, Shipment

AddressOption = Annotated[
    str | None,
    typer.Option("--address", help="Dashboard of another cluster: http://host:8265"),
]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="See `eagleray ps`.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(submit)
    app.command()(ps)
    app.command()(logs)
    app.command()(stop)


def submit(
    context: typer.Context,
    arguments: Annotated[
        list[str], typer.Argument(metavar="-- VERB [ARGUMENT]...", help="What to run there.")
    ],
    config: ConfigOption = Path(CONFIG_NAME),
    address: AddressOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Show what it prints until it ends.")
    ] = False,
    num_cpus: Annotated[
        float, typer.Option(min=0, help="CPUs set aside for the verb's own process.")
    ] = 0.0,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Run a verb as a Ray job on the cluster; it goes on when this terminal closes.

    This Eagleray and the project's file are sent along; storage and data are reached by the same
    absolute paths there as here.

    Example: eagleray submit -- train train.steps=50
    """
    import eagleray
    from eagleray.platform.jobs import prepare

    loaded = load_config(config)
    shipment = prepare(loaded, arguments, Path(eagleray.__file__).parent)
    _check_verb(context, shipment.arguments[0])
    # A mistake in an override is told here, not by a job that fails a while later.
    load_config(config, shipment.overrides)
    if dry_run:
        _show_shipment(shipment, as_json)
        return
    with _jobs(loaded, address) as jobs:
        job = jobs.submit(shipment, num_cpus)
        if not follow:
            emit(job.as_json(), as_json, lambda: _say_submitted(job))
            return
        console.print(f"job {job.job_id}: {job.command}", markup=False)
        _follow(jobs, job.job_id)


def ps(
    config: ConfigOption = Path(CONFIG_NAME),
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the jobs of the cluster and the project's runs, newest first.

    Example: eagleray ps
    """
    from eagleray.platform.jobs import JobRecords

    loaded = load_config(config)
    records = JobRecords(Storage(loaded.storage_path))
    known, asked = [], ""
    # Without a cluster, what is recorded can still be told.
    with contextlib.suppress(NotFoundError), _jobs(loaded, address) as jobs:
        known, asked = jobs.all(), jobs.url
    live = {job.job_id for job in known}
    past = [_settled(records, job, asked) for job in records.all() if job.job_id not in live]
    rows = [_job_row(job) for job in [*known, *past]] + _run_rows(loaded)
    rows.sort(key=lambda row: row["created_s"], reverse=True)
    columns = ["id", "kind", "status", "started", "message"]
    shown = [
        [row["id"], row["kind"], row["status"], _clock(row["created_s"]), row["message"]]
        for row in rows
    ]

    def show() -> None:
        if not rows:
            console.print("no jobs and no runs yet")
            return
        print_lines(columns, shown, is_cut=True)

    emit(rows, as_json, show)


def logs(
    job_id: IdArgument,
    config: ConfigOption = Path(CONFIG_NAME),
    address: AddressOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job ends.")
    ] = False,
) -> None:
    """Print what a job has printed; after its cluster is gone, what was kept of it.

    Example: eagleray logs -f train-7f3k2p
    """
    from eagleray.platform.jobs import JobRecords

    loaded = load_config(config)
    _refuse_run(loaded, job_id)
    try:
        with _jobs(loaded, address) as jobs:
            if follow:
                _follow(jobs, job_id)
            else:
                sys.stdout.write(jobs.log(job_id))
    except NotFoundError:
        records = JobRecords(Storage(loaded.storage_path))
        job = records.get(job_id)
        kept = records.log(job_id)
        if kept is None:
            raise NotFoundError(
                f"job {job_id} ({job.status}) has left no log",
                "logs are kept by `logs`, `stop` and `down` while the cluster is up",
            ) from None
        sys.stdout.write(kept)


def stop(
    job_id: IdArgument,
    config: ConfigOption = Path(CONFIG_NAME),
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a job: it is asked to end, and killed if it does not.

    Example: eagleray stop train-7f3k2p
    """
    loaded = load_config(config)
    _refuse_run(loaded, job_id)
    with _jobs(loaded, address) as jobs:
        job = jobs.stop(job_id)
    emit(
        job.as_json(),
        as_json,
        lambda: console.print(f"job {job.job_id}: {job.status}", markup=False),
    )


@contextlib.contextmanager
def _jobs(loaded: LoadedConfig, address: str | None) -> Iterator["Jobs"]:
    """The jobs of the cluster at an address, else of the configured one, else of ours."""
    from eagleray.platform import cluster
    from eagleray.platform.cluster.dashboard import Dashboard
    from eagleray.platform.cluster.tokens import Access
    from eagleray.platform.jobs import JobRecords, Jobs

    storage, interpreter = Storage(loaded.storage_path), "python"
    if address is not None:
        if not address.startswith(("http://", "https://")):
            raise UsageError(
                f"--address {address!r} is not a dashboard's URL", "for example http://host:8265"
            )
        dashboard = Dashboard(address, Access.from_environment().token)
    elif loaded.config.cluster.address is not None:
        dashboard = _dashboard_of(loaded.config.cluster.address)
    else:
        state = cluster.ClusterRecord(storage).read()
        if state is None or not state.is_alive:
            raise NotFoundError(
                "no cluster is up to take jobs",
                "start one with `eagleray up`, or name one with --address",
            )
        dashboard, interpreter = cluster.open_dashboard(state), sys.executable
    try:
        yield Jobs(dashboard, JobRecords(storage), interpreter)
    finally:
        dashboard.close()


def _dashboard_of(address: str) -> Any:
    from eagleray.platform.cluster.dashboard import Dashboard
    from eagleray.platform.cluster.gcs import look
    from eagleray.platform.cluster.tokens import Access

    token = Access.from_environment().token
    url = look(address, token, timeout_s=5.0).dashboard_url
    if url is None:
        raise NotFoundError(
            f"the cluster at {address} has no dashboard", "start its head with the dashboard on"
        )
    return Dashboard(url, token)


def _refuse_run(loaded: LoadedConfig, run_id: str) -> None:
    """Tell a run from a job: `ps` lists both, and only a job has a log and can be stopped."""
    from eagleray.platform.runs import RunStore

    with contextlib.suppress(NotFoundError):
        state = RunStore(Storage(loaded.storage_path)).state(run_id)
        raise UsageError(
            f"{run_id} is a {state.kind} run ({state.status}), not a job",
            "a run ends with the job or terminal that it runs in; go on with `eagleray resume`",
        )


def _check_verb(context: typer.Context, verb: str) -> None:
    verbs = getattr(context.find_root().command, "commands", {})
    if verb not in verbs:
        near = difflib.get_close_matches(verb, verbs, n=1)
        raise UsageError(
            f"there is no verb {verb!r} to submit" + (f"; did you mean {near[0]}?" if near else ""),
            "see `eagleray --help`",
        )


def _follow(jobs: "Jobs", job_id: str) -> None:
    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        job = jobs.follow(job_id, write)
    except KeyboardInterrupt:
        tell_stopped(f"\ndetached; the job goes on. Come back with: eagleray logs -f {job_id}")
        tell_stopped(f"stop it with: eagleray stop {job_id}")
        raise typer.Exit(INTERRUPTED) from None
    console.print(f"job {job_id}: {job.status}", markup=False)
    if job.status != "finished":
        raise RunFailedError(f"job {job_id} ended as {job.status}: {job.message}")


def _say_submitted(job: "Job") -> None:
    console.print(f"submitted {job.job_id}: {job.command}", markup=False)
    console.print(f"next: eagleray logs -f {job.job_id}, or eagleray ps", markup=False)


def _show_shipment(shipment: "Shipment", as_json: bool) -> None:
    rows = [
        [package.label, name, size] for package in shipment.packages for name, size in package.files
    ]
    document = {
        "arguments": list(shipment.arguments),
        "packages": [
            {"name": p.name, "label": p.label, "bytes": p.num_bytes, "sent_bytes": len(p.data)}
            for p in shipment.packages
        ],
        "files": [{"package": label, "name": name, "bytes": size} for label, name, size in rows],
    }

    def show() -> None:
        console.print(table("would send", ["package", "file", "bytes"], rows))
        for package in shipment.packages:
            console.print(
                f"{package.label}: {len(package.files)} files, {package.num_bytes} bytes, "
                f"{len(package.data)} compressed"
            )

    emit(document, as_json, show)


def _settled(records: "JobRecords", job: "Job", asked: str) -> "Job":
    """A recorded job that the cluster at `asked` does not know: lost if it ran there."""
    is_gone = job.cluster == asked or (not asked and job.cluster.startswith("http://127.0.0.1:"))
    return records.lose(job) if is_gone else job


def _job_row(job: "Job") -> dict[str, Any]:
    return {
        "id": job.job_id,
        "kind": "job",
        "status": str(job.status),
        "created_s": job.created_s,
        "message": job.message or job.command,
    }


def _run_rows(loaded: LoadedConfig) -> list[dict[str, Any]]:
    from eagleray.platform.runs import RunStore

    return [
        {
            "id": state.run_id,
            "kind": state.kind,
            "status": str(state.status),
            "created_s": state.created_s,
            "message": state.message or f"step {state.step} of {state.steps}",
        }
        for state in RunStore(Storage(loaded.storage_path)).all()
    ]


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""
