"""A Redis of our own: private, restarted when it dies, gone when we are."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from eagleray.platform import redis_server as module
from eagleray.platform.config import RedisConfig
from eagleray.platform.redis_server import RedisServer

Start = Callable[..., RedisServer]
Until = Callable[..., None]


def socket_of(server: RedisServer) -> Path:
    return Path(server.url.removeprefix("unix://"))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_it_listens_on_a_private_socket_only_and_keeps_nothing(redis_server: RedisServer) -> None:
    with Redis.from_url(redis_server.url) as client:
        settings = client.config_get("*")
    assert settings["port"] == "0"
    assert settings["save"] == ""
    assert settings["appendonly"] == "no"
    assert settings["maxmemory"] == "64000000"
    assert settings["maxmemory-policy"] == "noeviction"
    folder = socket_of(redis_server).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_stopping_twice_ends_it_and_removes_its_folder(redis_server: RedisServer) -> None:
    pid, folder = redis_server.pid, socket_of(redis_server).parent
    assert pid is not None
    redis_server.stop()
    redis_server.stop()
    assert not is_running(pid)
    assert redis_server.pid is None
    assert not folder.exists()


def test_one_that_is_killed_is_started_again_at_the_same_address(
    redis_server: RedisServer, until: Until
) -> None:
    first = redis_server.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: redis_server.pid not in (None, first), "a new process")

    def answers() -> bool:
        try:
            with Redis.from_url(redis_server.url) as client:
                return bool(client.ping())
        except RedisError:
            return False

    until(lambda: socket_of(redis_server).exists() and answers(), "an answer")


def test_one_that_keeps_dying_is_given_up(
    start_redis: Start, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(module, "_MAX_RESTARTS", 1)
    server = start_redis()
    for _ in range(2):
        until(lambda: server.pid is not None, "a process")
        os.kill(server.pid or 0, signal.SIGKILL)
        until(lambda: server.pid is None, "its death")
    supervisor = server._process
    assert supervisor is not None
    until(lambda: not supervisor._thread.is_alive(), "the supervisor's end")
    assert server.pid is None


def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path, until: Until) -> None:
    program = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from eagleray.platform.config import RedisConfig
        from eagleray.platform.redis_server import RedisServer
        server = RedisServer.start(RedisConfig(start_timeout_s=30), Path(sys.argv[1]))
        print(server.pid, flush=True)
        time.sleep(600)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    until(lambda: not is_running(pid), "the server's end")


def test_a_folder_too_deep_for_a_socket_is_replaced_by_a_temporary_one(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    server = RedisServer.start(RedisConfig(start_timeout_s=30), deep)
    assert server is not None
    try:
        assert len(str(socket_of(server))) < 100
        assert not deep.exists()
    finally:
        server.stop()
    assert not socket_of(server).parent.exists()


def test_a_server_that_does_not_start_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    broken.chmod(0o755)
    real = list(module._binaries())
    monkeypatch.setattr(module, "_binaries", lambda: iter([broken, *real]))
    server = RedisServer.start(RedisConfig(start_timeout_s=30), tmp_path)
    assert server is not None
    server.stop()
    assert "no such option" in caplog.text
    monkeypatch.setattr(module, "_binaries", lambda: iter([broken]))
    assert RedisServer.start(RedisConfig(start_timeout_s=30), tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["redis-server"]


def test_a_configured_server_is_used_and_never_stopped(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    config = RedisConfig.model_validate({"url": redis_server.url})
    other = RedisServer.start(config, tmp_path)
    assert other is not None
    assert (other.url, other.pid) == (redis_server.url, None)
    other.stop()
    assert redis_server.pid is not None
