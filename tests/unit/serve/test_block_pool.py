import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.serve.engine.block_pool import BlockPool, PoolIntegrityError


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
