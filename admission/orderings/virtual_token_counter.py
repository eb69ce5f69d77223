"""Virtual token counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).

A counter for each tenant adds up its service by weight; the tenant with the smallest goes first. One that comes back is
lifted to the smallest counter of those waiting, or, when nobody waits, to that of the tenant which left last, so that
idleness earns nothing. While two tenants are backlogged their service differs by at most
2 max(prompt cost of the largest prompt, cost of the tokens that fit memory).
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many

from admission.aging import Aging
from admission.ordering import Indifferent, weight_of
from admission.orderings.tenant_queues import TenantQueues
from backend.sequence import Sequence


class VirtualTokenCounter(Indifferent):
    """Charged as work is planned, in whatever unit the ledger uses. Finding the head is O(tenants waiting)."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.counters: dict[str, float] = {}
        self._weights = dict(weights or {})
        self._queues = TenantQueues()
        self._last_left: str | None = None

    def __len__(self) -> int:
        return len(self._queues)

    def add(self, sequence: Sequence) -> None:
        if sequence.tenant not in self._queues.active:
            self._lift(sequence.tenant)
        self._queues.add(sequence)

    def restore(self, sequence: Sequence) -> None:
        self.add(sequence)

    def head(self) -> Sequence | None:
        active = self._queues.active
        return self._queues.first_of(min(active, key=self.counters.__getitem__)) if active else None

    def remove(self, sequence: Sequence) -> None:
        self._queues.remove(sequence)
        if sequence.tenant not in self._queues.active:
            self._last_left = sequence.tenant

    def charge(self, sequences: Many[Sequence], costs: Many[float]) -> Mapping[str, float]:
        sums = super().charge(sequences, costs)
        self.correct(sums.items())
        return sums

    def correct(self, costs: Iterable[tuple[str, float]]) -> None:
        for tenant, cost in costs:
            self.counters[tenant] += cost / weight_of(tenant, self._weights)

    def policy_changed(self, weights: Mapping[str, float], aging: Aging) -> None:
        self._weights = dict(weights)

    def standing(self, tenant: str) -> float:
        return -self.counters.get(tenant, 0.0)

    def _lift(self, tenant: str) -> None:
        counters = self.counters
        if self._queues.active:
            floor = min(counters[other] for other in self._queues.active)
        else:
            floor = counters[self._last_left] if self._last_left is not None else 0.0
        counters[tenant] = max(counters.get(tenant, 0.0), floor)
