"""A look at an address: wrong ones are told apart at once, not after Ray's minutes of retries."""

import socket
import time
from collections.abc import Iterator

import pytest

from eagleray.platform.cluster.gcs import look, split_address
from eagleray.platform.cluster.ports import HOST, free_ports
from eagleray.platform.errors import ServiceError, UsageError


@pytest.fixture
def mute() -> Iterator[int]:
    """A server that accepts and says nothing."""
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.1:6379", ("10.0.0.1", 6379)),
        ("head.example:80", ("head.example", 80)),
        ("[::1]:6379", ("::1", 6379)),
    ],
)
def test_an_address_is_host_and_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["auto", "ray://h:10001", "http://h:8265", "host:", ":1", "h"])
def test_anything_else_is_refused_by_its_text(address: str) -> None:
    with pytest.raises(UsageError, match="not of the form host:port"):
        split_address(address)


def test_nobody_listening_is_told_at_once() -> None:
    (port,) = free_ports([None])
    with pytest.raises(ServiceError, match="nothing listens"):
        look(f"{HOST}:{port}", None, timeout_s=1.0)


def test_something_that_is_not_ray_is_told_within_the_deadline(mute: int) -> None:
    started = time.monotonic()
    with pytest.raises(ServiceError, match="does not answer as a Ray cluster"):
        look(f"{HOST}:{mute}", "secret", timeout_s=0.5)
    assert time.monotonic() - started < 5
