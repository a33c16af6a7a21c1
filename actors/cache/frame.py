"""How a value lies in the cache: with its own key and a checksum, so that a mix-up shows.

    magic "evf1" | BLAKE2b-128 of the key (16 bytes) | CRC-32 of key digest and payload | payload

A server, a proxy or a client that answers one request with another's reply is caught by the key;
bytes that were damaged are caught by the checksum. Either is a miss, never a wrong value.
"""

import struct
import zlib
from hashlib import blake2b

KEY_BYTES = 16
_FRAME = struct.Struct(f"<4s{KEY_BYTES}sI")
_MAGIC = b"evf1"
OVERHEAD_BYTES = _FRAME.size


def digest_key(key: bytes) -> bytes:
    """The 16 bytes that stand for a key everywhere."""
    return blake2b(key, digest_size=KEY_BYTES).digest()


def wrap(key_digest: bytes, payload: bytes) -> bytes:
    """The stored form of a payload."""
    crc = zlib.crc32(payload, zlib.crc32(key_digest))
    return _FRAME.pack(_MAGIC, key_digest, crc) + payload


def unwrap(key_digest: bytes, value: bytes) -> bytes | None:
    """The payload, or None if this is not what was stored under the key."""
    return value[_FRAME.size :] if is_frame_of(key_digest, memoryview(value)) else None


def is_frame_of(key_digest: bytes, value: memoryview) -> bool:
    """Whether this is, undamaged, what was stored under the key."""
    if len(value) < _FRAME.size:
        return False
    magic, stored_digest, crc = _FRAME.unpack_from(value)
    if magic != _MAGIC or stored_digest != key_digest:
        return False
    return bool(zlib.crc32(value[_FRAME.size :], zlib.crc32(key_digest)) == crc)
