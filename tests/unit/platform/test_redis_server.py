"""Which Redis is used, and what is said when there is none."""

import importlib.util
from pathlib import Path

import pytest

from eagleray.platform import redis_server
from eagleray.platform.config import RedisConfig
from eagleray.platform.errors import ServiceError
from eagleray.platform.redis_server import RedisServer, masked

UNUSED_PORT = 1  # Nobody listens on tcpmux; connecting is refused at once.


@pytest.fixture
def no_server_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server.shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_mode_off_starts_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert RedisServer.start(RedisConfig(mode="off"), tmp_path) is None
    assert "off by configuration" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_server_installed")
def test_no_server_at_all_is_said_and_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert RedisServer.start(RedisConfig(), tmp_path) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "no server on PATH and none embedded" in caplog.text


def test_no_room_starts_nothing(tmp_path: Path) -> None:
    # Redis would take 0 for no limit.
    assert RedisServer.start(RedisConfig(max_bytes=0), tmp_path) is None


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:hush@127.0.0.1:{UNUSED_PORT}/0",
        f"redis://127.0.0.1:{UNUSED_PORT}/0?password=hush",
        "unix:///nowhere/redis.sock?password=hush",
        "http://user:hush@127.0.0.1",
    ],
)
def test_a_configured_server_that_does_not_answer_is_named_without_its_password(
    tmp_path: Path, url: str
) -> None:
    config = RedisConfig.model_validate({"url": url, "start_timeout_s": 1})
    with pytest.raises(ServiceError) as failed:
        RedisServer.start(config, tmp_path)
    assert "does not answer in 1 s" in failed.value.what
    assert "hush" not in str(failed.value) + repr(failed.value)
    assert failed.value.__cause__ is None


def test_urls_are_masked_but_can_be_told_apart() -> None:
    assert masked("redis://u:p@h:1/2?x=y") == "redis://***@h:1/2"
    assert masked("unix:///run/redis.sock") == "unix:///run/redis.sock"
