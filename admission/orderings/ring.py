"""The tenants that have their turns next, of those with work waiting."""

from collections.abc import Callable
from heapq import heappop, heappush

Turn = tuple[int, int]  # a round, and a place among the tenants that have their turns in it


class Ring:
    """Tenants by the round in which their debt falls below a limit, and by their turns in a round."""

    def __init__(self) -> None:
        self._heap: list[tuple[Turn, str]] = []  # a turn may be too early, never too late
        self._listed: dict[str, Turn] = {}  # the earliest that a tenant is in the heap with

    def list(self, tenant: str, turn: Turn) -> None:
        """Examine the tenant no later than at this turn."""
        if tenant not in self._listed or turn < self._listed[tenant]:
            self._listed[tenant] = turn
            heappush(self._heap, (turn, tenant))

    def first(self, find: Callable[[str], Turn | None]) -> tuple[int, str] | None:
        """Returns the round of the first turn, and the tenant that has it; None when the ring is empty.

        `find` returns a tenant's actual turn, None when it is out of the ring.
        """
        while self._heap:
            turn, tenant = self._heap[0]
            actual = find(tenant) if self._listed.get(tenant) == turn else None
            if actual == turn:
                return turn[0], tenant
            heappop(self._heap)
            if self._listed.get(tenant) == turn:
                del self._listed[tenant]
                if actual is not None:
                    self.list(tenant, actual)
        return None
