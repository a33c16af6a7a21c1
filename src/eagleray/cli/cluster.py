"""Verbs of the cluster: up, down, status."""

import shlex
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from eagleray.cli.console import ConfigOption, DryRunOption, JsonOption, console, emit, table
from eagleray.platform.config import CONFIG_NAME, LoadedConfig, load_config


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(up)
    app.command()(down)
    app.command()(status)


def up(
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Start a Ray cluster on this machine, or the one that cluster.launcher describes.

    It outlives this command: stop it with `eagleray down`. Inside the project's folder every verb
    finds it.

    Example: eagleray up
    """
    from eagleray.platform import cluster

    loaded = load_config(config)
    if loaded.config.cluster.launcher is not None:
        _launch(loaded, "up", as_json, dry_run)
        return
    if dry_run:
        chosen = loaded.config.cluster
        plan = chosen.model_dump(include={"num_cpus", "num_gpus", "object_store_bytes"})
        emit(plan, as_json, lambda: console.print(f"would start a Ray head here: {plan}"))
        return
    started_s = time.monotonic()
    state, is_new = cluster.up(loaded)
    took_s = time.monotonic() - started_s

    def show() -> None:
        verb = f"cluster is up ({took_s:.1f} s)" if is_new else "cluster is already running"
        console.print(f"{verb}: {state.address}, dashboard {state.dashboard_url}", markup=False)
        console.print("next: eagleray train, eagleray submit -- train, or eagleray status")

    emit({**asdict(state), "started": is_new}, as_json, show)


def down(
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Stop the cluster that `eagleray up` started: its jobs first, then every process of it.

    Example: eagleray down
    """
    from eagleray.platform import cluster

    loaded = load_config(config)
    if loaded.config.cluster.launcher is not None:
        _launch(loaded, "down", as_json, dry_run)
        return
    if dry_run:
        found = cluster.status(loaded)
        told = found.state.address if found.state else "nothing: no cluster is up"
        emit({"phase": found.phase}, as_json, lambda: console.print(f"would stop {told}"))
        return
    stopped = cluster.down(loaded, lambda state: _stop_jobs(loaded, state))
    emit(
        {"stopped": stopped is not None, "address": stopped.address if stopped else None},
        as_json,
        lambda: console.print(
            f"stopped the cluster at {stopped.address}" if stopped else "no cluster is up"
        ),
    )


def status(
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
    env: Annotated[
        bool,
        typer.Option("--env", help="Print the exports by which plain `ray` finds the cluster."),
    ] = False,
) -> None:
    """Tell whether the cluster is up, what it has, and what of that is free.

    Example: eagleray status --json
    """
    from eagleray.platform import cluster

    loaded = load_config(config)
    if loaded.config.cluster.address is not None:
        _attached_status(loaded, as_json)
        return
    found = cluster.status(loaded)
    if env:
        _exports(found)
        return
    document: dict[str, Any] = {
        "phase": found.phase,
        "cluster": asdict(found.state) if found.state else None,
        "nodes": list(found.nodes),
        "resources": {
            name: {"used": used, "total": total}
            for name, (used, total) in (found.usage or {}).items()
        },
        "reason": found.reason,
    }
    emit(document, as_json, lambda: _show(found))


def _show(found: Any) -> None:
    told = {
        "none": "no cluster is up; start one with `eagleray up`",
        "dead": "the cluster has died; clean up with `eagleray down`, or start anew: `eagleray up`",
        "silent": f"the cluster runs but does not answer: {found.reason}",
        "elsewhere": f"the cluster runs on {found.state.host}" if found.state else "",
        "up": "the cluster is up",
    }[found.phase]
    console.print(told, markup=False)
    state = found.state
    if state is None:
        return
    versions = ", ".join(f"{name} {version}" for name, version in asdict(state.versions).items())
    rows = [
        ["address", state.address],
        ["dashboard", state.dashboard_url],
        ["token", state.token_file],
        ["folder", state.folder],
        ["versions", versions],
        ["up for", str(timedelta(seconds=round(time.time() - state.started_s)))],
        ["nodes", len(found.nodes)],
        *_resource_rows(found),
    ]
    made = table("", ["", ""], rows)
    made.show_header = False
    console.print(made)


def _resource_rows(found: Any) -> list[list[Any]]:
    if found.usage:
        return [
            [name, f"{total - used:g} of {total:g} free"]
            for name, (used, total) in sorted(found.usage.items())
            if name in ("CPU", "GPU")
        ]
    totals: dict[str, float] = {}
    for node in found.nodes:
        for name in ("CPU", "GPU"):
            totals[name] = totals.get(name, 0.0) + node["resources_total"].get(name, 0.0)
    return [[name, f"{total:g}"] for name, total in totals.items() if total]


def _attached_status(loaded: LoadedConfig, as_json: bool) -> None:
    from eagleray.platform.cluster import session

    with session(loaded) as info:
        nodes, free = info.nodes(), {node.name: node for node in info.free()}
    rows = [
        [n.name[:12], n.cpus, free[n.name].cpus, n.gpus, free[n.name].gpus]
        for n in nodes
        if n.name in free
    ]
    document = {
        "phase": "attached",
        "cluster": {"address": info.address, "dashboard_url": info.dashboard_url},
        "nodes": [asdict(node) for node in nodes],
        "free": [asdict(node) for node in free.values()],
    }
    columns = ["node", "CPU", "free", "GPU", "free"]
    emit(
        document,
        as_json,
        lambda: console.print(table(f"cluster at {info.address}", columns, rows)),
    )


def _exports(found: Any) -> None:
    if found.state is None:
        console.print("# no cluster is up")
        return
    variables = {
        "RAY_ADDRESS": found.state.address,
        "RAY_API_SERVER_ADDRESS": found.state.dashboard_url,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": found.state.token_file,
        # Without it Ray looks for a loopback cluster at the machine's outer address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    for name, value in variables.items():
        console.print(f"export {name}={shlex.quote(value)}", markup=False, soft_wrap=True)


def _stop_jobs(loaded: LoadedConfig, state: Any) -> None:
    from eagleray.platform import cluster
    from eagleray.platform.jobs import JobRecords, Jobs
    from eagleray.platform.storage import Storage

    if not state.is_alive:
        return
    dashboard = cluster.open_dashboard(state)
    try:
        Jobs(dashboard, JobRecords(Storage(loaded.storage_path))).stop_all()
    finally:
        dashboard.close()


def _launch(loaded: LoadedConfig, verb: str, as_json: bool, dry_run: bool) -> None:
    from eagleray.platform.cluster.launcher import command, run

    argv = command(loaded, verb)
    if dry_run:
        emit({"command": argv}, as_json, lambda: console.print(shlex.join(argv), markup=False))
        return
    run(argv)
    emit({"command": argv, "done": True}, as_json, lambda: console.print(f"ray {verb}: done"))
