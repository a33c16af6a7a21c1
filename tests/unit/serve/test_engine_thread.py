import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from eagleray.platform.errors import DeadlineExceededError
from eagleray.serve.engine import (
    EngineStoppedError,
    FinishReason,
    InvalidRequestError,
    QueueFullError,
    SamplingParams,
)
from eagleray.serve.engine.stream import Delta, StreamTiming, TokenStream

GREEDY = SamplingParams(temperature=0, max_tokens=6)
MakeRig = Callable[..., Any]


def collect(stream: TokenStream) -> tuple[str, FinishReason | None]:
    text, reason = "", None
    while (delta := stream.read(20)) is not None:
        text, reason = text + delta.text, delta.finish_reason
    return text, reason


def letters(oracle: Callable[[Sequence[int], int], list[int]], prompt: bytes, count: int) -> str:
    return bytes(oracle(list(prompt), count)).decode()


def test_submitted_prompts_come_back_as_their_texts(make_rig: MakeRig, oracle: Any) -> None:
    rig = make_rig()
    prompts = [b"one", b"two and more", b"3"]
    streams = rig.engine.submit([list(prompt) for prompt in prompts], GREEDY)
    for prompt, stream in zip(prompts, streams, strict=True):
        assert collect(stream) == (letters(oracle, prompt, 6), FinishReason.LENGTH)
        assert stream.timing.num_output == 6
        assert stream.timing.num_prompt == len(prompt)
    rig.engine.check_integrity()


def test_the_end_token_and_stop_strings_end_with_stop(make_rig: MakeRig) -> None:
    rig = make_rig()
    script = iter(b"ab--cd")
    rig.model.script = lambda _: next(script, 256)
    stopped = rig.engine.submit([[1]], SamplingParams(temperature=0, stop=("--",)))[0]
    assert collect(stopped) == ("ab", FinishReason.STOP)
    rig.model.script = lambda context: 256 if len(context) > 3 else 120
    ended = rig.engine.submit([[1]], SamplingParams(temperature=0))[0]
    assert collect(ended) == ("xxx", FinishReason.STOP)
    ignored = SamplingParams(temperature=0, ignore_eos=True, max_tokens=5)
    assert collect(rig.engine.submit([[1]], ignored)[0]) == ("xxx", FinishReason.LENGTH)


def test_n_gives_that_many_streams_of_each_prompt_with_seeds_of_their_own(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    rig.engine.submit([[1], [2]], SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=1))
    assert rig.scheduler.num_running + rig.scheduler.num_waiting <= 6
    rig.engine.drain(20)
    assert rig.engine.stats().finished == {FinishReason.LENGTH: 6}


def test_cancel_frees_blocks_within_the_step_that_is_running(make_rig: MakeRig) -> None:
    rig = make_rig(open_gate=False, max_running=1)
    running, waiting = rig.engine.submit([[1] * 10, [2] * 10], GREEDY)
    assert rig.model.entered.wait(20)
    for stream in (running, waiting):
        stream.cancel()
        assert collect(stream) == ("", FinishReason.CANCELLED)
        stream.cancel()
    stats = rig.engine.stats()
    assert (stats.num_free_blocks, stats.num_running, stats.num_waiting) == (64, 0, 0)
    rig.model.gate.set()
    assert collect(rig.engine.submit([[3]], GREEDY)[0])[1] is FinishReason.LENGTH


def test_a_full_engine_refuses_all_of_a_submission(make_rig: MakeRig) -> None:
    rig = make_rig(open_gate=False, max_running=2, max_queued=1)
    rig.engine.submit([[1], [2]], GREEDY)
    with pytest.raises(QueueFullError) as caught:
        rig.engine.submit([[3], [4]], GREEDY)
    assert caught.value.retry_after_s >= 1.0
    assert len(rig.engine.submit([[5]], GREEDY)) == 1


def test_who_gives_way_to_another_owner_ends_with_that_reason(make_rig: MakeRig) -> None:
    rig = make_rig(open_gate=False, max_running=1, max_queued=3)
    streams = rig.engine.submit([[1], [2], [3], [4]], GREEDY, owner="a")
    rig.engine.submit([[5]], GREEDY, owner="b")
    assert collect(streams[3])[1] is FinishReason.DISPLACED
    rig.model.gate.set()
    assert collect(streams[2])[1] is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "rules", "param", "named"),
    [
        ([], {}, "prompt", "no tokens"),
        ([1, 257], {}, "prompt", "257"),
        ([-1], {}, "prompt", "-1"),
        ([1] * 128, {}, "prompt", "128"),
        ([1] * 20, {"max_tokens": 65}, "max_tokens", "64"),
        ([1] * 100, {"max_tokens": 29}, "max_tokens", "28"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once_naming_the_limit(
    make_rig: MakeRig, prompt: list[int], rules: dict[str, Any], param: str, named: str
) -> None:
    rig = make_rig()
    with pytest.raises(InvalidRequestError, match=named) as caught:
        rig.engine.submit([[1], prompt], SamplingParams(**rules))
    assert caught.value.param == param
    assert not rig.scheduler.has_work


def test_more_completions_than_the_server_ever_holds_are_refused_for_good(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(max_running=2, max_queued=1)
    with pytest.raises(InvalidRequestError, match="holds 3") as caught:
        rig.engine.submit([[1]], SamplingParams(n=4))
    assert caught.value.param == "n"
    with pytest.raises(InvalidRequestError, match="4 prompts"):
        rig.engine.submit([[1]] * 4, SamplingParams())


def test_a_prompt_larger_than_the_pool_is_refused_naming_the_pool(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=4, block_tokens=4)
    with pytest.raises(InvalidRequestError, match="KV pool of 16"):
        rig.engine.submit([[1] * 16], SamplingParams())
    assert collect(rig.engine.submit([[1] * 14], SamplingParams(temperature=0))[0])[1] is (
        FinishReason.LENGTH
    )


def test_deadlines_end_requests_that_run_and_that_wait(make_rig: MakeRig) -> None:
    rig = make_rig(open_gate=False, max_running=1, timeout_s=10.0)
    running, waiting = rig.engine.submit([[1], [2]], GREEDY)
    rig.now[0] = 10.5
    rig.model.gate.set()
    assert collect(running)[1] is FinishReason.DEADLINE
    assert collect(waiting) == ("", FinishReason.DEADLINE)
    assert rig.engine.stats().num_free_blocks == 64


def test_a_request_may_shorten_its_deadline_but_not_lengthen_it(make_rig: MakeRig) -> None:
    rig = make_rig(open_gate=False, timeout_s=10.0)
    rig.engine.submit([[1]], GREEDY, timeout_s=2.0)
    rig.engine.submit([[1]], GREEDY, timeout_s=99.0)
    assert {request.deadline_s for request in rig.scheduler.requests()} == {2.0, 10.0}


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(
    make_rig: MakeRig, oracle: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    rig.model.failures = 1
    failed = rig.engine.submit([[1]], GREEDY)[0]
    delta = failed.read(20)
    assert delta is not None
    assert (delta.finish_reason, delta.error) == (FinishReason.ERROR, "RuntimeError")
    assert "scripted failure" in caplog.text
    assert rig.engine.is_healthy
    assert collect(rig.engine.submit([[7]], GREEDY)[0])[0] == letters(oracle, b"\x07", 6)
    assert rig.engine.stats().num_failed_steps == 1
    rig.engine.check_integrity()


def test_an_engine_that_keeps_failing_dies_loudly(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig()
    rig.model.failures = 8
    for _ in range(8):
        assert collect(rig.engine.submit([[1]], GREEDY)[0])[1] is FinishReason.ERROR
    rig.engine._thread.join(20)
    assert not rig.engine.is_healthy
    assert "engine died" in caplog.text
    with pytest.raises(EngineStoppedError):
        rig.engine.submit([[1]], GREEDY)


def test_failures_that_are_not_in_a_row_do_not_kill_the_engine(make_rig: MakeRig) -> None:
    rig = make_rig()
    for _ in range(10):
        rig.model.failures = 1
        assert collect(rig.engine.submit([[1]], GREEDY)[0])[1] is FinishReason.ERROR
        assert collect(rig.engine.submit([[1]], GREEDY)[0])[1] is FinishReason.LENGTH
    assert rig.engine.is_healthy


def test_drain_lets_running_requests_end_and_takes_no_more(make_rig: MakeRig) -> None:
    rig = make_rig(open_gate=False)
    stream = rig.engine.submit([[1]], GREEDY)[0]
    with pytest.raises(DeadlineExceededError, match="1 requests"):
        rig.engine.drain(0.01)
    with pytest.raises(EngineStoppedError):
        rig.engine.submit([[2]], GREEDY)
    rig.model.gate.set()
    rig.engine.drain(20)
    assert collect(stream)[1] is FinishReason.LENGTH


def test_shutdown_ends_what_is_inside_with_an_error(make_rig: MakeRig) -> None:
    rig = make_rig(open_gate=False)
    stream = rig.engine.submit([[1]], GREEDY)[0]
    closer = threading.Thread(target=rig.engine.shutdown, args=(20,))
    closer.start()
    rig.model.gate.set()
    closer.join(20)
    assert collect(stream)[1] in (FinishReason.ERROR, FinishReason.LENGTH)
    assert not rig.engine.is_healthy


def test_a_slow_reader_gets_everything_in_one_piece_and_the_engine_does_not_wait(
    make_rig: MakeRig, oracle: Any
) -> None:
    rig = make_rig()
    slow = rig.engine.submit([[1]], SamplingParams(temperature=0, max_tokens=50))[0]
    rig.engine.drain(20)
    delta = slow.read(0)
    assert delta is not None
    assert delta.text == letters(oracle, b"\x01", 50)
    assert delta.finish_reason is FinishReason.LENGTH
    assert slow.read(0) is None


def new_stream() -> TokenStream:
    return TokenStream("r", StreamTiming(1, 0.0), lambda _: None)


def test_a_stream_wakes_a_reader_in_its_event_loop() -> None:
    async def read() -> list[str]:
        stream = new_stream()
        writer = threading.Thread(
            target=lambda: [
                stream.put(Delta("a")),
                stream.put(Delta("b", finish_reason=FinishReason.STOP)),
            ]
        )
        writer.start()
        texts = [delta.text async for delta in stream]
        writer.join()
        return texts

    assert "".join(asyncio.run(read())) == "ab"


def test_a_reader_that_stopped_waiting_is_not_woken() -> None:
    troubles: list[object] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, trouble: troubles.append(trouble)
        )
        stream = new_stream()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anext(stream)
        stream.put(Delta("a", finish_reason=FinishReason.STOP))
        await asyncio.sleep(0)
        assert (await anext(stream)).text == "a"

    asyncio.run(scenario())
    assert troubles == []


def test_a_stream_whose_reader_is_gone_takes_what_comes() -> None:
    stream = new_stream()

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await anext(stream)

    asyncio.run(leave())
    stream.put(Delta("a", finish_reason=FinishReason.STOP))
    assert stream.read(0) == Delta("a", finish_reason=FinishReason.STOP)


def test_reading_a_silent_stream_gives_up() -> None:
    with pytest.raises(DeadlineExceededError):
        new_stream().read(0.01)
