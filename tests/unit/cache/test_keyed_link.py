"""One Redis that is away is asked three times, then left alone for a while."""

import socket

from eagleray.actors.cache.breaker import FAILURES, FIRST_PAUSE_S
from eagleray.actors.cache.cluster_link import Away
from eagleray.actors.cache.keyed_link import SingleLink

COMMANDS = [(b"a", ("GET", "a")), (b"b", ("GET", "b"))]


def test_a_silent_server_is_left_alone_after_three_failures() -> None:
    now = 0.0
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        url = f"redis://127.0.0.1:{server.getsockname()[1]}"
        link = SingleLink(url, 0.02, lambda: now)
        for _ in range(2 * FAILURES):
            assert [type(reply) for reply in link.pipeline(COMMANDS)] == [Away, Away]
        assert connections(server) == FAILURES
        now = FIRST_PAUSE_S
        assert [type(reply) for reply in link.pipeline(COMMANDS)] == [Away, Away]
        assert connections(server) == 1
        assert link.pipeline([]) == []
        link.close()


def connections(server: socket.socket) -> int:
    """How many came since the last time."""
    count = 0
    while True:
        try:
            server.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1
