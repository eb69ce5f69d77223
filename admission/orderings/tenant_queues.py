"""Waiting sequences of many tenants, each tenant's in order of arrival."""

from admission.orderings.sequence_heap import SequenceHeap
from backend.sequence import Sequence


class TenantQueues:
    """`active` are the tenants with work waiting, in the order in which they last began to have some."""

    def __init__(self) -> None:
        self.active: dict[str, SequenceHeap] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, sequence: Sequence) -> None:
        """A preempted sequence keeps its arrival, hence its place."""
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
