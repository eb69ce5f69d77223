"""Earliest deadline first (Liu and Layland, 1973), except for deadlines that have passed.

It meets all deadlines whenever any order could, and collapses under overload, where the most urgent are those that are
just about to be late (Abbott and Garcia-Molina, 1992). So whoever is late already waits behind all who are not.
"""

from collections.abc import Callable

from admission.ordering import Indifferent
from admission.orderings.sequence_heap import SequenceHeap
from backend.sequence import Sequence

Deadline = Callable[[Sequence], float]
"""When a sequence should have its first token, in seconds of the engine's clock; the same whenever it is asked."""


class EarliestDeadlineFirst(Indifferent):
    """Time is what `at`, or else the newest arrival, said last. O(log waiting)."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._now = 0.0
        self._in_time, self._late = SequenceHeap(), SequenceHeap()

    def __len__(self) -> int:
        return len(self._in_time) + len(self._late)

    def at(self, now: float) -> None:
        self._now = now
        while (entry := self._in_time.first_entry()) is not None and entry[0] < now:
            deadline, sequence = entry
            self._in_time.remove(sequence)
            self._late.add(sequence, deadline)

    def add(self, sequence: Sequence) -> None:
        self.restore(sequence)
        self.at(max(self._now, sequence.arrival))

    def restore(self, sequence: Sequence) -> None:
        deadline = self._deadline(sequence)
        (self._in_time if deadline >= self._now else self._late).add(sequence, deadline)

    def head(self) -> Sequence | None:
        return self._in_time.first() or self._late.first()

    def remove(self, sequence: Sequence) -> None:
        (self._in_time if sequence in self._in_time else self._late).remove(sequence)
