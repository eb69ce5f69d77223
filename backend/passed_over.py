"""Tenants at a limit of their own, which the queue passes over until something changes for them."""

from backend.flight import Blocked
from backend.waiting import WaitingQueue


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
