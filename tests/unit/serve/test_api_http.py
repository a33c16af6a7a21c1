import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

Site = Any
MakeSite = Callable[..., Any]


def letters(oracle: Any, prompt: str, count: int) -> str:
    return bytes(oracle(list(prompt.encode()), count)).decode()


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [
        json.loads(body) if (body := line.removeprefix("data: ")) != "[DONE]" else "[DONE]"
        for line in lines
    ]


def error(response: httpx.Response) -> dict[str, Any]:
    document = response.json()
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = document["error"]
    return found


@pytest.fixture
def site(make_site: MakeSite) -> Site:
    return make_site()


def test_a_completion_has_text_usage_digest_and_timing(site: Site, oracle: Any) -> None:
    response = site.post("/v1/completions", prompt="hello", max_tokens=5, temperature=0)
    document = response.json()
    assert document["object"] == "text_completion"
    assert document["id"].startswith("cmpl-")
    assert document["model"] == "tiny"
    assert document["system_fingerprint"] == "d" * 64
    assert document["choices"] == [
        {"index": 0, "text": letters(oracle, "hello", 5), "logprobs": None,
         "finish_reason": "length"}
    ]  # fmt: skip
    assert document["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert response.headers["x-model-digest"] == "d" * 64
    assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])
    assert float(response.headers["x-ttft-ms"]) >= 0


def test_a_prompt_that_was_there_before_is_told_and_answered_alike(
    make_site: MakeSite, oracle: Any
) -> None:
    site = make_site(keeps_prefixes=True)
    told = []
    for prompt in ("a system prompt: one", "a system prompt: two", "other"):
        response = site.post("/v1/completions", prompt=prompt, max_tokens=5, temperature=0)
        document = response.json()
        assert document["choices"][0]["text"] == letters(oracle, prompt, 5)
        told.append(document["usage"]["prompt_tokens_details"]["cached_tokens"])
    # Blocks of four tokens.
    assert told == [0, 16, 0]
    shown = site.call("GET", "/metrics").text
    assert "eagleray_serve_reused_tokens_total 16.0" in shown
    assert re.search(r"eagleray_serve_kv_kept_blocks [1-9]", shown)


def test_prompts_and_choices_are_numbered_prompt_by_prompt(site: Site, oracle: Any) -> None:
    response = site.post(
        "/v1/completions", prompt=["a", "bb"], n=2, max_tokens=3, top_k=1, seed=1
    )  # fmt: skip
    document = response.json()
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in document["choices"]]
    assert texts == [letters(oracle, prompt, 3) for prompt in ("a", "a", "bb", "bb")]
    # A prompt counts once, whatever n.
    assert document["usage"]["prompt_tokens"] == 3
    assert document["usage"]["completion_tokens"] == 12


def test_a_chat_answers_as_the_assistant(site: Site, oracle: Any) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    response = site.post(
        "/v1/chat/completions", messages=messages, max_tokens=4, temperature=0
    )  # fmt: skip
    document = response.json()
    assert document["object"] == "chat.completion"
    text = letters(oracle, "system:s\nuser:hi\n", 4)
    assert document["choices"][0]["message"] == {
        "role": "assistant", "content": text, "refusal": None,
    }  # fmt: skip


def test_a_stream_joins_to_the_unstreamed_text(site: Site, oracle: Any) -> None:
    response = site.post("/v1/completions", prompt="hi", max_tokens=9, temperature=0, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-model-digest"] == "d" * 64
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == letters(oracle, "hi", 9)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_streamed_usage_comes_once_at_the_end_and_only_if_asked(site: Site) -> None:
    response = site.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=4,
        temperature=0, stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks)
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])


def test_several_streamed_choices_are_told_apart(site: Site, oracle: Any) -> None:
    response = site.post(
        "/v1/completions", prompt=["p", "q"], max_tokens=6, temperature=0, stream=True
    )  # fmt: skip
    texts = {0: "", 1: ""}
    for chunk in events(response)[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: letters(oracle, "p", 6), 1: letters(oracle, "q", 6)}


def test_logprobs_in_the_two_forms(site: Site) -> None:
    response = site.post("/v1/completions", prompt="x", max_tokens=2, temperature=0, logprobs=2)
    found = response.json()["choices"][0]["logprobs"]
    assert len(found["tokens"]) == 2
    assert found["text_offset"] == [0, 1]
    assert max(found["top_logprobs"][0].values()) == pytest.approx(found["token_logprobs"][0])
    response = site.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=1,
        temperature=0, logprobs=True, top_logprobs=3,
    )  # fmt: skip
    entry = response.json()["choices"][0]["logprobs"]["content"][0]
    assert entry["bytes"] == list(entry["token"].encode())
    assert len(entry["top_logprobs"]) == 3


def test_nothing_of_a_stop_string_is_sent(site: Site) -> None:
    script = list(b"one STOP two")
    site.rig.model.script = lambda context: script[len(context) - 1]
    body = {"prompt": "x", "max_tokens": 12, "temperature": 0, "stop": " STOP", "logprobs": 0}
    whole = site.post("/v1/completions", **body).json()["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == ("one", "stop")
    assert whole["logprobs"]["tokens"] == ["o", "n", "e"]
    chunks = events(site.post("/v1/completions", stream=True, **body))[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": [999999]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": "x" * 500}, 400, "prompt"),
        ({"prompt": "x", "max_tokens": 10**6}, 400, "max_tokens"),
        ({"prompt": "x", "temperature": 9}, 400, "temperature"),
        ({"prompt": "x", "unheard_of": 1}, 400, "unheard_of"),
        ({"prompt": "x", "\ud800": 1}, 400, "\\ud800"),
        ({"prompt": "x", "model": "gpt-4"}, 404, "model"),
    ],
)
def test_what_the_model_cannot_do_is_refused_in_openais_shape(
    site: Site, body: dict[str, Any], status: int, param: str
) -> None:
    response = site.post("/v1/completions", **body)
    assert response.status_code == status
    assert error(response)["param"] == param
    assert error(response)["type"] == "invalid_request_error"
    assert site.rig.engine.stats().num_steps == 0


@pytest.mark.parametrize("prompt", [[256], [256, 256], " ", "\n\t"])
def test_prompts_of_control_tokens_or_white_space_are_answered(site: Site, prompt: Any) -> None:
    assert site.post("/v1/completions", prompt=prompt, max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"temperature": NaN}', "application/json", 400),
        (b'{"a":' + b"[" * 100_000, "application/json", 413),
        (b'{"a":' + b"[" * 9000, "application/json", 400),
        (b'{"seed":' + b"9" * 5000 + b"}", "application/json", 400),
        (b"\xff", "application/json", 400),
        (b"model=tiny", "application/x-www-form-urlencoded", 415),
    ],
)
def test_bodies_that_are_no_bounded_json_object_are_refused(
    site: Site, content: bytes, kind: str, status: int
) -> None:
    response = site.call(
        "POST", "/v1/completions", content=content, headers={"content-type": kind}
    )  # fmt: skip
    assert response.status_code == status
    assert error(response)["message"]


def test_a_body_that_hides_its_length_is_cut_off_at_the_limit(site: Site) -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 1000

    response = site.call(
        "POST", "/v1/completions", content=endless(), headers={"content-type": "application/json"}
    )
    assert response.status_code == 413


def test_long_headers_and_paths_are_refused(site: Site) -> None:
    assert site.call("GET", "/healthz", headers={"x-junk": "a" * 20_000}).status_code == 431
    assert site.call("GET", "/healthz?" + "a" * 3000).status_code == 414


def test_a_full_queue_answers_429_with_retry_after(make_site: MakeSite) -> None:
    site = make_site(open_gate=False, max_running=1, max_queued=0)
    site.rig.engine.submit([[1]], _params())
    response = site.post("/v1/completions", prompt="x")
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert error(response)["code"] == "queue_full"


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_answers_504_even_to_a_stream_that_has_not_begun(
    make_site: MakeSite, stream: bool
) -> None:
    site = make_site(open_gate=False, timeout_s=5.0)

    async def ask() -> httpx.Response:
        asking = asyncio.create_task(
            site.acall(
                "POST", "/v1/completions", json={"model": "tiny", "prompt": "x", "stream": stream}
            )
        )
        await asyncio.to_thread(site.rig.model.entered.wait, 20)
        site.rig.now[0] = 6.0
        site.rig.model.gate.set()
        return await asking

    site.rig.model.script = lambda _: 256 if site.rig.now[0] < 6.0 else 0xE6
    response = asyncio.run(ask())
    assert response.status_code == 504
    assert error(response)["code"] == "deadline_exceeded"
    assert site.rig.engine.stats().num_free_blocks == 64


def test_a_failed_step_answers_500_without_its_insides(site: Site) -> None:
    site.rig.model.failures = 1
    response = site.post("/v1/completions", prompt="x")
    assert response.status_code == 500
    assert error(response)["type"] == "server_error"
    assert "scripted" not in response.text


def test_a_stopped_engine_is_unready_and_answers_503(site: Site) -> None:
    assert site.call("GET", "/readyz").status_code == 200
    site.rig.engine.shutdown(10)
    for path in ("/readyz", "/healthz"):
        assert site.call("GET", path).status_code == 503
    response = site.post("/v1/completions", prompt="x")
    assert response.status_code == 503
    assert response.headers["retry-after"]


def test_the_model_is_listed_with_its_digest_and_length(site: Site) -> None:
    listed = site.call("GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == "tiny"
    assert listed["data"][0]["digest"] == "d" * 64
    assert listed["data"][0]["max_model_len"] == 128
    assert site.call("GET", "/v1/models/tiny@3").json() == listed["data"][0]
    assert error(site.call("GET", "/v1/models/other"))["code"] == "model_not_found"


def test_metrics_show_what_the_engine_did(site: Site) -> None:
    site.post("/v1/completions", prompt="hello", max_tokens=5, temperature=0)
    shown = site.call("GET", "/metrics").text
    assert "eagleray_serve_output_tokens_total 5.0" in shown
    assert "eagleray_serve_kv_free_blocks 64.0" in shown
    assert 'eagleray_serve_finished_requests_total{reason="length"} 1.0' in shown
    assert 'eagleray_serve_responses_total{route="/v1/completions",status="200"} 1.0' in shown
    assert "eagleray_serve_ttft_seconds_count 1.0" in shown


def test_a_given_request_id_comes_back_if_it_is_a_plain_word(site: Site) -> None:
    given = site.call("GET", "/v1/models", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    strange = site.call("GET", "/v1/models", headers={"x-request-id": "a b<c>"})
    assert strange.headers["x-request-id"] != "a b<c>"


def _params() -> Any:
    from eagleray.serve.engine import SamplingParams

    return SamplingParams(temperature=0, max_tokens=3)
