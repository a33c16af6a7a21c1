"""What a key may use, on a clock of the test."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagleray.platform.errors import UsageError
from eagleray.platform.storage import Storage
from eagleray.serve.api.allowance import Allowances, KeyLimits
from eagleray.serve.api.keys import KeyStore
from eagleray.serve.api.refusal import ApiError


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def allowances(clock: Clock) -> Allowances:
    return Allowances(clock)


def refused(allowances: Allowances, name: str, limits: KeyLimits) -> ApiError:
    with pytest.raises(ApiError) as caught:
        allowances.enter(name, limits)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    assert repr(name) in caught.value.what
    return caught.value


def test_requests_per_second_are_a_bucket_of_a_second(allowances: Allowances, clock: Clock) -> None:
    limits = KeyLimits(requests_per_s=3)
    for _ in range(3):
        allowances.enter("a", limits)
    assert refused(allowances, "a", limits).headers["Retry-After"] == "1"
    allowances.enter("b", limits)
    clock.now_s += 0.34
    allowances.enter("a", limits)
    refused(allowances, "a", limits)
    clock.now_s += 100
    for _ in range(3):
        allowances.enter("a", limits)
    refused(allowances, "a", limits)


def test_less_than_one_request_per_second_is_possible(allowances: Allowances, clock: Clock) -> None:
    limits = KeyLimits(requests_per_s=0.1)
    allowances.enter("a", limits)
    clock.now_s += 4
    assert refused(allowances, "a", limits).headers["Retry-After"] == "6"
    clock.now_s += 6
    allowances.enter("a", limits)


def test_concurrency_is_free_again_when_a_request_leaves_and_once_only(
    allowances: Allowances,
) -> None:
    limits = KeyLimits(concurrency=2)
    first, _ = allowances.enter("a", limits), allowances.enter("a", limits)
    assert "2 requests at once" in refused(allowances, "a", limits).what
    first.leave(5)
    first.leave(5)
    allowances.enter("a", limits)
    assert "2 requests at once" in refused(allowances, "a", limits).what


def test_tokens_are_paid_when_an_answer_ends_and_debts_are_waited_for(
    allowances: Allowances, clock: Clock
) -> None:
    limits = KeyLimits(tokens_per_min=600)
    visits = [allowances.enter("a", limits) for _ in range(2)]
    for visit in visits:
        visit.leave(450)
    # 300 overdrawn, at 10 a second.
    assert refused(allowances, "a", limits).headers["Retry-After"] == "31"
    clock.now_s += 31
    allowances.enter("a", limits).leave(10)
    refused(allowances, "a", limits)


def test_a_clock_that_stands_still_or_goes_back_gives_nothing(
    allowances: Allowances, clock: Clock
) -> None:
    limits = KeyLimits(requests_per_s=1)
    allowances.enter("a", limits)
    for gone_s in (0, -10):
        clock.now_s += gone_s
        assert refused(allowances, "a", limits).headers["Retry-After"] == "1"


def test_many_threads_do_not_get_more_than_one(allowances: Allowances) -> None:
    limits, let_in = KeyLimits(requests_per_s=50), []

    def ask() -> None:
        for _ in range(20):
            try:
                let_in.append(allowances.enter("a", limits))
            except ApiError:
                continue

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(let_in) == 50


def test_a_keys_own_limits_lie_over_those_of_all() -> None:
    own = KeyLimits(concurrency=1)
    assert own.over(KeyLimits(2.0, 7, None)) == KeyLimits(2.0, 1, None)


@pytest.fixture
def keys(tmp_path: Path) -> KeyStore:
    return KeyStore(Storage(tmp_path))


def test_limits_are_kept_with_the_key_and_keys_without_them_are_read(
    keys: KeyStore, tmp_path: Path
) -> None:
    secret = keys.create("a", KeyLimits(2.5, 3, 400))
    found = keys.verify(secret)
    assert found is not None
    assert found.limits == KeyLimits(2.5, 3, 400)
    # As format 1 has them.
    document = json.loads((tmp_path / "keys.json").read_bytes())
    for name in ("requests_per_s", "concurrency", "tokens_per_min"):
        del document["keys"][0][name]
    (tmp_path / "keys.json").write_text(json.dumps({**document, "format": 1}))
    found = keys.verify(secret)
    assert found is not None
    assert found.limits == KeyLimits()


@pytest.mark.parametrize(
    "limits",
    [KeyLimits(0.0), KeyLimits(float("inf")), KeyLimits(None, -1), KeyLimits(None, None, 0)],
)
def test_limits_must_be_above_nothing(keys: KeyStore, limits: KeyLimits) -> None:
    with pytest.raises(UsageError, match="must be above 0"):
        keys.create("a", limits)
    assert keys.all() == []


def test_the_api_refuses_what_a_key_may_not_use_and_counts_what_it_has(
    keys: KeyStore, make_site: Callable[..., Any]
) -> None:
    poor, rich = keys.create("poor", KeyLimits(tokens_per_min=10)), keys.create("rich")
    site = make_site(keys=keys)

    def ask(secret: str, **fields: Any) -> Any:
        site.headers["authorization"] = f"Bearer {secret}"
        body = {"prompt": "hello", "max_tokens": 9, "temperature": 0, **fields}
        return site.post("/v1/completions", **body)

    assert ask(poor).status_code == 200
    answer = ask(poor)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "30")
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert ask(rich, stream=True).status_code == 200
    # What fails is counted out as well.
    assert ask(rich, max_tokens=10**6).status_code == 400
    shown = site.call("GET", "/metrics").text
    assert 'eagleray_serve_key_requests_total{key="poor"} 1.0' in shown
    assert 'eagleray_serve_key_tokens_total{key="rich",kind="output"} 9.0' in shown
    assert 'eagleray_serve_key_tokens_total{key="rich",kind="prompt"} 5.0' in shown
    assert site.rig.engine.stats().num_running == 0


def test_a_refused_body_takes_no_place_of_its_key(
    keys: KeyStore, make_site: Callable[..., Any]
) -> None:
    secret = keys.create("a", KeyLimits(concurrency=1))
    site = make_site(keys=keys, headers={"authorization": f"Bearer {secret}"})
    for _ in range(3):
        assert site.post("/v1/completions", prompt="hello", max_tokens=10**6).status_code == 400
    assert site.post("/v1/completions", prompt="hello", max_tokens=2).status_code == 200
