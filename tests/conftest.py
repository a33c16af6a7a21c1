"""Fixtures for all tests."""

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagleray.platform.storage import Storage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """Storage in a folder of its own."""
    return Storage(tmp_path / "storage")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A private local Ray cluster with four CPUs and token authentication; gives its address.

    Session-wide: tests share it, name no actors, and end what they start in it.
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
