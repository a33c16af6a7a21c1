"""Verbs of the endpoint: serve, deploy, undeploy, chat, keys."""

import importlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from eagleray.cli.console import ConfigOption, JsonOption, console, emit, errors, table
from eagleray.platform.config import CONFIG_NAME
from eagleray.platform.errors import UsageError
from eagleray.project import Project

if TYPE_CHECKING:
    from eagleray.serve.api.allowance import KeyLimits
    from eagleray.serve.client import ChatClient
    from eagleray.serve.deployment import Endpoint

ModelAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL] [KEY=VALUE]...", help="name, name@3 or name@prod; then dotted overrides."
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option(envvar="EAGLERAY_API_KEY", show_envvar=True, help="The endpoint's API key."),
]
NameArgument = Annotated[str, typer.Argument(help="What the key is for: laptop, ci, alice.")]
# Longest silence of an endpoint whose configuration is not at hand.
_CHAT_TIMEOUT_S = 120.0
_KEY_VARIABLE = "$EAGLERAY_API_KEY"
_SHOWN_TOKENS = 40


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    for verb in (serve, deploy, undeploy, chat):
        app.command()(verb)
    group = typer.Typer(no_args_is_help=True, help="API keys of the endpoint.")
    group.command("create")(create_key)
    group.command("list")(list_keys)
    group.command("revoke")(revoke_key)
    app.add_typer(group, name="keys")


def serve(arguments: ModelAndOverrides = None, config: ConfigOption = Path(CONFIG_NAME)) -> None:
    """Serve a model in the foreground until Ctrl-C.

    Uses the project's running cluster, or starts a private one that ends with it.

    Example: eagleray serve my-model@prod serve.port=8001
    """
    model, project = _asked(arguments, config)
    from eagleray.serve.address import check_exposure, check_port
    from eagleray.serve.spec import resolve

    settings = project.config.serve
    check_exposure(settings)
    check_port(settings, may_be_ours=True)
    spec = resolve(project.loaded, model)
    console.print(f"starting {spec.name}@{spec.version}", markup=False)
    from eagleray.platform.cluster import Demand, session

    need = Demand(settings.num_replicas, settings.cpus_per_replica, what="replica")
    with (
        _waiting("starting") as show,
        session(project.loaded, need, meanwhile=_import_deployment) as cluster,
    ):
        from eagleray.serve import deployment

        if deployment.is_deployed():
            raise UsageError(
                "the cluster serves a model already, which would end with this command",
                "replace it with `eagleray deploy`, or take it off with `eagleray undeploy`",
            )
        try:
            endpoint = deployment.deploy(project.loaded, model, on_wait=show)
            show("")
            _announce(project, endpoint, deployment.first_key(project.loaded))
            console.print("Ctrl-C stops it", markup=False)
            _wait_for_end()
        finally:
            # A private cluster takes everything with it.
            if not cluster.is_private:
                deployment.undeploy()
    console.print("stopped", markup=False)


def deploy(
    arguments: ModelAndOverrides = None,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Put a model on the running cluster and leave it there; replaces the one that is served.

    Example: eagleray deploy my-model@prod
    """
    model, project = _asked(arguments, config)
    from eagleray.serve.spec import resolve

    resolve(project.loaded, model)
    if not _may_have_cluster(project):
        raise _no_cluster()
    from eagleray.platform.cluster import session

    with session(project.loaded) as cluster:
        if cluster.is_private:
            raise _no_cluster()
        from eagleray.serve import deployment

        with _waiting("starting", quiet=as_json) as show:
            endpoint = deployment.deploy(project.loaded, model, on_wait=show)
        # Only now: a key that a failed deployment made would never have been seen.
        key = deployment.first_key(project.loaded)
    document = {**asdict(endpoint), "key": key}
    emit(document, as_json, lambda: _announce(project, endpoint, key))


def undeploy(config: ConfigOption = Path(CONFIG_NAME), as_json: JsonOption = False) -> None:
    """Take the model that `eagleray deploy` put on the cluster off it.

    Example: eagleray undeploy
    """
    project = Project.load(config)
    was_deployed = False
    if _may_have_cluster(project):
        from eagleray.platform.cluster import session

        with session(project.loaded):
            from eagleray.serve import deployment

            was_deployed = deployment.undeploy()
    told = "took the model off" if was_deployed else "nothing is deployed"
    emit({"undeployed": was_deployed}, as_json, lambda: console.print(told))


def chat(
    model: Annotated[str | None, typer.Argument(help="Without one: what is served.")] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Ask this once and end.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Without one: serve.host, serve.port.")] = None,
    key: KeyOption = None,
    system: Annotated[str | None, typer.Option(help="How the assistant should be.")] = None,
    temperature: Annotated[float, typer.Option(help="0: always the same answer.")] = 0.7,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    config: ConfigOption = Path(CONFIG_NAME),
) -> None:
    """Talk to the endpoint in the terminal; Ctrl-C cuts an answer off, Ctrl-D ends.

    Example: eagleray chat --prompt "What is the capital of France?"
    """
    from eagleray.serve.address import base_url
    from eagleray.serve.client import ChatClient

    address, timeout_s = url, _CHAT_TIMEOUT_S
    if address is None:
        settings = Project.load(config).config.serve
        address, timeout_s = base_url(settings), settings.request_timeout_s
    messages = [{"role": "system", "content": system}] if system else []
    fields = {"temperature": temperature, "max_tokens": max_tokens}
    with ChatClient(address.rstrip("/"), key, timeout_s) as client:
        name = model or client.model()
        if prompt is not None:
            _ask(client, name, messages, prompt, fields)
            return
        console.print(f"{name} at {address}", markup=False)
        for line in _lines():
            try:
                _ask(client, name, messages, line, fields)
            except KeyboardInterrupt:
                console.print()


def create_key(
    name: NameArgument,
    requests_per_s: Annotated[
        float | None, typer.Option(help="Most requests per second, on each replica.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Most requests at once.")] = None,
    tokens_per_min: Annotated[
        int | None, typer.Option(help="Most tokens per minute, of prompts and outputs.")
    ] = None,
    config: ConfigOption = Path(CONFIG_NAME),
    as_json: JsonOption = False,
) -> None:
    """Make a key; it is shown once and kept only as a digest.

    Without limits of its own, those of serve.key_limits hold for it.

    Examples: eagleray keys create laptop
              eagleray keys create partner --requests-per-s 5 --tokens-per-min 20000
    """
    from eagleray.serve.api.allowance import KeyLimits
    from eagleray.serve.api.keys import KeyStore

    limits = KeyLimits(requests_per_s, concurrency, tokens_per_min)
    key = KeyStore(Project.load(config).storage).create(name, limits)
    emit({"name": name, "key": key}, as_json, lambda: _show_key(key))


def list_keys(config: ConfigOption = Path(CONFIG_NAME), as_json: JsonOption = False) -> None:
    """List the keys by name and last four characters.

    Example: eagleray keys list
    """
    from eagleray.serve.api.keys import PREFIX, KeyStore

    keys = KeyStore(Project.load(config).storage).all()
    found = [
        {
            "name": key.name, "last4": key.last4, "created_s": key.created_s,
            **asdict(key.limits),
        }
        for key in keys
    ]  # fmt: skip
    rows: list[list[Any]] = [
        [key.name, f"{PREFIX}...{key.last4}", _when(key.created_s), _limits(key.limits)]
        for key in keys
    ]
    columns = ["name", "key", "made", "limits of its own"]
    emit(found, as_json, lambda: console.print(table("keys", columns, rows)))


def revoke_key(name: NameArgument, config: ConfigOption = Path(CONFIG_NAME)) -> None:
    """Make a key worthless, from the next request on.

    Example: eagleray keys revoke laptop
    """
    from eagleray.serve.api.keys import KeyStore

    KeyStore(Project.load(config).storage).revoke(name)
    console.print(f"revoked {name}", markup=False)


def _import_deployment() -> None:
    """Seconds, most of them torch's and Ray Serve's."""
    importlib.import_module("eagleray.serve.deployment")


@contextmanager
def _waiting(what: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says what is waited for and since when; empty text ends it."""
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    started_s = time.monotonic()
    with console.status(what) as line:

        def show(text: str) -> None:
            if not text:
                line.stop()
                return
            line.update(escape(f"{what}: {text} ({time.monotonic() - started_s:.0f} s)"))

        yield show


def _asked(arguments: list[str] | None, config: Path) -> tuple[str | None, Project]:
    """The model and the project with its overrides; a word without `=` is the model."""
    words = arguments or []
    models = [word for word in words if "=" not in word]
    if len(models) > 1:
        raise UsageError(f"{len(models)} models were named: {', '.join(models)}", "name one")
    project = Project.load(config, [word for word in words if "=" in word])
    return (models[0] if models else None), project


def _may_have_cluster(project: Project) -> bool:
    """Whether `session` may find a cluster: to start a private one only to refuse takes long."""
    from eagleray.platform.cluster import status

    # A job finds its cluster by Ray's variables.
    if project.config.cluster.address is not None or "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return True
    return status(project.loaded).phase not in ("none", "dead")


def _no_cluster() -> UsageError:
    return UsageError(
        "no cluster is running, so nothing could stay deployed",
        "start one with `eagleray up`, or serve in the foreground with `eagleray serve`",
    )


def _announce(project: Project, endpoint: "Endpoint", key: str | None) -> None:
    console.print(f"{endpoint.model} answers at {endpoint.url}/v1", markup=False)
    console.print(f"  digest {endpoint.digest}", markup=False, soft_wrap=True)
    if key:
        _show_key(key)
    header = ""
    if project.config.serve.require_key:
        header = f' -H "Authorization: Bearer {key or _KEY_VARIABLE}"'
    name = endpoint.model.partition("@")[0]
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": name, "messages": messages, "max_tokens": _SHOWN_TOKENS})
    line = (
        f"curl {endpoint.url}/v1/chat/completions{header} "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )
    console.print(f"  {line}", markup=False, soft_wrap=True)
    if project.config.serve.require_key and not key:
        told = f"{_KEY_VARIABLE} stands for a key; make one with `eagleray keys create NAME`"
        console.print(f"  {told}", markup=False)


def _show_key(key: str) -> None:
    console.print(f"  key {key}", markup=False, soft_wrap=True)
    console.print("  it is not shown again; `eagleray keys` makes and revokes them", markup=False)


def _wait_for_end() -> None:
    end = threading.Event()
    # SIGTERM is how a supervisor says Ctrl-C.
    before = signal.signal(signal.SIGTERM, lambda *_: end.set())
    try:
        while not end.wait(1.0):
            continue
    except KeyboardInterrupt:
        errors.print("stopping")
    finally:
        signal.signal(signal.SIGTERM, before)


def _ask(
    client: "ChatClient",
    model: str,
    messages: list[dict[str, str]],
    text: str,
    fields: dict[str, Any],
) -> None:
    """Ask, show the answer as it comes, and remember both; what is cut off is forgotten."""
    asked = [*messages, {"role": "user", "content": text}]
    answer = ""
    for piece in client.chat(model, asked, **fields):
        answer += piece
        console.print(piece, end="", markup=False, soft_wrap=True)
    console.print()
    messages[:] = [*asked, {"role": "assistant", "content": answer}]


def _lines() -> Iterator[str]:
    while True:
        try:
            line = console.input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line:
            yield line


def _limits(limits: "KeyLimits") -> str:
    told = {
        "requests/s": limits.requests_per_s, "at once": limits.concurrency,
        "tokens/min": limits.tokens_per_min,
    }  # fmt: skip
    return ", ".join(f"{value:g} {what}" for what, value in told.items() if value is not None)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
