"""Settles the requests of a lost replica by the delivered parts of their answers.

The replica cannot: its charge would stay until its lease expires, and then count as far as it had booked, which is not
what the client got. Any other replica settles with the store in its place, or the same one once it is back.
"""

import asyncio
import logging

import httpx
import orjson

from fleet.fleet import Fleet
from quotas.reservation import Delivered

log = logging.getLogger(__name__)

PATH = "/admin/v1/cut-requests"
PAUSE_SECONDS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0)  # before each round of asking the replicas
MAX_PENDING_REQUESTS = 10_000  # pending settlements; more are left to their leases
ASK_SECONDS = 5.0  # for one answer
CLOSE_SECONDS = 2.0  # for pending settlements of a stopping router


class Settlements:
    """Asks the replicas, one after the other, until one has settled a request. `key` is their admin key."""

    def __init__(self, fleet: Fleet, client: httpx.AsyncClient, key: str) -> None:
        self.num_settled = self.num_left = 0  # requests: settled, or left to their leases
        self._fleet, self._client = fleet, client
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._waiting: set[asyncio.Task[None]] = set()

    def cut(self, tenant: str, lost: str, delivered: Delivered) -> None:
        """Settle a request whose answer the replica `lost` did not finish, in the background."""
        if len(self._waiting) >= MAX_PENDING_REQUESTS:
            self.num_left += 1
            return
        task = asyncio.create_task(self._settle(tenant, lost, delivered))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def close(self) -> None:
        """Give pending settlements a moment, and leave the rest to their leases."""
        if self._waiting:
            await asyncio.wait(self._waiting, timeout=CLOSE_SECONDS)
        for task in self._waiting:
            task.cancel()

    async def _settle(self, tenant: str, lost: str, delivered: Delivered) -> None:
        body = orjson.dumps({"tenant": tenant, **delivered._asdict()})
        for pause in PAUSE_SECONDS:
            await asyncio.sleep(pause)
            told = [view for view in self._fleet.views.values() if view.state is not None]
            for view in [view for view in told if pause or view.name != lost]:
                if await self._is_settled(view.replica.admin, body):
                    self.num_settled += 1
                    return
        self.num_left += 1
        log.warning("a request that %s was answering is left to its lease: no other replica could settle it", lost)

    async def _is_settled(self, admin: str, body: bytes) -> bool:
        timeout = httpx.Timeout(ASK_SECONDS)
        try:
            reply = await self._client.post(f"{admin}{PATH}", content=body, headers=self._headers, timeout=timeout)
        except httpx.HTTPError:
            return False
        return reply.status_code == httpx.codes.OK
