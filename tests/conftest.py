"""Fixtures for all tests."""

import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from eagleray.platform.storage import Storage

# A busy machine makes any example slow; pytest-timeout bounds the whole test instead.
settings.register_profile("eagleray", deadline=None, max_examples=50)
settings.load_profile("eagleray")


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """A verb sets up logging for its process; here the next test's process is the same one."""
    logger = logging.getLogger("eagleray")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate, logger.level = before[0], before[1], before[2]


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """Storage in a folder of its own."""
    return Storage(tmp_path / "storage")


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Waits for a condition: `until(condition, "what it is", timeout_s=30)`, else fails."""

    def wait(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"{what} did not come within {timeout_s:g} s")
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[str]:
    """A private local Ray cluster with four CPUs and token authentication; gives its address.

    The tests of a module share it, name no actors, and end what they start in it. It ends with
    them: other modules test what happens in a process without Ray.
    """
    import ray
    from ray._raylet import AuthenticationTokenLoader, Config

    # A short path: Ray puts Unix sockets deep below it.
    folder = Path(tempfile.mkdtemp(prefix="er-", dir="/tmp"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    names = (*ours, "RAY_AUTH_TOKEN", "RAY_ADDRESS")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ.update(ours)

    def forget_authentication() -> None:
        # Ray reads mode and token once per process; another test may have made it do so.
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()

    forget_authentication()
    try:
        context = ray.init(
            num_cpus=4,
            object_store_memory=200_000_000,
            include_dashboard=False,
            namespace="eagleray",
            logging_level=logging.ERROR,
            log_to_driver=False,
            _temp_dir=str(folder / "ray"),
        )
        yield str(context.address_info["gcs_address"])
    finally:
        ray.shutdown()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        forget_authentication()
        shutil.rmtree(folder, ignore_errors=True)
