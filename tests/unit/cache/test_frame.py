"""Frames: only what was stored under a key comes back from it."""

from hypothesis import given
from hypothesis import strategies as st

from eagleray.actors.cache.frame import OVERHEAD_BYTES, digest_key, unwrap, wrap


@given(key=st.binary(), payload=st.binary())
def test_a_payload_comes_back_from_its_own_key(key: bytes, payload: bytes) -> None:
    frame = wrap(digest_key(key), payload)
    assert unwrap(digest_key(key), frame) == payload
    assert len(frame) == len(payload) + OVERHEAD_BYTES


@given(key=st.binary(), other=st.binary(), payload=st.binary())
def test_another_keys_payload_is_refused(key: bytes, other: bytes, payload: bytes) -> None:
    if key != other:
        assert unwrap(digest_key(other), wrap(digest_key(key), payload)) is None


def test_any_flipped_or_missing_byte_is_refused() -> None:
    digest = digest_key(b"key")
    frame = wrap(digest, b"some payload")
    for place in range(len(frame)):
        assert unwrap(digest, frame[:place]) is None
        assert (
            unwrap(digest, frame[:place] + bytes([frame[place] ^ 1]) + frame[place + 1 :]) is None
        )
    assert unwrap(digest, frame + b"\0") is None
