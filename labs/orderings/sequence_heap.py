"""A heap of sequences by a constant key."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from backend.scheduler.sequence import Sequence

Predict = Callable[[Sequence], float]
"""Returns the amount of work of a sequence, in any unit; called once, at its arrival."""


class SequenceHeap:
    """The smallest key first, ties in the order of insertion. Removal is O(1), by lazy deletion."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._entries: dict[Sequence, int] = {}  # the number of each one's valid entry
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, sequence: Sequence, key: float) -> None:
        assert sequence not in self._entries, "it waits already"
        number = self._entries[sequence] = next(self._numbers)
        heappush(self._heap, (key, number, sequence))

    def remove(self, sequence: Sequence) -> None:
        del self._entries[sequence]
        if not self._entries:
            self._heap.clear()

    def first(self) -> Sequence | None:
        entry = self.first_entry()
        return entry[1] if entry else None

    def first_entry(self) -> tuple[float, Sequence] | None:
        """Return the first sequence with its key."""
        while self._heap:
            key, number, sequence = self._heap[0]
            if self._entries.get(sequence) == number:
                return key, sequence
            heappop(self._heap)
        return None

    def in_order(self) -> list[tuple[float, Sequence]]:
        """Return all sequences in it with their keys, the first in front. O(n log n)."""
        entries = self._entries
        return [(key, one) for key, number, one in sorted(self._heap) if entries.get(one) == number]
