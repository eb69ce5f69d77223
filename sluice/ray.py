"""Sluice on Ray Serve, which places replicas, restarts and scales them: serve run sluice.ray:application

Each Serve replica owns a `sluice serve` and hands requests on to it. Arguments of the application are the fields of
`Options`; docs/fleet.md has examples. It needs the extra `ray` (pip install '.[ray]').
"""

import asyncio
import logging
import os
import shlex
from math import ceil
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt
from ray import serve
from ray.serve.config import AutoscalingContext

from fleet.child import ChildReplica, settings_of
from fleet.passthrough import Passthrough

log = logging.getLogger(__name__)

MAX_ONGOING_REQUESTS = 4096  # of one replica: they wait in Sluice's queues, whose order is fair, and not in Ray's
LINGER_SECONDS = 1.0  # for errors to reach the waiters of a lost replica
KILL_SECONDS = 30.0  # beyond a drain, after which Ray kills a replica
WANTED = "sluice_replicas_wanted"


class Options(BaseModel):
    """The arguments of the application."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    flags: str = ""  # of `sluice serve`, for each replica
    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt | None = None  # None: as `min_replicas`
    num_cpus: NonNegativeFloat = 1.0  # of each replica, that Ray reserves
    num_gpus: NonNegativeFloat = 0.0


class ServeReplica:
    """A Serve replica that owns a gateway with its engine."""

    def __init__(self, flags: list[str]) -> None:
        loop = asyncio.get_running_loop()
        self._child = ChildReplica(flags, on_lost=lambda: loop.call_later(LINGER_SECONDS, os._exit, 1))

    def __serve_build_asgi_app__(self) -> Passthrough:
        return Passthrough(self._child)

    async def check_health(self) -> None:
        """Raise for Ray, which then starts another replica, unless the gateway says that it is alive."""
        await self._child.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `replicas_wanted` goes by."""
        return {WANTED: (await self._child.state()).replicas_wanted}


def replicas_wanted(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return how many replicas would each have the work that one should have, for Ray to keep within its bounds."""
    told = (context.aggregated_metrics or {}).get(WANTED, {})
    silent = max(0, context.current_num_replicas - len(told))  # they start, and count as wanted
    return ceil(sum(told.values())) + silent, {}


def application(options: Options) -> Any:
    """Build the Serve application. Raises `SettingsError` for flags that no replica could start with."""
    flags = shlex.split(options.flags)
    settings = settings_of(flags)
    most = max(options.min_replicas, options.max_replicas or 0)
    deployment = serve.deployment(
        name="sluice",
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": most,
            "look_back_period_s": 15.0,
            "upscale_delay_s": 10.0,
            "downscale_delay_s": 300.0,
            "policy": {"policy_function": "sluice.ray:replicas_wanted"},
        },
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.drain_delay + settings.drain_timeout + KILL_SECONDS,
    )
    return deployment(serve.ingress()(ServeReplica)).bind(flags)
