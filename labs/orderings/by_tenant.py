"""Orders waiting sequences by tenant, and each tenant's by arrival."""

from collections import OrderedDict, abc
from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush

from admission.aging import Aging
from admission.orderings.by_key import SequenceHeap
from admission.orderings.ordering import Indifferent, Line, weight_of
from backend.scheduler.sequence import Sequence


def _prompt_tokens(sequence: Sequence) -> float:
    return float(len(sequence.prompt))


class TenantQueues:
    """The queues of tenants; `active` are those with work waiting, in the order in which they last began to
    have some.
    """

    def __init__(self) -> None:
        self.active: dict[str, SequenceHeap] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, sequence: Sequence) -> None:
        """Add a sequence. One that was preempted keeps its arrival, hence its place."""
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
        """Returns the queue of each tenant with a newcomer behind those of its own, in the order of `active`."""
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

    def restore(self, sequence: Sequence) -> None:
        self.add(sequence)

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
    """Charged as work is planned, in whatever unit the ledger uses. Finding the head is O(tenants waiting)."""

    def __init__(
        self, weights: Mapping[str, float] | None = None, estimate: Callable[[Sequence], float] = _prompt_tokens
    ) -> None:
        """`estimate` is a whole request's cost in that unit; nothing but what is foreseen depends on it."""
        self.counters: dict[str, float] = {}
        self._estimate = estimate
        self._weights = dict(weights or {})
        self._queues = TenantQueues()
        self._last_left: str | None = None

    def __len__(self) -> int:
        return len(self._queues)

    def add(self, sequence: Sequence) -> None:
        if sequence.tenant not in self._queues.active:
            self.counters[sequence.tenant] = self._lifted(sequence.tenant)
        self._queues.add(sequence)

    def restore(self, sequence: Sequence) -> None:
        self.add(sequence)

    def head(self) -> Sequence | None:
        active = self._queues.active
        return self._queues.first_of(min(active, key=self.counters.__getitem__)) if active else None

    def around(self, newcomer: Sequence) -> Line:
        """As if each were charged with all of its cost when it is admitted."""
        lines, line = self._queues.with_newcomer(newcomer), list[Sequence]()
        counters = self.counters | {newcomer.tenant: self._lifted(newcomer.tenant)}
        turns = [(counters[tenant], place, tenant, 0) for place, tenant in enumerate(lines)]
        heapify(turns)
        while turns:
            counter, place, tenant, number = heappop(turns)
            line.append(one := lines[tenant][number])
            counter += self._estimate(one) / weight_of(tenant, self._weights)
            if number + 1 < len(lines[tenant]):
                heappush(turns, (counter, place, tenant, number + 1))
        return Line.split(line, newcomer)

    def remove(self, sequence: Sequence) -> None:
        self._queues.remove(sequence)
        if sequence.tenant not in self._queues.active:
            self._last_left = sequence.tenant

    def charge(self, sequences: abc.Sequence[Sequence], costs: abc.Sequence[float]) -> Mapping[str, float]:
        sums = super().charge(sequences, costs)
        self.correct(sums.items())
        return sums

    def correct(self, costs: Iterable[tuple[str, float]]) -> None:
        for tenant, cost in costs:
            self.counters[tenant] += cost / weight_of(tenant, self._weights)

    def policy_changed(self, weights: Mapping[str, float], aging: Aging) -> None:
        self._weights = dict(weights)

    def credit(self, tenant: str) -> float:
        return -self.counters.get(tenant, 0.0)

    def _lifted(self, tenant: str) -> float:
        """Returns the counter that the tenant has once something of it waits."""
        counters, active = self.counters, self._queues.active
        if tenant in active:
            return counters[tenant]
        if active:
            floor = min(counters[other] for other in active)
        else:
            floor = counters[self._last_left] if self._last_left is not None else 0.0
        return max(counters.get(tenant, 0.0), floor)
