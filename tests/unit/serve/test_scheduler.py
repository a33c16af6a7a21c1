from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.serve.conftest import repetitive_token

from eagleray.platform.errors import UsageError
from eagleray.serve.engine import (
    BlockPool,
    FinishReason,
    QueueFullError,
    Request,
    RequestState,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    StepPlan,
)
from eagleray.serve.engine.engine import _drawn

MakeRequest = Callable[..., Request]


def make_scheduler(
    num_blocks: int = 64,
    block_tokens: int = 4,
    max_running: int = 4,
    max_queued: int = 8,
    step_tokens: int = 16,
    keeps_prefixes: bool = False,
    guessed_tokens: int = 0,
) -> Scheduler:
    limits = SchedulerLimits(max_running, max_queued, step_tokens)
    pool = BlockPool(num_blocks, block_tokens, keeps_prefixes=keeps_prefixes)
    return Scheduler(limits, pool, guessed_tokens)


def step(scheduler: Scheduler, now_s: float = 0.0) -> StepPlan:
    """Plan and compute one step in which every draw is token 1."""
    plan = scheduler.plan(now_s)
    sampled = {chunk.request.request_id: [1] for chunk in plan.chunks if chunk.samples}
    for request in scheduler.advance(plan, sampled):
        if request.num_output >= request.max_tokens:
            scheduler.finish(request, FinishReason.LENGTH)
    scheduler.check_integrity()
    return plan


def lengths(plan: StepPlan) -> dict[str, int]:
    return {chunk.request.request_id: chunk.length for chunk in plan.chunks}


def test_prompts_are_chunked_under_the_budget_after_the_decodes(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    scheduler.submit([make_request(3, 9), make_request(3, 9)])
    step(scheduler)
    scheduler.submit([make_request(40, 1)])
    plan = step(scheduler)
    assert lengths(plan) == {"r0": 1, "r1": 1, "r2": 14}
    assert plan.num_decodes == 2


def test_a_long_prompt_leaves_half_of_the_budget_to_a_short_one(make_request: MakeRequest) -> None:
    scheduler = make_scheduler()
    scheduler.submit([make_request(100, 1), make_request(6, 2)])
    plan = step(scheduler)
    assert lengths(plan) == {"r0": 10, "r1": 6}
    assert [chunk.samples for chunk in plan.chunks] == [False, True]


def test_a_decoding_request_gets_a_token_in_every_step_of_a_long_prefill(
    make_request: MakeRequest,
) -> None:
    scheduler = make_scheduler()
    decoding = make_request(2, 30)
    scheduler.submit([decoding])
    step(scheduler)
    scheduler.submit([make_request(120, 1)])
    for generated in range(2, 10):
        assert step(scheduler).num_tokens <= 16
        assert decoding.num_output == generated


def test_running_and_waiting_together_are_bounded_and_submission_is_all_or_none(
    make_request: MakeRequest,
) -> None:
    scheduler = make_scheduler(max_running=2, max_queued=1)
    scheduler.submit([make_request(), make_request()])
    with pytest.raises(QueueFullError) as caught:
        scheduler.submit([make_request(), make_request()], retry_after_s=7.0)
    assert (caught.value.num_requests, caught.value.limit) == (2, 3)
    assert caught.value.retry_after_s == 7.0
    assert scheduler.num_waiting == 2


def test_nobody_overtakes_a_request_that_waits_for_blocks(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(num_blocks=8, block_tokens=4)
    scheduler.submit([make_request(16, 4), make_request(20, 4), make_request(4, 1)])
    step(scheduler)
    assert scheduler.num_running == 1
    assert scheduler.num_waiting == 2


def test_the_youngest_is_preempted_when_blocks_run_out_and_computed_anew(
    make_request: MakeRequest,
) -> None:
    scheduler = make_scheduler(num_blocks=5, block_tokens=4)
    old, young = make_request(4, 12), make_request(4, 12)
    scheduler.submit([old, young])
    while not young.num_preemptions:
        step(scheduler)
        assert old.state is RequestState.RUNNING
    assert young.state is RequestState.WAITING
    assert young.block_table == []
    assert young.num_output > 0
    while scheduler.has_work:
        step(scheduler)
    assert old.num_preemptions == 0
    assert (old.num_output, young.num_output) == (12, 12)


def test_a_preempted_request_goes_before_those_that_came_after_it(
    make_request: MakeRequest,
) -> None:
    scheduler = make_scheduler(num_blocks=5, block_tokens=4, max_running=2)
    old, young, late = make_request(4, 12), make_request(4, 12), make_request(4, 1)
    scheduler.submit([old, young, late])
    while scheduler.has_work:
        step(scheduler)
        if young.state is RequestState.WAITING:
            assert late.state is RequestState.WAITING
    assert young.num_preemptions


def test_nobody_is_admitted_into_the_blocks_that_running_requests_need_next(
    make_request: MakeRequest,
) -> None:
    scheduler = make_scheduler(num_blocks=4, block_tokens=4)
    scheduler.submit([make_request(8, 8), make_request(8, 5)])
    step(scheduler)
    assert scheduler.num_running == 1
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.num_preemptions == 0


def test_cancel_in_any_state_frees_the_blocks_at_once(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_running=2)
    running, prefilling, waiting = make_request(2, 9), make_request(60, 9), make_request(2, 9)
    scheduler.submit([running, prefilling, waiting])
    step(scheduler)
    for request in (running, prefilling, waiting):
        assert scheduler.cancel(request.request_id) is request
        assert request.finish_reason is FinishReason.CANCELLED
        assert scheduler.cancel(request.request_id) is None
        scheduler.check_integrity()
    assert scheduler.cancel("unknown") is None
    assert scheduler.pool.num_free == 64
    assert not scheduler.has_work


def test_a_request_cancelled_inside_a_step_gets_no_token_from_it(
    make_request: MakeRequest,
) -> None:
    scheduler = make_scheduler()
    request = make_request(4, 4)
    scheduler.submit([request])
    plan = scheduler.plan(0.0)
    scheduler.cancel(request.request_id)
    assert scheduler.advance(plan, {request.request_id: [1]}) == []
    assert request.num_output == 0
    scheduler.check_integrity()


def test_deadlines_end_running_and_waiting_requests(make_request: MakeRequest) -> None:
    scheduler = make_scheduler(max_running=1)
    running, waiting = make_request(4, 50, deadline_s=5.0), make_request(4, 50, deadline_s=3.0)
    scheduler.submit([running, waiting])
    assert step(scheduler, 1.0).expired == ()
    assert step(scheduler, 3.0).expired == (waiting,)
    plan = step(scheduler, 6.0)
    assert plan.expired == (running,)
    assert plan.chunks == ()
    assert scheduler.pool.num_free == 64


def test_refuses_a_step_smaller_than_one_token_for_everybody() -> None:
    with pytest.raises(UsageError, match=r"step_tokens 3.*max_running 4"):
        SchedulerLimits(max_running=4, max_queued=1, step_tokens=3)


Arrival = tuple[int, int, int, int | None]
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12),  # step of arrival
        st.integers(1, 30),  # tokens of the prompt
        st.integers(1, 12),  # tokens to generate
        st.none() | st.integers(0, 25),  # step of cancellation
    ),
    min_size=1,
    max_size=12,
)


def prompted(name: str, tokens: list[int], max_tokens: int, owner: str = "") -> Request:
    params = SamplingParams(temperature=0)
    return Request(name, tokens, len(tokens), params, max_tokens, 0, 1e9, owner)


def owned(owner: str, count: int, max_tokens: int = 4) -> list[Request]:
    return [prompted(f"{owner}{i}", [i + 1, 2, 3], max_tokens, owner) for i in range(count)]


def names(requests: Sequence[Request]) -> list[str]:
    return [request.request_id for request in requests]


def test_seats_go_to_who_has_fewest_and_in_order_among_its_own() -> None:
    scheduler = make_scheduler(max_running=4, max_queued=20)
    for request in [*owned("a", 10), *owned("b", 3), *owned("c", 1)]:
        scheduler.submit([request])
    step(scheduler)
    # The first seat is for who came first; then each has one, then those that came first again.
    assert sorted(names(scheduler._running)) == ["a0", "a1", "b0", "c0"]
    while scheduler.num_running == 4:
        step(scheduler)
    step(scheduler)
    assert sorted(names(scheduler._running)) == ["a2", "a3", "b1", "b2"]


def test_a_flood_of_one_owner_holds_nobody_else_up_for_longer_than_a_request() -> None:
    scheduler = make_scheduler(max_running=2, max_queued=40)
    scheduler.submit(owned("a", 30, max_tokens=3))
    step(scheduler)
    [other] = owned("b", 1)
    scheduler.submit([other])
    for _ in range(3):
        step(scheduler)
    assert other.state is RequestState.RUNNING


def test_where_all_places_are_taken_the_owner_of_most_gives_way_up_to_an_even_share() -> None:
    scheduler = make_scheduler(max_running=2, max_queued=6)
    flood = owned("a", 8)
    scheduler.submit(flood)
    step(scheduler)
    with pytest.raises(QueueFullError):
        scheduler.submit(owned("a", 1))
    given = []
    for request in owned("b", 4):
        given += scheduler.submit([request])
        scheduler.check_integrity()
    # Who came last of those that wait; and running ones never.
    assert names(given) == ["a7", "a6", "a5", "a4"]
    assert {request.finish_reason for request in given} == {FinishReason.DISPLACED}
    with pytest.raises(QueueFullError):
        scheduler.submit(owned("b", 1))
    assert scheduler.num_running + scheduler.num_waiting == 8


def test_nobody_gives_way_to_a_submission_that_would_not_fit_as_a_whole() -> None:
    scheduler = make_scheduler(max_running=2, max_queued=4)
    scheduler.submit(owned("a", 6))
    with pytest.raises(QueueFullError):
        scheduler.submit(owned("b", 4))
    assert scheduler.num_waiting == 6
    assert len(scheduler.submit(owned("b", 3))) == 3


def test_what_runs_or_has_run_never_gives_way() -> None:
    scheduler = make_scheduler(max_running=4, max_queued=0)
    scheduler.submit(owned("a", 4))
    step(scheduler)
    with pytest.raises(QueueFullError):
        scheduler.submit(owned("b", 1))
    # One that lost its blocks has sent tokens already.
    scheduler._preempt(scheduler._running[-1])
    with pytest.raises(QueueFullError):
        scheduler.submit(owned("b", 1))


def test_what_earlier_requests_began_with_is_not_computed_again() -> None:
    scheduler = make_scheduler(keeps_prefixes=True, step_tokens=64)
    system = list(range(100, 118))  # four blocks and a half
    scheduler.submit([prompted("a", [*system, 1, 2, 3], 2)])
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.pool.num_free == 64
    later = [prompted(name, [*system, 7, 8], 3) for name in "bc"]
    scheduler.submit(later)
    # Both begin behind the four blocks, which they share; the fifth differs.
    assert lengths(step(scheduler)) == {"b": 4, "c": 4}
    assert [request.num_reused for request in later] == [16, 16]
    assert later[0].block_table[:4] == later[1].block_table[:4]
    assert later[0].block_table[4] != later[1].block_table[4]
    assert scheduler.num_reused_tokens == 32


def test_of_a_prompt_that_is_there_as_a_whole_the_last_block_is_computed() -> None:
    scheduler = make_scheduler(keeps_prefixes=True)
    for name in "ab":
        scheduler.submit([prompted(name, list(range(8)), 1)])
        plan = step(scheduler)
        assert not scheduler.has_work
    assert lengths(plan) == {"b": 4}


def test_output_is_kept_as_well_for_the_next_turn_of_a_talk() -> None:
    scheduler = make_scheduler(keeps_prefixes=True)
    scheduler.submit([prompted("a", [5, 6, 7], 6)])
    while scheduler.has_work:
        step(scheduler)
    # Its ninth token was drawn and not computed.
    turn = prompted("b", [5, 6, 7, 1, 1, 1, 1, 1, 1, 9], 1)
    scheduler.submit([turn])
    step(scheduler)
    assert turn.num_reused == 8


def test_kept_blocks_give_way_to_whoever_needs_them() -> None:
    scheduler = make_scheduler(num_blocks=6, keeps_prefixes=True, step_tokens=64)
    for number in range(4):
        scheduler.submit([prompted(str(number), [number] * 18, 2)])
        while scheduler.has_work:
            step(scheduler)
        assert scheduler.pool.num_free == 6
    assert scheduler.num_preemptions == 0


def compute(scheduler: Scheduler, model: Any, plan: StepPlan) -> None:
    """Compute a step by a model, and end who has all of its tokens."""
    drawn = _drawn(model.run(plan))
    tokens = {name: [token.token_id for token in taken] for name, taken in drawn.items()}
    for request in scheduler.advance(plan, tokens):
        if request.num_output >= request.max_tokens:
            scheduler.finish(request, FinishReason.LENGTH)


def played(scheduler: Scheduler, model: Any) -> int:
    """Steps until nothing is left."""
    for number in range(1000):
        if not scheduler.has_work:
            return number
        compute(scheduler, model, scheduler.plan(0.0))
        scheduler.check_integrity()
    raise AssertionError("no end")


def test_right_guesses_save_steps_and_wrong_ones_change_nothing(
    cache_model: Any, oracle: Callable[..., list[int]]
) -> None:
    steps = {}
    for guessed_tokens in (0, 4):
        scheduler, model = make_scheduler(guessed_tokens=guessed_tokens), cache_model(4)
        model.script = repetitive_token
        model.gate.set()
        request = prompted("a", list(b"abcabcabc"), 60)
        scheduler.submit([request])
        steps[guessed_tokens] = played(scheduler, model)
        assert list(request.output) == oracle(list(b"abcabcabc"), 60, repetitive_token)
    assert steps[0] == 60
    assert steps[4] < 40
    assert 0 < scheduler.num_taken_tokens < scheduler.num_guessed_tokens
    assert scheduler.num_taken_tokens == 60 - steps[4]


def test_guesses_preempt_nobody_and_stop_where_many_run(cache_model: Any) -> None:
    model = cache_model(4)
    model.script = repetitive_token
    model.gate.set()
    scheduler = make_scheduler(num_blocks=9, max_running=3, step_tokens=32, guessed_tokens=8)
    scheduler.submit([prompted(str(i), list(b"abcabcab"), 4) for i in range(3)])
    played(scheduler, model)
    assert scheduler.num_preemptions == 0
    assert scheduler.num_taken_tokens > 0
    crowd = make_scheduler(
        num_blocks=200, max_running=16, max_queued=16, step_tokens=256, guessed_tokens=8
    )
    crowd.submit([prompted(str(i), list(b"abcabcab"), 9) for i in range(16)])
    played(crowd, model)
    # Sixteen rows are all that a step has for decodes.
    assert crowd.num_guessed_tokens == 0


@settings(max_examples=80)
@given(
    ARRIVALS, st.integers(1, 4), st.integers(0, 8), st.integers(1, 6), st.integers(0, 12),
    st.booleans(), st.integers(0, 4),
)  # fmt: skip
def test_any_arrivals_on_any_pool_give_the_tokens_of_each_request_alone(
    cache_model: Any,
    oracle: Callable[[Sequence[int], int], list[int]],
    arrivals: list[Arrival],
    block_tokens: int,
    spare_blocks: int,
    max_running: int,
    spare_budget: int,
    keeps_prefixes: bool,
    guessed_tokens: int,
) -> None:
    longest = max(prompt + output for _, prompt, output, _ in arrivals)
    num_blocks = -(-longest // block_tokens) + spare_blocks
    budget = max_running + spare_budget
    scheduler = make_scheduler(
        num_blocks, block_tokens, max_running, 99, budget, keeps_prefixes, guessed_tokens
    )
    model = cache_model(block_tokens, script=repetitive_token)
    model.gate.set()
    requests = [
        Request(
            # Two kinds of prompts: they begin alike, and go on alike when they are generated.
            f"r{i}", [(5 * (i % 2) + j) % 251 for j in range(prompt)], prompt,
            SamplingParams(temperature=0), output, 0, 1e9, str(i % 3),
        )
        for i, (_, prompt, output, _) in enumerate(arrivals)
    ]  # fmt: skip
    submitted: set[int] = set()
    oldest_preempted = 0
    for number in range(2000):
        for i, (arrival, *_, cancelled) in enumerate(arrivals):
            if arrival == number:
                scheduler.submit([requests[i]])
                submitted.add(i)
            if cancelled is not None and cancelled + arrival == number:
                scheduler.cancel(f"r{i}")
        alive = list(scheduler.requests())
        oldest = min(alive, key=lambda request: request.order, default=None)
        before = oldest.num_preemptions if oldest else 0
        plan = scheduler.plan(0.0)
        oldest_preempted += (oldest.num_preemptions if oldest else 0) - before
        assert plan.num_tokens <= budget
        assert bool(plan.chunks) == scheduler.has_work
        if plan.chunks:
            compute(scheduler, model, plan)
        scheduler.check_integrity()
        if len(submitted) == len(requests) and not scheduler.has_work:
            break
    assert all(request.is_finished for request in requests)
    assert scheduler.pool.num_free == num_blocks
    assert oldest_preempted == 0
    for request in requests:
        prompt = request.tokens[: request.num_prompt]
        assert list(request.output) == oracle(prompt, request.num_output, repetitive_token)
        if request.finish_reason is FinishReason.LENGTH:
            assert request.num_output == request.max_tokens
