"""LRU-K against the definition, worked out from the full list of references."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.actors.cache.policies import LruK


class Oracle:
    """The paper's definition, by search: HIST over all references that were ever made."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.references: dict[bytes, list[int]] = {}
        self.resident: set[bytes] = set()
        self.time = 0

    def touch(self, key: bytes) -> None:
        self.time += 1
        self.references.setdefault(key, []).append(self.time)
        self.resident.add(key)

    def victim(self) -> bytes | None:
        def distance(key: bytes) -> tuple[float, int]:
            times = self.references[key]
            kth = times[-self.k] if len(times) >= self.k else float("-inf")
            return kth, times[-1]

        return min(self.resident, key=distance, default=None)


keys = st.integers(0, 8).map(lambda number: bytes([number]))


@given(k=st.integers(1, 4), steps=st.lists(st.tuples(keys, st.booleans()), max_size=200))
def test_victims_are_those_of_the_definition(k: int, steps: list[tuple[bytes, bool]]) -> None:
    policy, oracle = LruK(k, max_history=100), Oracle(k)
    for key, is_eviction in steps:
        if is_eviction:
            victim = policy.victim()
            assert victim == oracle.victim()
            if victim is not None:
                policy.remove(victim)
                oracle.resident.discard(victim)
        else:
            policy.touch(key, 1)
            oracle.touch(key)
        assert set(policy) == oracle.resident
    while (victim := policy.victim()) is not None:
        assert victim == oracle.victim()
        policy.remove(victim)
        oracle.resident.remove(victim)


@given(k=st.integers(1, 3), trace=st.lists(keys, max_size=200), room=st.integers(1, 6))
def test_with_a_window_the_newest_are_on_probation_and_their_references_count_as_one(
    k: int, trace: list[bytes], room: int
) -> None:
    window_room = 2
    policy = LruK(k, max_history=100, window_bytes=window_room)
    references: dict[bytes, list[int]] = {}
    window: list[bytes] = []
    main: set[bytes] = set()
    for time, key in enumerate(trace):
        policy.touch(key, 1)
        if key in window:
            references[key][-1] = time
            window.remove(key)
            window.append(key)
        else:
            references.setdefault(key, []).append(time)
            if key not in main:
                window.append(key)
        if len(window) > window_room:
            main.add(window.pop(0))
        while len(window) + len(main) > room:
            victim = policy.victim()

            def distance(one: bytes) -> tuple[float, int]:
                times = references[one]
                return (times[-k] if len(times) >= k else float("-inf")), times[-1]

            assert victim == (min(main, key=distance) if main else window[0])
            policy.remove(victim)
            main.discard(victim)
            window = [one for one in window if one != victim]
        assert set(policy) == main | set(window)


@given(steps=st.lists(st.tuples(keys, st.integers(0, 100), st.booleans()), max_size=100))
def test_bytes_are_those_of_the_resident_keys(steps: list[tuple[bytes, int, bool]]) -> None:
    policy, sizes = LruK(2, max_history=3), dict[bytes, int]()
    for key, size, is_removal in steps:
        if is_removal:
            policy.remove(key)
            sizes.pop(key, None)
        else:
            policy.touch(key, size)
            sizes[key] = size
        assert policy.total_bytes == sum(sizes.values())
        assert len(policy) == len(sizes)
        assert policy.size(key) == sizes.get(key, 0)
        assert (key in policy) == (key in sizes)


def test_a_scan_does_not_push_out_what_is_used_again_and_again() -> None:
    policy = LruK(2, max_history=10)
    for _ in range(3):
        policy.touch(b"hot", 1)
    for number in range(50):
        policy.touch(b"cold%d" % number, 1)
        if len(policy) > 5:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim)
    assert b"hot" in policy


def test_history_outlives_residence_so_a_second_chance_counts() -> None:
    policy = LruK(2, max_history=10)
    policy.touch(b"back", 1)
    policy.remove(b"back")
    policy.touch(b"new", 1)
    policy.touch(b"back", 1)
    assert policy.victim() == b"new"


def test_history_and_bookkeeping_are_bounded() -> None:
    policy = LruK(3, max_history=20)
    for number in range(10_000):
        policy.touch(b"%d" % number, 1)
        if len(policy) > 10:
            policy.remove(policy.victim() or b"")
    for _ in range(10_000):
        policy.touch(b"same", 1)
    assert len(policy._references) <= 32
    assert len(policy._heap) <= 2 * len(policy) + 65


def test_a_history_share_bounds_the_history_by_what_is_resident() -> None:
    policy = LruK(2, max_history=1000, history_share=2)
    for number in range(100):
        policy.touch(b"%d" % number, 1)
        if len(policy) > 5:
            policy.remove(policy.victim() or b"")
    assert len(policy._retired) == 10
    policy.adjust(0, 0)
    policy.remove(policy.victim() or b"")
    assert len(policy._retired) == 0
    assert set(policy._references) == set(policy)


def test_after_its_window_is_adjusted_what_is_resident_stays_so() -> None:
    policy = LruK(2, max_history=10, window_bytes=4)
    for number in range(6):
        policy.touch(bytes([number]), 1)
    policy.adjust(1, None)
    assert [policy.victim() for _ in range(2)] == [bytes([0])] * 2
    policy.touch(bytes([6]), 1)
    assert set(policy) == {bytes([number]) for number in range(7)}
    order = []
    while (victim := policy.victim()) is not None:
        order.append(victim[0])
        policy.remove(victim)
    assert order == list(range(7))


def test_forgotten_keys_are_as_if_they_had_never_come() -> None:
    def is_forgotten(key: bytes) -> bool:
        return key[0] % 3 == 0

    draw = random.Random(2)
    forgetful, never_knew = (LruK(2, max_history=100) for _ in range(2))
    for _ in range(200):
        key, is_removal = bytes([draw.randrange(12)]), draw.random() < 0.3
        for policy in (forgetful, never_knew):
            if policy is forgetful or not is_forgotten(key):
                policy.remove(key) if is_removal else policy.touch(key, 1)
    assert any(map(is_forgotten, forgetful))
    forgetful.forget(is_forgotten)
    for number in range(12):
        for policy in (forgetful, never_knew):
            policy.touch(bytes([number]), 1)
    while (victim := forgetful.victim()) is not None:
        assert never_knew.victim() == victim
        for policy in (forgetful, never_knew):
            policy.remove(victim)
    assert never_knew.victim() is None


@pytest.mark.parametrize(("k", "history"), [(0, 1), (1, -1)])
def test_senseless_settings_are_refused(k: int, history: int) -> None:
    with pytest.raises(ValueError, match=f"k={k} .* max_history={history}"):
        LruK(k, history)
