"""The admin API of a router: the router's view of its fleet. docs/fleet.md describes each answer."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from starlette.routing import Route

from fleet.admin.diagnosis import FleetDiagnosis
from fleet.admin.summary import summarized
from fleet.admin.tenants import FleetTenants
from fleet.errors import ReplicaNotFound
from fleet.fleet import Fleet
from fleet.retries import RetryBudget
from fleet.view import ReplicaView
from gateway.admin.endpoint import AdminRequest, Json, admin_route, who_asks
from gateway.quoting import quoted
from gateway.replica.state import NO_CHANGES
from gateway.version import VERSION

PREFIX = "/admin/v1"


class FleetApi:
    """Answers from the router's present view; replicas are asked for their diagnoses alone.

    `weight` is a tenant's by the router's policy, and `is_draining` is true while the router is about to stop.
    """

    def __init__(
        self,
        fleet: Fleet,
        budget: RetryBudget,
        diagnosis: FleetDiagnosis,
        weight: Callable[[str], float],
        is_draining: Callable[[], bool],
    ) -> None:
        self._fleet, self._budget, self._diagnosis, self._is_draining = fleet, budget, diagnosis, is_draining
        self._tenants = FleetTenants(fleet, weight)
        self._started = time.time()

    def routes(self) -> list[Route]:
        """The routes of the API; the first match answers a request."""
        return [
            admin_route("GET", f"{PREFIX}/me", who_asks),
            admin_route("GET", f"{PREFIX}/overview", self.overview),
            admin_route("GET", f"{PREFIX}/fleet", self.fleet),
            admin_route("GET", f"{PREFIX}/fleet/replicas/{{name:name}}", self.replica),
            admin_route("GET", f"{PREFIX}/fleet/tenants", self.tenants),
            admin_route("GET", f"{PREFIX}/fleet/tenants/{{name:name}}", self.tenant),
            admin_route("GET", f"{PREFIX}/diagnosis", self.diagnosis),
        ]

    async def overview(self, request: AdminRequest) -> Json:
        fleet, budget = self._fleet, self._budget
        rows = [summarized(fleet, view) for view in fleet.views.values()]
        told = [row.told for row in rows if row.told is not None]
        return {
            "version": VERSION,
            "started": self._started,
            "now": time.time(),
            "draining": self._is_draining(),
            "models": sorted({one.model for one in told}),
            "available": len(fleet.available()),
            "running": sum(one.running for one in told),
            "seats": sum(one.seats for one in told),
            "waiting": sum(one.waiting for one in told),
            "work_seconds": sum(one.work_seconds for one in told),
            "kv_tokens": sum(one.kv_tokens for one in told),
            "kv_tokens_held": sum(one.kv_tokens * one.kv_share for one in told),
            "replicas_wanted": self._replicas_wanted(),
            "attempts": fleet.num_attempts,
            "retries": budget.taken,
            "retries_left": budget.is_left_for_all,
            "replicas": rows,
        }

    async def fleet(self, request: AdminRequest) -> Json:
        replicas = [self._report(view) for view in self._fleet.views.values()]
        return {"replicas": replicas, "replicas_wanted": self._replicas_wanted()}

    async def replica(self, request: AdminRequest) -> Json:
        view = self._fleet.views.get(request.name)
        if view is None:
            raise ReplicaNotFound(f"The router has no replica {quoted(request.name, 100)}.")
        return self._report(view)

    async def tenants(self, request: AdminRequest) -> Json:
        return await self._tenants.listed()

    async def tenant(self, request: AdminRequest) -> Json:
        return await self._tenants.shown(request.name)

    async def diagnosis(self, request: AdminRequest) -> Json:
        return await self._diagnosis.report()

    def _report(self, view: ReplicaView) -> dict[str, Any]:
        """The router's view of one replica, with its last state."""
        summary = asdict(summarized(self._fleet, view))
        return summary | {
            "available": view.is_available(self._fleet.clock()),
            "draining": view.state is not None and view.state.draining,
            "state": view.state and replace(view.state, beginnings=NO_CHANGES),
        }

    def _replicas_wanted(self) -> float:
        return sum(view.state.replicas_wanted for view in self._fleet.views.values() if view.state)
