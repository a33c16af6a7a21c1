"""Commands to several servers at once: whatever the silent ones do, they cost one time-out."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
from redis.exceptions import RedisError
from tools.stalling_proxy import StallingProxy

from eagleray.actors.cache.exchange import exchange
from eagleray.actors.cache.redis_link import Command, RedisLink
from eagleray.platform.redis_server import RedisServer

TIMEOUT_S = 0.4
NUM_SILENT = 6
# More than any buffer between two processes takes: a server that does not read holds up the sender.
LARGE = bytes(16_000_000)


@contextlib.contextmanager
def silent_server(*, takes_connections: bool) -> Iterator[str]:
    """A port behind which nobody answers; gives its URL."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = server.getsockname()
        if not takes_connections:
            # The queue of connections is full: whoever comes now is not even refused.
            stack.enter_context(contextlib.closing(socket.create_connection(address)))
        yield f"redis://127.0.0.1:{address[1]}"


@pytest.mark.parametrize(
    ("takes_connections", "command"),
    [(True, ("GET", "a")), (True, ("SET", "a", LARGE)), (False, ("GET", "a"))],
    ids=["no answer", "nothing read", "no connection"],
)
def test_silent_servers_are_waited_for_together_and_cost_the_others_nothing(
    redis_server: RedisServer, takes_connections: bool, command: Command
) -> None:
    with contextlib.ExitStack() as stack:
        silent = [
            RedisLink(
                stack.enter_context(silent_server(takes_connections=takes_connections)), TIMEOUT_S
            )
            for _ in range(NUM_SILENT)
        ]
        well = [RedisLink(redis_server.url, 5) for _ in range(2)]
        started = time.monotonic()
        outcomes = exchange(
            [
                (well[0], [("SET", "a", "1"), ("GET", "a"), ("LPUSH", "a", "no list")]),
                *((link, [command]) for link in silent),
                (well[1], [("ECHO", LARGE)]),
            ]
        )
        took_s = time.monotonic() - started
        first, *failed, last = outcomes
        assert isinstance(first, list)
        assert first[:2] == [b"OK", b"1"]
        assert "WRONGTYPE" in str(first[2])
        assert last == [LARGE]
        assert all(isinstance(outcome, RedisError) for outcome in failed)
        assert not any(link.is_open for link in silent)
        # One after the other they would cost six times the time-out.
        assert took_s < NUM_SILENT / 2 * TIMEOUT_S
        for link in well:
            assert link.call("ECHO", "next") == b"next"
            link.close()


def test_a_server_that_falls_silent_at_any_byte_of_its_replies_gives_none_of_them(
    redis_server: RedisServer, stalling_proxy: StallingProxy
) -> None:
    well = RedisLink(redis_server.url, 5)
    cut = RedisLink(stalling_proxy.url, 0.02)
    answer = b"$3\r\none\r\n$3\r\ntwo\r\n"
    for limit in range(len(answer)):
        stalling_proxy.limit = limit
        first = exchange([(cut, [("ECHO", "one"), ("ECHO", "two")]), (well, [("ECHO", "x")])])
        assert isinstance(first[0], RedisError)
        assert first[1] == [b"x"]
        assert not cut.is_open
        stalling_proxy.limit = None
        cut = RedisLink(stalling_proxy.url, 5)
        then = exchange([(cut, [("ECHO", "three")]), (well, [("ECHO", "four")])])
        assert then == [[b"three"], [b"four"]]
        cut.close()
        cut = RedisLink(stalling_proxy.url, 0.02)
    well.close()


def test_a_server_that_refuses_connections_fails_at_once(redis_server: RedisServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    gone = [RedisLink(f"redis://127.0.0.1:{port}", 60) for _ in range(2)]
    well = RedisLink(redis_server.url, 60)
    outcomes = exchange([*((link, [("PING",)]) for link in gone), (well, [("ECHO", "x")])])
    assert all(isinstance(outcome, RedisError) for outcome in outcomes[:2])
    assert outcomes[2] == [b"x"]
    assert exchange([]) == []
    well.close()
