"""Token shards: exact, zero-copy, and never silent about damage."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.actors.data.blocks import HEADER_BYTES
from eagleray.actors.data.shards import Shard, ShardWriter
from eagleray.platform.errors import DataError, IntegrityError

DIGEST = bytes(range(32))
GOLDEN = Path(__file__).parent / "golden" / "shard-v1.bin"


def write(path: Path, ids: list[int], vocab_size: int = 1000, block_tokens: int = 16) -> Path:
    with ShardWriter(
        path,
        vocab_size=vocab_size,
        tokenizer_sha256=DIGEST,
        first_token=5,
        block_tokens=block_tokens,
    ) as writer:
        for start in range(0, len(ids), 7):
            writer.append(np.array(ids[start : start + 7], dtype=np.int64))
    return path


@given(
    ids=st.lists(st.integers(0, 99_999), min_size=1, max_size=100), block_tokens=st.integers(1, 40)
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], block_tokens: int
) -> None:
    path = write(tmp_path_factory.mktemp("shard") / "s.bin", ids, 100_000, block_tokens)
    shard = Shard(path)
    assert shard.read(0, len(ids)).tolist() == ids
    assert not list(shard.damaged_blocks())
    blocks = [shard.read_block(block) for block in range(shard.header.num_blocks)]
    assert np.concatenate(blocks).tolist() == ids


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(65_536, 2), (65_537, 4)])
def test_the_largest_id_survives_at_either_width(
    tmp_path: Path, vocab_size: int, itemsize: int
) -> None:
    shard = Shard(write(tmp_path / "s.bin", [0, vocab_size - 1], vocab_size))
    assert shard.header.itemsize == itemsize
    assert shard.read(0, 2).tolist() == [0, vocab_size - 1]


@pytest.mark.parametrize("bad", [-1, 1000, 65_536 + 3])
def test_an_id_outside_the_vocabulary_is_refused_when_written(tmp_path: Path, bad: int) -> None:
    with pytest.raises(DataError, match="do not fit vocab_size 1000"):
        write(tmp_path / "s.bin", [1, bad])
    with pytest.raises(IntegrityError, match="no shard header"):
        Shard(tmp_path / "s.bin")


def test_reads_are_views_of_the_file_and_not_writable(tmp_path: Path) -> None:
    shard = Shard(write(tmp_path / "s.bin", list(range(100))))
    first, second = shard.read(10, 90), shard.read(20, 30)
    address = [view.__array_interface__["data"][0] for view in (first, second)]
    assert address[1] - address[0] == 10 * shard.header.itemsize
    assert not first.flags.writeable


def test_every_flipped_byte_is_found_and_its_block_named(tmp_path: Path) -> None:
    path = write(tmp_path / "s.bin", list(range(100)))
    sound = path.read_bytes()
    end_of_tokens = HEADER_BYTES + 100 * 2
    for place in range(len(sound)):
        damaged = bytearray(sound)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        if HEADER_BYTES <= place < end_of_tokens:
            block = (place - HEADER_BYTES) // 2 // 16
            shard = Shard(path, sleep=lambda s: None)
            assert list(shard.damaged_blocks()) == [block]
            with pytest.raises(IntegrityError, match=rf"s\.bin: block {block} "):
                shard.read(0, 100)
        else:
            with pytest.raises(IntegrityError, match=r"shard s\.bin"):
                Shard(path)


def test_a_block_is_checked_when_touched_and_others_stay_readable(tmp_path: Path) -> None:
    path = write(tmp_path / "s.bin", list(range(100)))
    damaged = bytearray(path.read_bytes())
    damaged[HEADER_BYTES + 2 * 40] ^= 1  # Token 40 lies in block 2.
    path.write_bytes(damaged)
    shard = Shard(path, sleep=lambda s: None)
    assert shard.read(0, 32).tolist() == list(range(32))
    assert shard.read(48, 100).tolist() == list(range(48, 100))
    for _ in range(2):
        with pytest.raises(IntegrityError, match="block 2"):
            shard.read(31, 33)


def test_a_block_that_was_only_badly_read_is_fetched_again(tmp_path: Path) -> None:
    path = write(tmp_path / "s.bin", list(range(100)))
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[HEADER_BYTES + 2 * 40] ^= 1
    path.write_bytes(damaged)
    pauses: list[float] = []

    def get_well(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 2:
            path.write_bytes(sound)

    shard = Shard(path, sleep=get_well)
    read = shard.read(20, 99)
    # The pages that were mapped first stay bad, as on a file system that does not see the change.
    path.write_bytes(damaged)
    assert read.tolist() == list(range(20, 99))
    assert shard.read(30, 60).tolist() == list(range(30, 60))
    assert shard.read_block(2).tolist() == list(range(32, 48))
    assert len(pauses) == 2
    assert not read.flags.writeable


def test_a_block_that_stays_bad_is_named_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / "s.bin", list(range(100)))
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 2 * 40] ^= 1
    path.write_bytes(data)
    pauses: list[float] = []
    with pytest.raises(
        IntegrityError, match=rf"s\.bin: block 2 \(tokens from 32, bytes from {HEADER_BYTES + 64}\)"
    ):
        Shard(path, sleep=pauses.append).read(0, 100)
    assert len(pauses) == 3
    path.unlink()
    data[HEADER_BYTES] ^= 1
    (tmp_path / "t.bin").write_bytes(data)
    shard = Shard(tmp_path / "t.bin", sleep=pauses.append)
    (tmp_path / "t.bin").unlink()
    with pytest.raises(IntegrityError, match="cannot be read again: No such file"):
        shard.read(0, 100)


@pytest.mark.parametrize("length", [0, 5, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 50, -1])
def test_a_file_that_was_cut_short_does_not_open(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "s.bin", list(range(100)))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(IntegrityError, match=r"shard s\.bin"):
        Shard(path)


def test_a_file_that_grew_does_not_open(tmp_path: Path) -> None:
    path = write(tmp_path / "s.bin", [1, 2, 3])
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(IntegrityError, match=r"holds .* bytes, its header promises"):
        Shard(path)


def test_a_writer_that_died_leaves_no_shard(tmp_path: Path) -> None:
    def die() -> None:
        with ShardWriter(
            tmp_path / "s.bin", vocab_size=10, tokenizer_sha256=DIGEST, first_token=0
        ) as writer:
            writer.append(np.arange(5))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        die()
    with pytest.raises(IntegrityError, match="no shard header"):
        Shard(tmp_path / "s.bin")


def test_format_version_1_is_written_and_read_as_ever(tmp_path: Path) -> None:
    ids = [0, 1, 999, 256, 5, 6, 7]
    assert write(tmp_path / "s.bin", ids, block_tokens=4).read_bytes() == GOLDEN.read_bytes()
    shard = Shard(GOLDEN)
    assert shard.read(0, 7).tolist() == ids
    assert (shard.header.first_token, shard.header.tokenizer_sha256) == (5, DIGEST)


def test_another_format_version_is_named(tmp_path: Path) -> None:
    content = bytearray(GOLDEN.read_bytes())
    struct.pack_into("<I", content, 8, 2)
    struct.pack_into(
        "<I", content, HEADER_BYTES - 4, zlib.crc32(bytes(content[: HEADER_BYTES - 4]))
    )
    (tmp_path / "s.bin").write_bytes(content)
    with pytest.raises(IntegrityError, match="format version 2, this program reads 1"):
        Shard(tmp_path / "s.bin")
