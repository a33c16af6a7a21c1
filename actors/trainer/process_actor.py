"""A training process as a Ray actor; this module loads no torch, as who starts them needs none."""

from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from eagleray.actors.trainer.run_actors import RunActors
from eagleray.actors.trainer.seams import LoopSpec
from eagleray.actors.trainer.seating import Outcome, Plan

_THREADS = 4


class _TrainProcess:
    """TrainProcess, loaded where it runs."""

    def __init__(self, spec: LoopSpec, actors: RunActors, gang: Any, stacks: Path) -> None:
        from eagleray.actors.trainer.process import TrainProcess  # noqa: PLC0415

        self._process = TrainProcess(spec, actors, gang, stacks)

    def warm_up(self) -> None:
        self._process.warm_up()

    def open_journal(self, world_size: int) -> str:
        return self._process.open_journal(world_size)

    def listen(self) -> tuple[str, int]:
        return self._process.listen()

    def run(self, plan: Plan, address: tuple[str, int] | None) -> Outcome:
        return self._process.run(plan, address)

    # These answer while `run` does.

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        return self._process.pid()

    @ray.method(concurrency_group="control")
    def pause(self) -> None:
        self._process.pause()

    @ray.method(concurrency_group="control")
    def sever(self) -> None:
        self._process.sever()


def create_process(spec: LoopSpec, actors: RunActors, gang: Any, stacks: Path, node_id: str) -> Any:
    """Start a training process on a node; it ends with its creator."""
    options: dict[str, Any] = {
        # Its place, and what that may use, is held by a worker of Ray Train.
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
    if spec.train.device == "cuda":
        # Ray would hide the node's GPUs from an actor that asks for none.
        options["runtime_env"] = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    remote: Any = ray.remote
    actor = remote(concurrency_groups={"control": _THREADS})(_TrainProcess)
    return actor.options(**options).remote(spec, actors, gang, stacks)
