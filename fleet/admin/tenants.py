"""Tenants summed over the replicas of a fleet: their running and queued requests, by replica."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from fleet.fleet import Fleet
from fleet.view import ReplicaView
from gateway.background import map_in_slices

MAX_TENANT_ROWS = 300  # in a list: 100 KB, written in a millisecond
MAX_ROW_REPLICAS = 4  # replicas in a row of the list; a single tenant is shown with all

Row = dict[str, Any]


@dataclass(slots=True)
class Place:
    """The work of one tenant on one replica, by the replica's state and the requests on their way there."""

    name: str
    waiting: int = 0
    running: int = 0
    prefill_seconds: float = 0.0  # predicted, of queued prompts
    seconds: float = 0.0  # predicted engine time of all queued work

    def add(self, other: "Place") -> None:
        self.waiting += other.waiting
        self.running += other.running
        self.prefill_seconds += other.prefill_seconds
        self.seconds += other.seconds

    @property
    def rank(self) -> tuple[float, int, int]:
        return self.seconds, self.waiting, self.running


@dataclass(slots=True)
class TenantWork:
    """The work of one tenant on all replicas."""

    places: list[Place] = field(default_factory=list)
    total: Place = field(default_factory=lambda: Place(""))  # their sum
    open_requests: int = 0  # through this router

    def add(self, place: Place) -> None:
        self.places.append(place)
        self.total.add(place)


class FleetTenants:
    """Lists the tenants with work on any replica; `weight` is a tenant's by the router's policy."""

    def __init__(self, fleet: Fleet, weight: Callable[[str], float]) -> None:
        self._fleet, self._weight = fleet, weight

    async def listed(self) -> Row:
        """List the tenants by their seconds of queued work, descending."""
        found = await self._work()
        shown = nlargest(MAX_TENANT_ROWS, found, key=lambda name: found[name].total.rank)
        rows = await map_in_slices(shown, lambda name: self._row(name, found[name], MAX_ROW_REPLICAS))
        return {"tenants": rows, "truncated": len(found) - len(shown)}

    async def shown(self, name: str) -> Row:
        """One tenant with all replicas that have its work; zeros without any."""
        work = (await self._work()).get(name, TenantWork())
        return self._row(name, work, len(work.places))

    async def _work(self) -> dict[str, TenantWork]:
        """The work by tenant. Other tasks run after each replica, of which there may be hundreds."""
        found: dict[str, TenantWork] = {}
        for view in [*self._fleet.views.values()]:
            for name, place in _places(view).items():
                found.setdefault(name, TenantWork()).add(place)
            for name, count in Counter(one.tenant for one in view.open).items():
                found.setdefault(name, TenantWork()).open_requests += count
            await asyncio.sleep(0)
        return found

    def _row(self, name: str, work: TenantWork, most: int) -> Row:
        total = work.total
        return {
            "name": name,
            "weight": self._weight(name),
            "waiting": total.waiting,
            "running": total.running,
            "prefill_seconds": total.prefill_seconds,
            "seconds": total.seconds,
            "open_requests": work.open_requests,
            "num_replicas": len(work.places),
            "replicas": nlargest(most, work.places, key=lambda place: place.rank),
        }


def _places(view: ReplicaView) -> dict[str, Place]:
    places = {
        name: Place(view.name, one.requests, 0, one.prefill_seconds, one.seconds) for name, one in view.waiting.items()
    }
    running = view.state.running_by_tenant if view.state is not None else {}
    for name, count in running.items():
        places.setdefault(name, Place(view.name)).running = count
    return places
