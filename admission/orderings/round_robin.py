"""Round robin over tenants by number of requests: what the Gateway API inference extension calls its fairness policy.

Blind to size: a tenant of long requests gets as many turns as one of short ones, hence far more of the machine.
"""

from collections import OrderedDict

from admission.ordering import Indifferent
from admission.orderings.tenant_queues import TenantQueues
from backend.sequence import Sequence


class RequestRoundRobin(Indifferent):
    """A tenant's turn ends when its first request leaves the queue, by admission or by cancellation. O(1)."""

    def __init__(self) -> None:
        self._queues = TenantQueues()
        self._turns: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queues)

    def add(self, sequence: Sequence) -> None:
        self._queues.add(sequence)
        self._turns.setdefault(sequence.tenant)

    def restore(self, sequence: Sequence) -> None:
        self.add(sequence)

    def head(self) -> Sequence | None:
        return self._queues.first_of(next(iter(self._turns))) if self._turns else None

    def remove(self, sequence: Sequence) -> None:
        tenant, is_head = sequence.tenant, sequence is self.head()
        self._queues.remove(sequence)
        if tenant not in self._queues.active:
            del self._turns[tenant]
        elif is_head:
            self._turns.move_to_end(tenant)
