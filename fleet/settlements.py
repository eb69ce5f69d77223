"""Has the requests settled that a lost replica leaves behind, by what the router has delivered of their answers.

The replica cannot: what it charged would stay until its lease is over, and then count as far as it had booked, which is
not what anybody got. Any other replica asks the store in its place, or the same one once it is back.
"""

import asyncio
import logging

import httpx
import orjson

from fleet.fleet import Fleet
from quotas.reservation import Delivered

log = logging.getLogger(__name__)

PATH = "/admin/v1/cut-requests"
PAUSE_SECONDS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0)  # before the replicas are asked, again and again
MAX_PENDING_REQUESTS = 10_000  # that wait to be settled; more are left to their leases
ASK_SECONDS = 5.0  # for one answer
CLOSE_SECONDS = 2.0  # that a stopping router gives those that wait


class Settlements:
    """Asks the replicas, one after the other, until one has settled a request. `key` is that of their admin ports."""

    def __init__(self, fleet: Fleet, client: httpx.AsyncClient, key: str) -> None:
        self.num_settled = self.num_left = 0  # requests: settled, or left to their leases
        self._fleet, self._client = fleet, client
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._waiting: set[asyncio.Task[None]] = set()

    def cut(self, tenant: str, lost: str, delivered: Delivered) -> None:
        """Have a request settled, whose answer the replica `lost` has not given to its end. Nobody waits for it."""
        if len(self._waiting) >= MAX_PENDING_REQUESTS:
            self.num_left += 1
            return
        task = asyncio.create_task(self._settle(tenant, lost, delivered))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def close(self) -> None:
        """Give those that wait a moment, and leave the others to their leases."""
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
