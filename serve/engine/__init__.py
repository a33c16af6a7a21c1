"""The inference engine: continuous batching over a paged KV cache.

This face is light: it imports neither torch nor Ray, so validating a request costs nothing. What
computes is one import further: `engine.Engine`, `model_runner.ModelRunner`, `sampling.sample`.
"""

from eagleray.serve.engine.block_pool import BlockPool
from eagleray.serve.engine.refusals import (
    EngineStoppedError,
    InvalidRequestError,
    QueueFullError,
)
from eagleray.serve.engine.request import FinishReason, Request, RequestState
from eagleray.serve.engine.sampling_params import SamplingParams
from eagleray.serve.engine.scheduler import Chunk, Scheduler, SchedulerLimits, StepPlan

__all__ = [
    "BlockPool",
    "Chunk",
    "EngineStoppedError",
    "FinishReason",
    "InvalidRequestError",
    "QueueFullError",
    "Request",
    "RequestState",
    "SamplingParams",
    "Scheduler",
    "SchedulerLimits",
    "StepPlan",
]
