"""Every eviction policy keeps the laws of the seam, and decides as its source says."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.actors.cache.policies import (
    EvictionPolicy,
    LruK,
    PolicyName,
    S3Fifo,
    Scheduled,
    WTinyLfu,
    make_policy,
)
from eagleray.actors.cache.policies.scheduled import MAX_EXPECTED

NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
keys = st.integers(0, 30).map(lambda number: bytes([number]))
steps = st.lists(
    st.tuples(keys, st.integers(0, 9), st.sampled_from(["touch", "evict", "remove"])), max_size=300
)
traces = st.lists(keys, max_size=300)
each_policy = pytest.mark.parametrize("name", NAMES)


def simulate(policy: EvictionPolicy, trace: Sequence[bytes], max_bytes: int) -> list[bool]:
    """Whether each reference was a hit, all values being of one byte."""
    hits = []
    for key in trace:
        hits.append(key in policy)
        if key in policy or policy.admits(key, 1):
            policy.touch(key, 1)
        while policy.total_bytes > max_bytes:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim)
    return hits


@each_policy
@given(steps=steps)
def test_bytes_and_keys_are_those_of_what_is_resident(
    name: PolicyName, steps: list[tuple[bytes, int, str]]
) -> None:
    policy, sizes = make_policy(name, 40), dict[bytes, int]()
    for key, size, action in steps:
        if action == "touch":
            policy.touch(key, size)
            sizes[key] = size
        elif action == "remove":
            policy.remove(key)
            sizes.pop(key, None)
        elif (victim := policy.victim()) is not None:
            policy.remove(victim)
            del sizes[victim]
        assert set(policy) == set(sizes)
        assert len(policy) == len(sizes)
        assert policy.total_bytes == sum(sizes.values())
        assert all(policy.size(one) == sizes.get(one, 0) for one in (key, b"never"))
        assert (key in policy) == (key in sizes)


@each_policy
@given(steps=steps)
def test_a_victim_is_resident_and_the_same_until_something_happens(
    name: PolicyName, steps: list[tuple[bytes, int, str]]
) -> None:
    policy = make_policy(name, 40)
    for key, size, action in steps:
        policy.remove(key) if action == "remove" else policy.touch(key, size)
        victim = policy.victim()
        assert (victim is None) == (len(policy) == 0)
        assert victim is None or victim in policy
        assert [policy.victim() for _ in range(3)] == [victim] * 3
    while (victim := policy.victim()) is not None:
        policy.remove(victim)
    assert (len(policy), policy.total_bytes) == (0, 0)


@each_policy
@given(trace=traces)
def test_equal_calls_decide_alike(name: PolicyName, trace: list[bytes]) -> None:
    first, second = (simulate(make_policy(name, 7), trace, 7) for _ in range(2))
    assert first == second


@each_policy
def test_bookkeeping_is_bounded_by_what_is_resident(name: PolicyName) -> None:
    policy = make_policy(name, 50)
    draw = random.Random(1)
    trace = [b"%d" % draw.randrange(10**9) for _ in range(20_000)]
    simulate(policy, trace, 50)
    held = sum(len(part) for part in vars(policy).values() if hasattr(part, "__len__"))
    assert held <= 3_000


@each_policy
def test_whatever_fits_stays(name: PolicyName) -> None:
    trace = [bytes([number % 20]) for number in range(200)]
    assert simulate(make_policy(name, 20), trace, 20)[20:] == [True] * 180


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no eviction policy 'fifo'"):
        make_policy("fifo", 1)  # type: ignore[arg-type]


def lru(trace: Sequence[bytes], room: int) -> Iterator[bool]:
    """By definition: the last `room` different keys are there."""
    order: list[bytes] = []
    for key in trace:
        yield key in order
        order = [*(one for one in order if one != key), key][-room:]


def no_evict(trace: Sequence[bytes], room: int) -> Iterator[bool]:
    """By definition: the first `room` different keys are there."""
    kept: list[bytes] = []
    for key in trace:
        yield key in kept
        if key not in kept and len(kept) < room:
            kept.append(key)


def s3_fifo(trace: Sequence[bytes], room: int) -> Iterator[bool]:
    """Algorithm 1 of the paper, with lists."""
    small: list[bytes] = []
    main: list[bytes] = []
    ghost: list[bytes] = []
    counts: dict[bytes, int] = {}
    for key in trace:
        is_hit = key in small or key in main
        yield is_hit
        if is_hit:
            counts[key] = min(3, counts[key] + 1)
            continue
        counts[key] = 0
        if key in ghost:
            ghost.remove(key)
            main.append(key)
        else:
            small.append(key)
        if len(small) + len(main) > room:
            _evict(small, main, ghost, counts, room)


def _evict(
    small: list[bytes], main: list[bytes], ghost: list[bytes], counts: dict[bytes, int], room: int
) -> None:
    while True:
        if small and (len(small) > 0.1 * room or not main):
            key = small.pop(0)
            if counts[key] <= 1:
                ghost.append(key)
                break
            counts[key] = 0
            main.append(key)
            continue
        key = main.pop(0)
        if not counts[key]:
            break
        counts[key] -= 1
        main.append(key)
    while len(ghost) > max(len(main), len(small)):
        ghost.pop(0)


Oracle = Callable[[Sequence[bytes], int], Iterator[bool]]


@pytest.mark.parametrize(
    ("name", "oracle"), [("lru", lru), ("no-evict", no_evict), ("s3-fifo", s3_fifo)]
)
@given(trace=traces, room=st.integers(1, 15))
def test_hits_are_those_of_the_definition(
    name: PolicyName, oracle: Oracle, trace: list[bytes], room: int
) -> None:
    assert simulate(make_policy(name, room), trace, room) == list(oracle(trace, room))


def belady(trace: Sequence[bytes], room: int) -> int:
    """Hits of MIN with bypass: of the residents and the newcomer, what is needed last goes."""

    def next_use(key: bytes, after: int) -> float:
        return next((i for i in range(after + 1, len(trace)) if trace[i] == key), float("inf"))

    kept: set[bytes] = set()
    hits = 0
    for now, key in enumerate(trace):
        hits += key in kept
        kept.add(key)
        if len(kept) > room:
            kept.remove(max(kept, key=lambda one: next_use(one, now)))
    return hits


@given(trace=traces, room=st.integers(1, 15))
def test_with_the_whole_schedule_known_nothing_is_better(trace: list[bytes], room: int) -> None:
    policy = Scheduled(room)
    policy.expect(trace)
    assert sum(simulate(policy, trace, room)) == belady(trace, room)


@given(trace=traces, room=st.integers(1, 15))
def test_with_nothing_expected_the_schedule_decides_as_lru_k(trace: list[bytes], room: int) -> None:
    assert simulate(Scheduled(room), trace, room) == simulate(LruK(2, 4096), trace, room)


def test_a_schedule_that_comes_piece_by_piece_is_used_as_far_as_it_is_known() -> None:
    draw = random.Random(3)
    epochs = [draw.sample(range(200), 200) for _ in range(8)]
    trace = [b"%d" % number for epoch in epochs for number in epoch]
    found = {}
    for ahead in (0, 50, 200):
        policy, hits = Scheduled(40), 0
        policy.expect(trace[:ahead])
        for place, key in enumerate(trace):
            policy.expect(trace[place + ahead : place + ahead + 1])
            hits += sum(simulate(policy, [key], 40))
        found[ahead] = hits
    assert found[0] < found[50] < found[200] == belady(trace, 40)


def test_a_use_that_never_came_is_over_when_its_position_is_passed() -> None:
    policy = Scheduled(3)
    policy.follow(0, [(0, [b"a", b"b", b"c"]), (5, [b"a"]), (9, [b"b"]), (20, [b"c"])])
    for key in (b"a", b"b", b"c"):
        policy.touch(key, 1)
    assert policy.victim() == b"c"
    # The reader died and another went on at step 10: nobody will come for a and b.
    policy.follow(10, [(30, [b"d"])])
    assert policy.victim() in (b"a", b"b")
    policy.remove(b"a")
    policy.remove(b"b")
    assert policy.victim() == b"c"


@given(trace=traces, room=st.integers(1, 15), size=st.integers(1, 7))
def test_passing_what_was_touched_changes_nothing(trace: list[bytes], room: int, size: int) -> None:
    policy, hits = Scheduled(room), []
    policy.follow(0, [(position, [key]) for position, key in enumerate(trace)])
    for start in range(0, len(trace), size):
        policy.follow(start, [])
        hits += simulate(policy, trace[start : start + size], room)
    assert sum(hits) == belady(trace, room)


def test_bookkeeping_of_a_schedule_is_bounded() -> None:
    policy = Scheduled(10)
    for step in range(0, 10_000, 10):
        policy.follow(step, [(n, [b"%d" % (n % 50)]) for n in range(step, step + 10)])
        simulate(policy, [b"%d" % (n % 50) for n in range(step, step + 10)], 10)
    assert policy.num_expected == 0
    assert len(policy._ahead) < 200
    policy.follow(20_000, [(20_000, [b"x"] * (MAX_EXPECTED + 10))])
    assert policy.num_expected == MAX_EXPECTED


def test_a_scan_takes_little_from_those_that_are_used_again() -> None:
    hot = [bytes([number]) for number in range(50)]
    scan = [b"scan%d" % number for number in range(2000)]
    trace = hot * 20
    for start in range(0, len(scan), 40):
        trace += scan[start : start + 40] + hot
    for policy in (S3Fifo(60), WTinyLfu(60)):
        hits = simulate(policy, trace, 60)[len(hot) * 20 :]
        assert sum(hits) > 0.95 * 50 * 50
    assert sum(simulate(make_policy("lru", 60), trace, 60)[len(hot) * 20 :]) < 0.1 * 50 * 50
