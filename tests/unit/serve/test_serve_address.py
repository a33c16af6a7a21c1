import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from eagleray.platform.config import ServeConfig
from eagleray.platform.errors import PortInUseError, UsageError
from eagleray.serve.address import base_url, check_exposure, check_port, served_digest


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("x-model-digest", "abc")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def ours() -> Iterator[ServeConfig]:
    """An endpoint that answers like one of ours."""
    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield ServeConfig(port=server.server_address[1])
        server.shutdown()
        thread.join(10)


@pytest.fixture
def foreign() -> Iterator[ServeConfig]:
    """A socket that listens and says nothing of ours."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        yield ServeConfig(port=listener.getsockname()[1])


def test_a_free_port_passes() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    check_port(ServeConfig(port=port), may_be_ours=False)


def test_a_taken_port_is_refused_naming_it(foreign: ServeConfig) -> None:
    for may_be_ours in (False, True):
        with pytest.raises(PortInUseError, match=str(foreign.port)) as caught:
            check_port(foreign, may_be_ours=may_be_ours)
    assert f"serve.port={foreign.port + 1}" in caught.value.fix


def test_an_endpoint_of_ours_is_no_obstacle_if_it_may_be_there(ours: ServeConfig) -> None:
    assert served_digest(base_url(ours)) == "abc"
    check_port(ours, may_be_ours=True)
    with pytest.raises(PortInUseError):
        check_port(ours, may_be_ours=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_without_keys_only_loopback_may_be_served(host: str) -> None:
    check_exposure(ServeConfig(host=host, require_key=False))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org"])
def test_without_keys_any_other_address_is_refused(host: str) -> None:
    check_exposure(ServeConfig(host=host, require_key=True))
    with pytest.raises(UsageError, match=host):
        check_exposure(ServeConfig(host=host, require_key=False))


def test_an_ipv6_host_is_bracketed_in_the_url() -> None:
    assert base_url(ServeConfig(host="::1", port=8000)) == "http://[::1]:8000"
