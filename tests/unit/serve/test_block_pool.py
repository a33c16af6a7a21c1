import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eagleray.serve.engine.block_pool import BlockPool, PoolIntegrityError, block_names


def test_gives_all_blocks_asked_for_or_none() -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert sorted(pool.allocate(4) or []) == [0, 1, 2, 3]
    assert pool.allocate(1) is None


def test_a_shared_block_is_free_at_its_last_release() -> None:
    pool = BlockPool(2, 16)
    blocks = pool.allocate(1) or []
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_refuses_to_release_or_share_a_free_block() -> None:
    pool = BlockPool(2, 16)
    with pytest.raises(PoolIntegrityError, match="block 1"):
        pool.release([1])
    with pytest.raises(PoolIntegrityError, match="block 0"):
        pool.share([0])


def test_counts_the_blocks_that_tokens_need() -> None:
    pool = BlockPool(8, 16)
    assert [pool.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert pool.capacity_tokens == 128


@pytest.mark.parametrize("tables", [[[]], [[0], [0]], [[0, 1]], [[0, 0]]])
def test_integrity_check_finds_lost_doubled_and_foreign_blocks(tables: list[list[int]]) -> None:
    pool = BlockPool(3, 16)
    pool.allocate(1)
    pool.check_integrity([[0]])
    with pytest.raises(PoolIntegrityError):
        pool.check_integrity(tables)


def names(count: int, salt: int = 0) -> list[bytes]:
    return block_names([salt] * 2 * count, 2, [])


def kept_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, 2, keeps_prefixes=True)


def held(pool: BlockPool, given: list[bytes]) -> list[int]:
    """Full blocks of a request, named."""
    blocks = pool.allocate(len(given)) or []
    for block, name in zip(blocks, given, strict=True):
        pool.keep(block, name)
    return blocks


def test_names_depend_on_every_token_before_and_on_nothing_else() -> None:
    tokens = list(range(10, 20))
    whole = block_names(tokens, 4, [])
    assert len(whole) == 2
    assert block_names(tokens, 4, whole[:1]) == whole
    assert block_names(tokens[:8], 4, []) == whole
    for place in range(8):
        other = block_names([*tokens[:place], 99, *tokens[place + 1 :]], 4, [])
        assert [a == b for a, b in zip(whole, other, strict=True)] == [place >= 4, False]
    # Not what the tokens would be one after the other in text.
    assert block_names([1, 11], 1, []) != block_names([11, 1], 1, [])


def test_what_was_released_is_found_again_and_only_its_beginning() -> None:
    pool, given = kept_pool(8), names(3)
    blocks = held(pool, given)
    assert pool.match(given) == blocks
    pool.release(blocks)
    pool.release(blocks)
    assert (pool.num_free, pool.num_kept) == (8, 3)
    assert pool.match([given[0], names(1, salt=7)[0], given[2]]) == blocks[:1]
    assert pool.match(names(2, salt=7)) == []
    assert (pool.num_free, pool.num_kept) == (7, 2)
    pool.check_integrity([blocks[:1]])


def test_free_blocks_go_first_then_kept_ones_the_ends_of_old_requests_first() -> None:
    pool = kept_pool(5)
    old, new = names(2), names(2, salt=1)
    first, second = held(pool, old), held(pool, new)
    pool.release(first)
    pool.release(second)
    pool.release(pool.match(old))  # used once more
    taken = pool.allocate(1) or []
    assert taken[0] not in [*first, *second]
    assert pool.allocate(2) == [second[1], second[0]]
    assert (pool.match(new), pool.match(old)) == ([], first)


def test_a_name_is_one_blocks_and_a_block_has_one_name() -> None:
    pool, given = kept_pool(4), names(1)
    first, second = held(pool, given), held(pool, given)
    assert pool.match(given) == first
    pool.release(second)
    assert pool.num_kept == 0
    pool.keep(first[0], names(1, salt=3)[0])
    assert pool.match(names(1, salt=3)) == []
    with pytest.raises(PoolIntegrityError, match="cannot be named"):
        pool.keep(second[0], names(1, salt=4)[0])


def test_a_pool_that_keeps_nothing_finds_nothing() -> None:
    pool = BlockPool(4, 2)
    blocks = held(pool, names(2))
    assert pool.match(names(2)) == []
    pool.release(blocks)
    assert (pool.num_free, pool.num_kept) == (4, 0)


def test_no_block_is_lost_or_doubled_by_a_hundred_thousand_calls() -> None:
    draw, pool = random.Random(1), kept_pool(9)
    tables: list[list[int]] = []
    contents: dict[int, bytes] = {}  # what would lie in a block
    for number in range(100_000):
        action = draw.random()
        if action < 0.45:
            # A request that begins as one of a few does: what is there is used, the rest computed.
            wanted = names(draw.randint(1, 5), salt=draw.randrange(3))
            found = pool.match(wanted)
            assert [contents[block] for block in found] == wanted[: len(found)]
            more = pool.allocate(len(wanted) - len(found))
            if more is None:
                pool.release(found)
                continue
            for block, name in zip(more, wanted[len(found) :], strict=True):
                contents[block] = name
                if draw.random() < 0.8:
                    pool.keep(block, name)
            tables.append(found + more)
        elif action < 0.55 and tables:
            tables.append(list(draw.choice(tables)))
            pool.share(tables[-1])
        elif tables:
            pool.release(tables.pop(draw.randrange(len(tables))))
        if number % 10 == 0:
            pool.check_integrity(tables)
        assert pool.num_free == 9 - len({block for table in tables for block in table})


class PoolMachine(RuleBasedStateMachine):
    """Any order of calls, with a shrunk counterexample if one breaks a law."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = kept_pool(5)
        self.tables: list[list[int]] = []

    @rule(length=st.integers(1, 4), salt=st.integers(0, 1))
    def begin(self, length: int, salt: int) -> None:
        wanted = names(length, salt)
        found = self.pool.match(wanted)
        more = self.pool.allocate(length - len(found))
        if more is None:
            self.pool.release(found)
            return
        for block, name in zip(more, wanted[len(found) :], strict=True):
            self.pool.keep(block, name)
        self.tables.append(found + more)

    @precondition(lambda self: self.tables)
    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        self.pool.release(self.tables.pop(number % len(self.tables)))

    @invariant()
    def adds_up(self) -> None:
        self.pool.check_integrity(self.tables)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase


@given(st.lists(st.tuples(st.sampled_from("atsr"), st.integers(0, 6)), max_size=60))
def test_no_block_is_lost_or_doubled_by_any_order_of_calls(calls: list[tuple[str, int]]) -> None:
    pool = BlockPool(7, 4)
    tables: list[list[int]] = []
    for action, number in calls:
        if action == "a" and (blocks := pool.allocate(number)) is not None:
            tables.append(blocks)
        elif action == "s" and tables:
            pool.share(tables[number % len(tables)])
            tables.append(list(tables[number % len(tables)]))
        elif action in "tr" and tables:
            pool.release(tables.pop(number % len(tables)))
        pool.check_integrity(tables)
        assert pool.num_free == 7 - len({block for table in tables for block in table})
