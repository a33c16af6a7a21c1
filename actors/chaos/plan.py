"""A plan of faults: which process of a run is killed or stopped, at which step or how often.

    seed: 1
    faults:
      - {kind: kill, role: process, rank: 1, step: 40}
      - {kind: stop, role: process, step: 80}          # of any rank
    storm: {roles: [process, worker, loader], every_s: 20, count: 10}

The same seed gives the same victims and the same waits. Format: docs/guarantees.md#chaos.
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from eagleray.platform.config.values import Seconds, Section
from eagleray.platform.errors import UsageError

Kind = Literal["kill", "stop", "hang"]
Role = Literal[
    "process", "worker", "node", "gang", "store", "recorder", "loader", "evictor", "controller"
]
ROLES: tuple[Role, ...] = (
    "process", "worker", "node", "gang", "store", "recorder", "loader", "evictor", "controller",
)  # fmt: skip
_RANKED = ("process", "worker")


class Fault(Section):
    """One fault."""

    kind: Kind = "kill"
    """kill: SIGKILL. stop: SIGSTOP, as a machine that hangs. hang: its training thread alone."""
    role: Role = "process"
    """process: what trains a rank. worker: what holds its place in Ray Train. node: the raylet of
    a node where ranks train, but not that of the driver: all that runs there ends with it."""
    rank: int | None = Field(default=None, ge=0)
    """Null: any one, by the seed."""
    step: int = Field(default=0, ge=0)
    """At the first figures at or after it."""

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.rank is not None and self.role not in _RANKED:
            raise ValueError(f"role {self.role} has no rank; {' and '.join(_RANKED)} have")
        if self.kind == "hang" and self.role != "process":
            raise ValueError(f"role {self.role} cannot hang; only role process can")
        return self


class Storm(Section):
    """Faults again and again."""

    kind: Kind = "kill"
    roles: list[Role] = Field(default=["process"], min_length=1)
    every_s: Seconds = Field(default=20.0, gt=0)
    """Between two faults on average; each wait is drawn between half and one and a half of it."""
    count: int = Field(default=10, ge=1, le=10_000)

    @model_validator(mode="after")
    def _fits_its_roles(self) -> Self:
        for role in self.roles:
            Fault(kind=self.kind, role=role)
        return self


class ChaosPlan(Section):
    """What is to go wrong."""

    seed: int = 0
    faults: tuple[Fault, ...] = ()
    storm: Storm | None = None

    @model_validator(mode="after")
    def _has_faults(self) -> Self:
        if not self.faults and self.storm is None:
            raise ValueError("needs `faults` or `storm`")
        return self

    def gusts(self) -> Iterator[tuple[float, Fault]]:
        """The storm's faults, each with the seconds to wait before it."""
        storm = self.storm
        if storm is None:
            return
        draw = random.Random(self.seed)
        for _ in itertools.repeat(None, storm.count):
            wait_s = storm.every_s * draw.uniform(0.5, 1.5)
            yield wait_s, Fault(kind=storm.kind, role=draw.choice(storm.roles))


def load_plan(path: Path) -> ChaosPlan:
    """Read a plan.

    Raises:
        UsageError: There is no such file, or it is not a plan; says what is wrong with it.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the plan {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"the plan {path} is not YAML: {error}") from error
    try:
        return ChaosPlan.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the plan"
        raise UsageError(
            f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}",
            "docs/guarantees.md#chaos has an example",
        ) from error
