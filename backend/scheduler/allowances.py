"""What each tenant may hold of the KV memory: a lease that somebody else renews, and that planning only reads."""

from collections import Counter
from sys import maxsize

from backend.scheduler.scheduled_step import Blocked
from backend.scheduler.waiting_queue import WaitingQueue


class Allowances:
    """Blocks held and allowed, by tenant. A tenant of which nothing was said may hold any number.

    Blocks are charged as they are allocated and credited as they are freed. A lease may be cut below what is held:
    nothing is taken away for that, but nothing is given either until enough has come back.
    """

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.wanted: dict[str, int] = {}  # blocks that a tenant was denied, in all that it would hold
        self._allowed: dict[str, int] = {}

    def allow(self, tenant: str, blocks: int | None) -> None:
        """From now on the tenant may hold this many blocks; None: any number."""
        if blocks is None:
            self._allowed.pop(tenant, None)
        else:
            self._allowed[tenant] = blocks
        self.wanted.pop(tenant, None)

    def allowed(self, tenant: str) -> int | None:
        return self._allowed.get(tenant)

    def permits(self, tenant: str, blocks: int) -> bool:
        """Whether the tenant may hold `blocks` more."""
        return not self._allowed or self.permits_in_all(tenant, self.held[tenant] + blocks)

    def permits_in_all(self, tenant: str, blocks: int) -> bool:
        """Whether the tenant may come to hold `blocks` altogether; a denial is remembered in `wanted`."""
        if blocks <= self._allowed.get(tenant, maxsize):
            return True
        self.wanted[tenant] = max(blocks, self.wanted.get(tenant, 0))
        return False

    def take(self, tenant: str, blocks: int) -> None:
        self.held[tenant] += blocks

    def give(self, tenant: str, blocks: int) -> None:
        self.held[tenant] -= blocks
        if not self.held[tenant]:
            del self.held[tenant]

    def check_integrity(self) -> None:
        assert all(blocks > 0 for blocks in self.held.values()), "a tenant holds less than nothing"


class PassedOver:
    """Keeps what the queue was told, so that it is told only of changes."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self.limits: dict[str, Blocked] = {}  # by tenant, the one that was met
        self._waiting = waiting

    def hold(self, tenant: str, limit: Blocked) -> None:
        self.limits[tenant] = limit
        self._waiting.hold(tenant, limit)

    def look_again(self, tenant: str) -> None:
        """Something has changed for a tenant that may be held."""
        if self.limits.pop(tenant, None) is not None:
            self._waiting.hold(tenant, None)
