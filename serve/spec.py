"""Which model to serve, and how: plain data that crosses to the replica.

Light: neither Ray nor torch, so that a name that does not exist is seen before anything is started.
"""

from dataclasses import dataclass

from eagleray.platform.config import LoadedConfig, ServeConfig
from eagleray.platform.registry import Registry
from eagleray.platform.storage import Storage


@dataclass(frozen=True)
class ServingSpec:
    """Which model to serve, and how.

    Attributes:
        name, version: Of the registered model.
        record: Digest of its ledger record, sent with every answer.
        artifact: Digest of the folder that holds it.
        created_s: When it was registered.
        storage: The storage folder; every node sees the same one.
        config: The `serve` section.
    """

    name: str
    version: int
    record: str
    artifact: str
    created_s: float
    storage: str
    config: ServeConfig


def resolve(loaded: LoadedConfig, model: str | None = None) -> ServingSpec:
    """The model that a spec means now: the argument, else `serve.model`, else the project's own.

    Raises:
        NotFoundError: There is no such model; the message lists those there are.
    """
    config = loaded.config
    wanted = model or config.serve.model or config.train.register_as or config.name
    found = Registry(Storage(loaded.storage_path)).resolve(wanted)
    return ServingSpec(
        name=found.name,
        version=found.version,
        record=found.record,
        artifact=found.artifact,
        created_s=found.created_s,
        storage=str(loaded.storage_path),
        config=config.serve,
    )
