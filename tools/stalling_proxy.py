"""A proxy before a Redis, for tests: answers stop where they are told to, and nothing follows."""

import socket
import threading


class StallingProxy:
    """Passes bytes on to Redis; in a connection, the answer stops after `limit` bytes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._server = socket.create_server(("127.0.0.1", 0))
        self.limit: int | None = None
        self.url = f"redis://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            redis = socket.socket(socket.AF_UNIX)
            redis.connect(self._path)
            threading.Thread(target=self._pass, args=(client, redis, None), daemon=True).start()
            threading.Thread(
                target=self._pass, args=(redis, client, self.limit), daemon=True
            ).start()

    def _pass(self, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        left = limit
        while chunk := _received(source):
            part = chunk if left is None else chunk[:left]
            left = None if left is None else left - len(part)
            try:
                target.sendall(part)
            except OSError:
                return
        target.close()


def _received(source: socket.socket) -> bytes:
    try:
        return source.recv(65536)
    except OSError:
        return b""
