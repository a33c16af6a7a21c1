"""The Ray Serve application: one deployment whose replicas each own an engine.

    serve run eagleray.serve.app:build config=eagleray.yaml model=my-model@prod

Created by Ray Serve's controller, which restarts replicas that die or whose health check fails. A
replica holds no state that lasts: requests in it are lost with it, and their clients see an error.
"""

import logging
from collections.abc import Mapping

from fastapi import FastAPI
from ray import serve
from ray.serve.config import BackpressureConfig

from eagleray.platform.config import load_config
from eagleray.platform.errors import UsageError
from eagleray.serve.api.openai import create_app
from eagleray.serve.backend import key_store, limit_threads, open_model
from eagleray.serve.engine.refusals import EngineStoppedError
from eagleray.serve.replica_port import keep_on_node
from eagleray.serve.spec import ServingSpec, resolve

logger = logging.getLogger(__name__)

DEPLOYMENT = "model"
_HEALTH_PERIOD_S = 5.0
_HEALTH_TIMEOUT_S = 30.0
_DRAIN_TIMEOUT_S = 20.0
_STARTS = 2
# Beyond its places a replica answers 429 at once, so it must be handed more than it can hold.
_REFUSAL_PLACES = 256
# What waits in the proxy for a replica to refuse it is bounded as well.
_PROXY_PLACES = 256
_PROXY_RETRY_S = 1.0


@serve.ingress()
class ModelServer:
    """One replica: an engine and the HTTP application in front of it."""

    def __init__(self, spec: ServingSpec) -> None:
        limit_threads(spec.config)
        keep_on_node()
        self._spec = spec
        self._model = open_model(spec)
        logger.info(
            "serving model=%s@%d digest=%s kv_tokens=%d",
            spec.name,
            spec.version,
            spec.record,
            self._model.engine.limits.pool_tokens,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application; Serve's proxy has put x-request-id on the answer already."""
        return create_app(self._model, key_store(self._spec), sends_request_id=False)

    def check_health(self) -> None:
        """Have the replica replaced when its engine has died.

        Raises:
            EngineStoppedError: It has.
        """
        if not self._model.engine.is_healthy:
            raise EngineStoppedError(f"the engine of {self._spec.name} has stopped")


def application(spec: ServingSpec) -> serve.Application:
    """The application that serves one model."""
    config = spec.config
    deployed = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=config.num_replicas,
        ray_actor_options={"num_cpus": config.cpus_per_replica},
        max_ongoing_requests=config.max_running + config.max_queued + _REFUSAL_PLACES,
        max_queued_requests=_PROXY_PLACES,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=_PROXY_RETRY_S),
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=_DRAIN_TIMEOUT_S,
        # What keeps a model from loading rarely goes away: its reason should be seen soon.
        max_constructor_retry_count=_STARTS,
    )(ModelServer)
    return deployed.bind(spec)


def build(args: Mapping[str, str]) -> serve.Application:
    """The builder that `serve run` and Serve's config files call.

    Args:
        args: `config`, a path (eagleray.yaml by default); `model`, a spec; every other key is a
            dotted override.

    Raises:
        UsageError: The configuration cannot be read.
        NotFoundError: There is no such model.
    """
    overrides = [f"{key}={value}" for key, value in args.items() if key not in ("config", "model")]
    if any("." not in override.partition("=")[0] for override in overrides):
        raise UsageError(
            f"arguments {', '.join(args)}: beside config and model only dotted overrides are known",
            "write for example serve.max_running=8",
        )
    loaded = load_config(args.get("config", "eagleray.yaml"), overrides)
    return application(resolve(loaded, args.get("model")))
