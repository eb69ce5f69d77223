"""Orders waiting sequences by tenant, and each tenant's by arrival."""

from collections import OrderedDict
from heapq import heapify, heappop, heappush

from admission.share import Share
from backend.scheduler.sequence import Sequence
from labs.orderings.ordering import Indifferent, Line
from labs.orderings.sequence_heap import Predict, SequenceHeap


class TenantQueues:
    """The queues of tenants; `active` are backlogged ones, in the order of their backlogs' beginnings."""

    def __init__(self) -> None:
        self.active: dict[str, SequenceHeap] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, sequence: Sequence) -> None:
        """Add a sequence. A preempted one keeps its arrival, hence its place."""
        self.active.setdefault(sequence.tenant, SequenceHeap()).add(sequence, sequence.arrival)
        self._size += 1

    def remove(self, sequence: Sequence) -> None:
        queue = self.active[sequence.tenant]
        queue.remove(sequence)
        self._size -= 1
        if not queue:
            del self.active[sequence.tenant]

    def first_of(self, tenant: str) -> Sequence:
        first = self.active[tenant].first()
        assert first is not None, "an active tenant has work waiting"
        return first

    def with_newcomer(self, newcomer: Sequence) -> dict[str, list[Sequence]]:
        """Return the queue of each tenant, with a newcomer at the end of its own, in the order of `active`."""
        lines = {tenant: [one for _, one in queue.in_order()] for tenant, queue in self.active.items()}
        lines.setdefault(newcomer.tenant, []).append(newcomer)
        return lines


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

    restore = add

    def head(self) -> Sequence | None:
        return self._queues.first_of(next(iter(self._turns))) if self._turns else None

    def around(self, newcomer: Sequence) -> Line:
        lines = self._queues.with_newcomer(newcomer)
        turns = list(dict.fromkeys([*self._turns, newcomer.tenant]))
        line, number = list[Sequence](), 0
        while turns:
            line += [lines[tenant][number] for tenant in turns]
            number += 1
            turns = [tenant for tenant in turns if len(lines[tenant]) > number]
        return Line.split(line, newcomer)

    def remove(self, sequence: Sequence) -> None:
        tenant, is_head = sequence.tenant, sequence is self.head()
        self._queues.remove(sequence)
        if tenant not in self._queues.active:
            del self._turns[tenant]
        elif is_head:
            self._turns.move_to_end(tenant)


class VirtualTokenCounter(Indifferent):
    """The tenant with the least service goes first, by engine seconds over its weight (Sheng et al., 2024, by tokens).

    Finding the head is O(backlogged tenants).
    """

    def __init__(self, share: Share, cost: Predict) -> None:
        """`cost` predicts a whole request's engine seconds; only forecasts depend on it."""
        self._share, self._cost = share, cost
        self._lifts: dict[str, float] = {}  # engine seconds added to tenants' service
        self._queues = TenantQueues()
        self._last_left: str | None = None

    def __len__(self) -> int:
        return len(self._queues)

    def counter(self, tenant: str) -> float:
        return self._share.account(tenant).served + self._lifts.get(tenant, 0.0)

    def add(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        if tenant not in self._queues.active:
            self._lifts[tenant] = self._lifted(tenant) - self._share.account(tenant).served
        self._queues.add(sequence)

    restore = add

    def head(self) -> Sequence | None:
        active = self._queues.active
        return self._queues.first_of(min(active, key=self.counter)) if active else None

    def around(self, newcomer: Sequence) -> Line:
        """The line if each request were charged its whole cost at admission."""
        lines, line = self._queues.with_newcomer(newcomer), list[Sequence]()
        counters = {tenant: self.counter(tenant) for tenant in lines}
        counters[newcomer.tenant] = self._lifted(newcomer.tenant)
        turns = [(counters[tenant], place, tenant, 0) for place, tenant in enumerate(lines)]
        heapify(turns)
        while turns:
            counter, place, tenant, number = heappop(turns)
            line.append(one := lines[tenant][number])
            counter += self._cost(one) / self._share.account(tenant).weight
            if number + 1 < len(lines[tenant]):
                heappush(turns, (counter, place, tenant, number + 1))
        return Line.split(line, newcomer)

    def remove(self, sequence: Sequence) -> None:
        self._queues.remove(sequence)
        if sequence.tenant not in self._queues.active:
            self._last_left = sequence.tenant

    def _lifted(self, tenant: str) -> float:
        """The tenant's counter once it is backlogged."""
        own, active = self.counter(tenant), self._queues.active
        if tenant in active:
            return own
        if active:
            return max(own, min(map(self.counter, active)))
        return own if self._last_left is None else max(own, self.counter(self._last_left))
