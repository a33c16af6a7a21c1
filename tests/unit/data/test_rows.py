"""Row shards: exact, and never silent about damage; what they share with others is tested there."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.actors.data.blocks import HEADER_BYTES
from eagleray.actors.data.rows import RowShard, RowWriter, rows_per_block
from eagleray.platform.errors import IntegrityError

DIGEST = bytes(range(32))
GOLDEN = Path(__file__).parent / "golden" / "rows-v1.bin"


def write(path: Path, rows: np.ndarray, block_rows: int | None = None) -> Path:  # type: ignore[type-arg]
    with RowWriter(
        path,
        row_values=rows.shape[1],
        meaning_sha256=DIGEST,
        first_row=5,
        block_rows=block_rows,
    ) as writer:
        for start in range(0, len(rows), 3):
            writer.append(rows[start : start + 3])
    return path


@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60),
    width=st.integers(1, 5),
    block_rows=st.integers(1, 9),
)
def test_what_is_written_is_read_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, bits: list[int], width: int, block_rows: int
) -> None:
    bits = bits * width
    rows = np.array(bits, dtype="<u4").view("<f4").reshape(-1, width)
    shard = RowShard(write(tmp_path_factory.mktemp("rows") / "s.bin", rows, block_rows))
    assert shard.read(0, rows.size).tobytes() == rows.tobytes()
    starts = np.arange(len(rows))[::-1] * width
    assert shard.gather(starts, width).tobytes() == rows[::-1].tobytes()
    blocks = [shard.read_block(block).tobytes() for block in range(shard.header.num_blocks)]
    assert b"".join(blocks) == rows.tobytes()
    assert not list(shard.damaged_blocks())


def test_every_flipped_byte_is_found_and_its_block_named(tmp_path: Path) -> None:
    rows = np.arange(60, dtype=np.float32).reshape(20, 3)
    path = write(tmp_path / "s.bin", rows, block_rows=4)
    sound = path.read_bytes()
    for place in range(len(sound)):
        damaged = bytearray(sound)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        if HEADER_BYTES <= place < HEADER_BYTES + rows.nbytes:
            block = (place - HEADER_BYTES) // (4 * 3 * 4)
            shard = RowShard(path, sleep=lambda s: None)
            assert list(shard.damaged_blocks()) == [block]
            with pytest.raises(IntegrityError, match=rf"block {block} \(rows from {block * 4}, "):
                shard.read(0, 60)
        else:
            with pytest.raises(IntegrityError, match=r"shard s\.bin"):
                RowShard(path)


def test_a_token_shard_is_no_row_shard(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="no shard header"):
        RowShard(GOLDEN.with_name("shard-v1.bin"))


def test_a_block_holds_whole_rows_of_any_length() -> None:
    assert [rows_per_block(width) for width in (1, 65, 16_384, 65_536)] == [16_384, 252, 1, 1]


def test_format_version_1_is_written_and_read_as_ever(tmp_path: Path) -> None:
    rows = np.array([[0.0, 1.5, -2], [np.nan, 3.25e38, 1e-45], [7, -0.0, 8]], dtype=np.float32)
    assert write(tmp_path / "s.bin", rows, block_rows=2).read_bytes() == GOLDEN.read_bytes()
    shard = RowShard(GOLDEN)
    assert shard.read(0, 9).tobytes() == rows.tobytes()
    assert (shard.header.first_row, shard.header.meaning_sha256) == (5, DIGEST)


def test_another_format_version_is_named(tmp_path: Path) -> None:
    content = bytearray(GOLDEN.read_bytes())
    struct.pack_into("<I", content, 8, 2)
    struct.pack_into(
        "<I", content, HEADER_BYTES - 4, zlib.crc32(bytes(content[: HEADER_BYTES - 4]))
    )
    (tmp_path / "s.bin").write_bytes(content)
    with pytest.raises(IntegrityError, match="format version 2, this program reads 1"):
        RowShard(tmp_path / "s.bin")
