"""One endpoint under uvicorn alone and under Ray Serve: the official client, floods, tricks."""

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from ray.serve.generated import serve_pb2, serve_pb2_grpc

from eagleray.platform.config import LoadedConfig
from eagleray.platform.storage import Storage
from eagleray.serve.api.keys import KeyStore
from eagleray.serve.spec import resolve

pytestmark = [pytest.mark.timeout(300)]

LONG = {"max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True}}
PROMPTS = [f"the {word} dog {i}" for i in range(4) for word in ("quick", "lazy", "\u6771", "")]


@dataclass(frozen=True)
class Place:
    """A running endpoint and how to reach it."""

    kind: str
    url: str
    key: str
    digest: str

    def client(self, key: str | None = None) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key or self.key, max_retries=0, timeout=120
        )

    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120, trust_env=False)

    def metric(self, name: str) -> float:
        with self.http() as http:
            shown = http.get("/metrics").text
        found = re.search(rf"^eagleray_serve_{re.escape(name)} ([0-9.e+]+)$", shown, re.MULTILINE)
        return float(found[1]) if found else 0.0


@pytest.fixture(scope="module")
def loaded(
    tmp_path_factory: pytest.TempPathFactory, make_project: Callable[..., LoadedConfig]
) -> LoadedConfig:
    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module", params=["uvicorn", pytest.param("ray", marks=pytest.mark.cluster)])
def place(
    request: pytest.FixtureRequest,
    loaded: LoadedConfig,
    register_tiny: Callable[..., str],
    served_locally: Callable[..., Any],
) -> Iterator[Place]:
    storage = Storage(loaded.storage_path)
    digest = register_tiny(storage, seed=0)
    key = KeyStore(storage).create(request.param)
    if request.param == "uvicorn":
        with served_locally(loaded) as url:
            yield Place("uvicorn", url, key, digest)
        return
    request.getfixturevalue("ray_cluster")
    from eagleray.serve.deployment import deploy, undeploy

    endpoint = deploy(loaded)
    assert (endpoint.model, endpoint.digest) == (resolve(loaded).name + "@1", digest)
    try:
        yield Place("ray", endpoint.url, key, digest)
    finally:
        undeploy()


def complete(client: openai.OpenAI, prompt: str, **fields: Any) -> str:
    answer = client.completions.create(
        model="tiny", prompt=prompt, **{"max_tokens": 24, "temperature": 0, **fields}
    )
    return answer.choices[0].text


def stream(client: openai.OpenAI, prompt: str) -> str:
    chunks = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=24, temperature=0, stream=True
    )
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def test_the_official_client_gets_the_same_text_whole_and_streamed(place: Place) -> None:
    with place.client() as client:
        whole = complete(client, PROMPTS[0])
        assert whole
        assert stream(client, PROMPTS[0]) == whole


def test_the_official_client_chats_with_usage_and_digest(place: Place) -> None:
    with place.client() as client:
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "the fox"}]}
        raw = client.chat.completions.with_raw_response.create(**asked, max_tokens=6, temperature=0)
        answer = raw.parse()
        chunks = list(
            client.chat.completions.create(
                **asked, max_tokens=6, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
    assert raw.headers["x-model-digest"] == answer.system_fingerprint == place.digest
    # One id, not one of ours beside one of the proxy's.
    assert "," not in raw.headers["x-request-id"]
    assert float(raw.headers["x-ttft-ms"]) > 0
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == answer.choices[0].message.content
    assert answer.usage is not None
    assert chunks[-1].usage == answer.usage
    assert answer.usage.completion_tokens <= 6


def test_sixteen_at_once_get_what_each_gets_alone(place: Place) -> None:
    with place.client() as client, ThreadPoolExecutor(16) as pool:
        alone = [complete(client, prompt) for prompt in PROMPTS]
        whole = pool.map(lambda prompt: complete(client, prompt), PROMPTS[::2])
        streamed = pool.map(lambda prompt: stream(client, prompt), PROMPTS[1::2])
        assert list(whole) == alone[::2]
        assert list(streamed) == alone[1::2]
    assert place.metric("kv_free_blocks") == place.metric("kv_blocks")


def test_a_wrong_or_missing_key_is_an_authentication_error(place: Place) -> None:
    with place.client("er-wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert httpx.get(f"{place.url}/v1/models", trust_env=False).status_code == 401


def test_the_official_client_sees_refusals_as_its_own_errors(place: Place) -> None:
    with place.client() as client:
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-4", prompt="x")
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, "x", max_tokens=100_000)
        assert caught.value.param == "max_tokens"
        with pytest.raises(openai.BadRequestError, match="context of 512"):
            complete(client, "fox " * 2000)
        with pytest.raises(openai.APIStatusError) as too_large:
            complete(client, "x" * 200_000)
        assert too_large.value.status_code == 413


def test_more_requests_than_places_are_answered_429_and_the_rest_are_served(place: Place) -> None:
    def ask(client: openai.OpenAI) -> str:
        try:
            complete(client, "fox", **LONG)
        except openai.RateLimitError as error:
            return f"retry after {error.response.headers['retry-after']}"
        return "served"

    with place.client() as client, ThreadPoolExecutor(48) as pool:
        outcomes = list(pool.map(lambda _: ask(client), range(48)))
    refusals = [outcome for outcome in outcomes if outcome != "served"]
    assert 0 < len(refusals) <= 32
    assert all(int(refusal.removeprefix("retry after ")) >= 1 for refusal in refusals)
    assert place.metric("kv_free_blocks") == place.metric("kv_blocks")


def test_a_client_that_leaves_a_stream_frees_its_blocks(
    place: Place, until: Callable[..., None]
) -> None:
    name = 'finished_requests_total{reason="cancelled"}'
    before = place.metric(name)
    body = {"model": "tiny", "prompt": "fox", "stream": True, "ignore_eos": True, "n": 2,
            "max_tokens": 450}  # fmt: skip
    with place.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        assert next(answer.iter_lines()).startswith("data: ")
    until(lambda: place.metric(name) == before + 2, "the end of both choices")
    assert place.metric("kv_free_blocks") == place.metric("kv_blocks")
    assert place.metric("running_requests") == 0


def test_many_clients_that_leave_at_any_time_leave_nothing_behind(
    place: Place, until: Callable[..., None]
) -> None:
    async def leave(number: int) -> None:
        headers = {"Authorization": f"Bearer {place.key}"}
        body = {"model": "tiny", "prompt": "fox", "max_tokens": 300, "ignore_eos": True,
                "stream": number % 2 == 0}  # fmt: skip
        async with httpx.AsyncClient(base_url=place.url, headers=headers, trust_env=False) as http:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02 * number):
                    await http.post("/v1/completions", json=body, timeout=60)

    async def leave_all() -> None:
        await asyncio.gather(*(leave(number) for number in range(12)))

    asyncio.run(leave_all())
    until(lambda: place.metric("running_requests") + place.metric("waiting_requests") == 0, "idle")
    assert place.metric("kv_free_blocks") == place.metric("kv_blocks")


SPELLINGS = [
    b"/METRICS", b"//metrics", b"/metrics/", b"/./metrics", b"/healthz/../metrics", b"/%6detrics",
    b"/metrics?x", b"/HEALTHZ", b"//healthz", b"/healthz/", b"/%68ealthz", b"/healthz/../v1/models",
    b"/v1/models", b"/v1//models", b"/v1/models/tiny", b"/docs", b"/openapi.json", b"/",
    b"http://test/metrics", b"/-/../metrics", b"/-/healthz/../../metrics",
]  # fmt: skip


@pytest.mark.parametrize("path", SPELLINGS, ids=repr)
def test_no_spelling_of_a_path_on_the_wire_opens_it(place: Place, path: bytes) -> None:
    host, port = place.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    status = int(reply.split(b" ", 2)[1])
    assert status in (400, 401, 404)
    assert b"eagleray_serve_" not in reply
    assert place.digest.encode() not in reply


def test_only_the_listed_paths_are_open(place: Place) -> None:
    for path in ("/healthz", "/readyz"):
        assert httpx.get(place.url + path, trust_env=False).status_code == 200
    # Ray Serve's own, in front of every application: neither says more than that it runs.
    if place.kind == "ray":
        assert httpx.get(f"{place.url}/-/healthz", trust_env=False).text == "success"
        assert httpx.get(f"{place.url}/-/routes", trust_env=False).json() == {"/": "eagleray"}


def test_a_deadline_is_answered_504(
    loaded: LoadedConfig,
    register_tiny: Callable[..., str],
    with_serve: Callable[..., LoadedConfig],
    served_locally: Callable[..., Any],
) -> None:
    register_tiny(Storage(loaded.storage_path), seed=0)
    hasty = with_serve(loaded, require_key=False, request_timeout_s=0.1)
    with served_locally(hasty) as url:
        body = {"model": "tiny", "prompt": "fox", "max_tokens": 500, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"


def listening(*, everywhere: bool) -> dict[str, int]:
    """Port by socket of what listens on this machine: on every interface, or on loopback."""
    found = {}
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and (set(address) == {"0"}) == everywhere:
                found[f"socket:[{fields[9]}]"] = int(port, 16)
    return found


def replica_ports(*, everywhere: bool) -> set[int]:
    """Ports of replicas on this machine."""
    sockets, ports = listening(everywhere=everywhere), set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cmdline").read_bytes().startswith(b"ray::ServeReplica:eagleray"):
                links = [str(link.readlink()) for link in (process / "fd").iterdir()]
                ports |= {sockets[link] for link in links if link in sockets}
    return ports


@pytest.mark.parametrize("place", ["ray"], indirect=True)
def test_what_replicas_open_is_on_loopback_and_refuses_callers_without_the_clusters_token(
    place: Place,
) -> None:
    assert replica_ports(everywhere=True) == set()
    # Ray Serve unpickles what it gets there: whoever may speak to it may run code.
    codes = set()
    for port in replica_ports(everywhere=False):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = serve_pb2_grpc.ASGIServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.HandleRequest(serve_pb2.ASGIRequest(), timeout=20)
        codes.add(caught.value.code())
    # A port of Ray itself does not know this service.
    assert grpc.StatusCode.UNAUTHENTICATED in codes
    assert codes <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
