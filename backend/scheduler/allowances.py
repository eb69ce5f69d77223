"""Allowances: the KV blocks that each tenant holds and may hold, and the tenants held at a limit of their own."""

from collections import Counter
from sys import maxsize

from backend.scheduler.scheduled_step import WaitReason
from backend.scheduler.waiting_queue import WaitingQueue


class Allowances:
    """Counts the blocks that each tenant holds against its lease: unlimited, unless `allow` sets one.

    A tenant's lease is renewed by the gateway; planning reads it and never waits for it. Blocks are charged as they are
    allocated and credited as they are freed. A lease may be cut below the tenant's holding: nothing is taken away, but
    nothing more is allocated until enough has been freed.
    """

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.requested: dict[str, int] = {}  # by tenants that were denied blocks, all that they would hold
        self._allowed: dict[str, int] = {}

    def allow(self, tenant: str, blocks: int | None) -> None:
        """Let the tenant hold this many blocks from now on; None: any number."""
        if blocks is None:
            self._allowed.pop(tenant, None)
        else:
            self._allowed[tenant] = blocks
        self.requested.pop(tenant, None)

    def allowed(self, tenant: str) -> int | None:
        return self._allowed.get(tenant)

    def permits(self, tenant: str, blocks: int) -> bool:
        """Return True if the tenant may hold `blocks` more."""
        return not self._allowed or self.permits_in_all(tenant, self.held[tenant] + blocks)

    def permits_in_all(self, tenant: str, blocks: int) -> bool:
        """Return True if the tenant may come to hold `blocks` altogether; a denial is remembered in `requested`."""
        if blocks <= self._allowed.get(tenant, maxsize):
            return True
        self.requested[tenant] = max(blocks, self.requested.get(tenant, 0))
        return False

    def charge(self, tenant: str, blocks: int) -> None:
        self.held[tenant] += blocks

    def credit(self, tenant: str, blocks: int) -> None:
        self.held[tenant] -= blocks
        if not self.held[tenant]:
            del self.held[tenant]

    def check_integrity(self) -> None:
        assert all(blocks > 0 for blocks in self.held.values()), "a tenant holds less than nothing"


class HeldTenants:
    """The tenants that the queue holds back at a limit of their own; the queue hears of changes alone."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self.reasons: dict[str, WaitReason] = {}  # by tenant, the limit that was met
        self.num_changes = 0  # of tenants' limits and queues so far
        self._waiting = waiting

    def hold(self, tenant: str, reason: WaitReason) -> None:
        self.reasons[tenant] = reason
        self._waiting.hold(tenant, reason)

    def resume_all(self, reason: WaitReason) -> None:
        """Let the queue offer the sequences of all tenants again that were held for this reason."""
        for tenant in [tenant for tenant, met in self.reasons.items() if met is reason]:
            self.resume(tenant)

    def resume(self, tenant: str) -> None:
        """Let the queue offer the tenant's sequences again, if it was held: something has changed for it."""
        self.num_changes += 1
        if self.reasons.pop(tenant, None) is not None:
            self._waiting.hold(tenant, None)
