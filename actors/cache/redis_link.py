"""One connection to Redis with one rule: after anything unexpected it is closed, not reused.

A reply that was not read stays in the socket, and the next command would take it for its own: the
wrong value, and no error. So whatever happens between sending and the last reply, even an
interrupt, closes the connection; the next call opens a new one.
"""

from collections.abc import Sequence
from typing import Any

from redis.connection import Connection, parse_url
from redis.exceptions import ResponseError

Command = Sequence[bytes | str | int]
_BUFFERED_BYTES = 16_384
"""So much a connection on which nothing is under way takes at once, whatever its server does."""


class RedisLink:
    """A connection that is opened when needed. Not for several threads.

    Args:
        url: redis://, rediss:// or unix://.
        timeout_s: For connecting, and for each wait on the socket.

    Raises:
        ValueError: The URL has another form.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        settings: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]  # not annotated there
        kind = settings.pop("connection_class", Connection)
        # RESP2 and no driver info: a connection costs no round trip before its first command.
        settings |= {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": timeout_s,
            "protocol": 2,
            "driver_info": None,
        }
        self._connection: Any = kind(**settings)
        self.timeout_s = timeout_s

    def call(self, *command: bytes | str | int) -> Any:
        """The reply to one command.

        Raises:
            RedisError: The server refused it, or did not answer in time.
            OSError: The connection failed.
        """
        reply = self.pipeline([command])[0]
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    def pipeline(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to several commands, sent together; a refusal stands in its place.

        Raises:
            RedisError: The server did not answer in time.
            OSError: The connection failed.
        """
        self.send(commands)
        return self.receive(len(commands))

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands; `receive` must follow before anything else, or `close`.

        Raises:
            RedisError: The server did not take them in time.
            OSError: The connection failed.
        """
        try:
            self.open()
            packed = self._connection.pack_commands(commands)
            self._connection.send_packed_command(packed, check_health=False)
        except BaseException:  # Also at Ctrl-C: a reply under way would go to the next call.
            self.close()
            raise

    def begin(self, commands: Sequence[Command]) -> tuple[int, memoryview]:
        """As `send`, over an open connection and without a wait.

        Returns:
            A descriptor to wait on, and what the connection did not take: for `send_some`.
        """
        packed: list[bytes] = self._connection.pack_commands(commands)
        unsent = memoryview(b"")
        if sum(map(len, packed)) <= _BUFFERED_BYTES:
            self._connection.send_packed_command(packed, check_health=False)
        else:
            unsent = memoryview(b"".join(packed))
        descriptor: int = self._connection._sock.fileno()
        return descriptor, unsent

    def send_some(self, data: memoryview) -> memoryview:
        """Send what the connection takes now that it has room; what is left."""
        sent: int = self._connection._sock.send(data)
        return data[sent:]

    def receive(self, count: int) -> list[Any]:
        """The replies to the commands that were sent; a refusal stands in its place.

        Raises:
            RedisError: The server did not answer in time.
            OSError: The connection failed.
        """
        try:
            return [self._reply() for _ in range(count)]
        except BaseException:  # As in `send`: also at Ctrl-C.
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._connection._sock is not None

    def open(self) -> None:
        """Connect, unless there is a connection.

        Raises:
            RedisError: The server refused it, or did not answer in time.
            OSError: The connection failed.
        """
        self._connection.connect()

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        self._connection.disconnect()

    def _reply(self) -> Any:
        try:
            return self._connection.read_response()
        except ResponseError as error:
            return error
