"""Sets the engine's KV memory of each limited tenant to the store's leases."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from admission.admission import Admission
from quotas.errors import NotSent, QuotaError
from quotas.store.redis_store import RedisStore

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.02  # between checks for a tenant that was denied a block
RENEW_SECONDS = 1.0  # between renewals of a sufficient lease
RETRY_SECONDS = 0.2  # between attempts to get memory held by other replicas
HEADROOM_RATIO = 1.25  # of the demand, so that growth seldom waits for a renewal
IDLE_SECONDS = 30.0  # without demand, after which a tenant is forgotten


@dataclass(slots=True)
class _Lease:
    limit: int  # bytes
    coming: int = 0  # blocks of requests about to be queued
    is_short: bool = False  # other replicas hold the memory it wants
    renewed: float = float("-inf")
    expires: float = float("-inf")
    blocks: int = 0
    wanted_at: float = 0.0  # moment of the last demand


class KvLeases:
    """Renews the leases of tenants on the event loop; `clock` is in seconds and never goes backwards.

    A limit that is set or lowered leaves the sequences that are in the engine what the longest of them may come to
    need, so that each comes to its end.
    """

    def __init__(self, store: RedisStore, memory: Admission, block_bytes: int, clock: Callable[[], float]) -> None:
        self._store = store
        self._memory = memory
        self._block_bytes = block_bytes
        self._clock = clock
        self.leases: dict[str, _Lease] = {}  # by tenant that has a limit, or had one at its last request
        self._wake = asyncio.Event()

    def use(self, tenant: str, limit: int | None, blocks: int) -> None:
        """Announce a request of the tenant that may need `blocks`. `limit` is in bytes by the present policy; None: no
        limit.
        """
        lease = self.leases.get(tenant)
        if limit is None:
            if lease is not None:
                del self.leases[tenant]
                self._memory.allow(tenant, None)
            return
        if lease is None:
            lease = self.leases[tenant] = _Lease(limit)
            self._memory.allow(tenant, 0)
        lease.coming = max(lease.coming, blocks)
        lease.wanted_at = self._clock()
        if lease.limit != limit or lease.blocks < blocks:
            lease.limit, lease.renewed = limit, float("-inf")
            self._wake.set()

    async def run(self) -> None:
        """Renew leases for as long as the server runs."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS if self.leases else None):
                    await self._wake.wait()
            self._wake.clear()
            await self.renew_due()

    async def renew_due(self) -> None:
        """Renew the leases that are due, once."""
        due = [(tenant, lease) for tenant, lease in self.leases.items() if self._is_due(tenant, lease)]
        if due:
            longest = self._memory.longest_of([tenant for tenant, _ in due])
            await asyncio.gather(*(self._renew(tenant, lease, longest[tenant]) for tenant, lease in due))

    def _is_due(self, tenant: str, lease: _Lease) -> bool:
        now, denied = self._clock(), RETRY_SECONDS if lease.is_short else 0.0
        if lease.blocks and now >= lease.expires:
            return True
        return now >= lease.renewed + (denied if self._memory.is_denied(tenant) else RENEW_SECONDS)

    async def _renew(self, tenant: str, lease: _Lease, longest: int) -> None:
        """Renew one lease; `longest` is the tenant's longest sequence, in blocks."""
        now = self._clock()
        demand, lease.coming = max(self._memory.demand(tenant), lease.coming), 0
        if demand:
            lease.wanted_at = now
        limit = max(lease.limit, longest * self._block_bytes)
        wanted = min(round(demand * HEADROOM_RATIO) * self._block_bytes, limit)
        before = lease.blocks
        if (fewer := wanted // self._block_bytes) < before:  # given back before others may lease it
            self._set(tenant, lease, fewer)
        try:
            granted, seconds = await self._store.lease_kv(tenant, limit, wanted)
        except QuotaError as error:
            if isinstance(error, NotSent):
                self._set(tenant, lease, before)
            self._outage(tenant, lease, error)
            return
        lease.renewed, lease.expires, lease.is_short = now, now + seconds, granted < wanted
        self._set(tenant, lease, granted // self._block_bytes)
        if not longest and not demand and now > lease.wanted_at + IDLE_SECONDS and self.leases.get(tenant) is lease:
            del self.leases[tenant]
            self._memory.allow(tenant, None)

    def _outage(self, tenant: str, lease: _Lease, error: QuotaError) -> None:
        """Keep the lease until it expires while the store does not answer; after that, no new block is granted."""
        log.debug("the KV lease of a tenant is not renewed: %s", error)
        lease.renewed = self._clock()
        if self._clock() >= lease.expires:
            self._set(tenant, lease, 0)

    def _set(self, tenant: str, lease: _Lease, blocks: int) -> None:
        """Set the blocks that the tenant may hold, unless its limit was lifted meanwhile."""
        if self.leases.get(tenant) is lease and (blocks != lease.blocks or self._memory.is_denied(tenant)):
            lease.blocks = blocks
            self._memory.allow(tenant, blocks)
