"""Ports: free, distinct, ours only if nobody else has them."""

import socket
from collections.abc import Iterator

import pytest

from eagleray.platform.cluster.ports import HOST, free_ports, is_free, is_listening


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen()
        yield server.getsockname()[1]


def test_ports_are_distinct_and_free() -> None:
    ports = free_ports([None] * 20)
    assert len(set(ports)) == 20
    assert all(is_free(port) for port in ports)


def test_a_preferred_port_is_given_if_it_is_free() -> None:
    (wish,) = free_ports([None])
    assert free_ports([wish]) == [wish]


def test_a_preferred_port_that_is_taken_is_replaced(taken: int) -> None:
    (port,) = free_ports([taken])
    assert port != taken
    assert is_free(port)


def test_the_same_preferred_port_is_not_given_twice() -> None:
    (wish,) = free_ports([None])
    assert len(set(free_ports([wish, wish]))) == 2


def test_listening_tells_a_server_from_nobody(taken: int) -> None:
    (nobody,) = free_ports([None])
    assert is_listening(HOST, taken, timeout_s=1.0)
    assert not is_listening(HOST, nobody, timeout_s=1.0)
