"""Who computes: one at a time, never nobody, and everybody in the end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from eagleray.actors.cache.leases import SingleFlight


class FakeLeases:
    """Leases of two processes; the other one's are given back when told."""

    lease_s = 1.0

    def __init__(self, others: Sequence[bytes] = ()) -> None:
        self.others = set(others)
        self.ours: set[bytes] = set()
        self.asked = 0

    def take(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked += 1
        return [key not in self.others for key in keys]

    @contextmanager
    def held(self, keys: Sequence[bytes]) -> Iterator[None]:
        self.ours = set(keys)
        try:
            yield
        finally:
            self.ours = set()

    def close(self) -> None:
        pass


class Rig:
    """A store, a clock that sleeping moves, and a note of what was computed."""

    def __init__(self, leases: FakeLeases) -> None:
        self.leases, self.now = leases, 0.0
        self.stored: dict[bytes, bytes] = {}
        self.computed: list[bytes] = []
        self.at: dict[float, tuple[str, bytes]] = {}
        self.flight = SingleFlight(leases, self.look, self.keep, 2.0, lambda: self.now, self.sleep)

    def look(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.stored.get(key) for key in keys]

    def keep(self, items: Sequence[tuple[bytes, bytes]]) -> int:
        self.stored.update(items)
        return len(items)

    def sleep(self, seconds: float) -> None:
        # Nobody may wait for others while others may wait for it.
        assert not self.leases.ours
        self.now += seconds
        for when in [when for when in self.at if when <= self.now]:
            what, key = self.at.pop(when)
            if what == "stores":
                self.stored[key] = b"theirs"
            self.leases.others.discard(key)

    def fill(self, *keys: bytes) -> list[bytes]:
        def compute(indices: list[int]) -> list[bytes]:
            assert self.leases.ours >= {keys[i] for i in indices}
            self.computed += [keys[i] for i in indices]
            return [b"ours"] * len(indices)

        return self.flight.fill(keys, compute)[0]


def test_what_nobody_computes_is_computed_here_and_stored() -> None:
    rig = Rig(FakeLeases())
    assert rig.fill(b"a", b"b") == [b"ours", b"ours"]
    assert rig.stored == {b"a": b"ours", b"b": b"ours"}
    assert rig.now == 0


def test_ours_is_done_before_we_wait_for_theirs() -> None:
    rig = Rig(FakeLeases([b"b"]))
    rig.at = {0.3: ("stores", b"b")}
    assert rig.fill(b"a", b"b", b"c") == [b"ours", b"theirs", b"ours"]
    assert rig.computed == [b"a", b"c"]


def test_a_holder_that_dies_is_succeeded() -> None:
    rig = Rig(FakeLeases([b"a"]))
    rig.at = {0.9: ("dies", b"a")}
    assert rig.fill(b"a") == [b"ours"]
    assert 0.9 <= rig.now < 1.0


def test_a_holder_that_takes_too_long_is_not_waited_for() -> None:
    rig = Rig(FakeLeases([b"a"]))
    assert rig.fill(b"a") == [b"ours"]
    assert 2.0 <= rig.now < 2.1


def test_a_value_that_was_stored_in_between_is_not_computed_again() -> None:
    rig = Rig(FakeLeases())
    rig.stored[b"a"] = b"theirs"
    assert rig.fill(b"a", b"b") == [b"theirs", b"ours"]
    assert rig.computed == [b"b"]


def test_a_failure_gives_the_leases_back() -> None:
    rig = Rig(FakeLeases())
    with pytest.raises(ZeroDivisionError):
        rig.flight.fill([b"a"], lambda _: [b""] * (1 // 0))
    with pytest.raises(ValueError, match="compute gave 2 values for 1 keys"):
        rig.flight.fill([b"a"], lambda _: [b"", b""])
    assert rig.leases.ours == set()
