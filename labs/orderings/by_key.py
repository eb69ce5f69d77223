"""Orders waiting sequences by a key that does not change while they wait."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter

from admission.orderings.ordering import Indifferent, Line
from backend.scheduler.sequence import Sequence

_KEY = itemgetter(0)


class SequenceHeap:
    """A heap with the smallest key first, and ties in the order of adding. Removing is O(1): entries leave when they
    surface.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._entries: dict[Sequence, int] = {}  # the number of each one's valid entry
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._entries

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
        """Returns the first sequence with its key."""
        while self._heap:
            key, number, sequence = self._heap[0]
            if self._entries.get(sequence) == number:
                return key, sequence
            heappop(self._heap)
        return None

    def in_order(self) -> list[tuple[float, Sequence]]:
        """Returns all that are in it with their keys, the first in front. O(n log n)."""
        entries = self._entries
        return [(key, one) for key, number, one in sorted(self._heap) if entries.get(one) == number]


Predict = Callable[[Sequence], float]
"""Returns the amount of work of a sequence, in any unit; called when it comes, and never again."""


class ShortestPredictedFirst(Indifferent):
    """Serves the shortest first, ties in order of arrival. A preempted sequence keeps its prediction. O(log
    waiting).
    """

    def __init__(self, predict: Predict) -> None:
        self._predict = predict
        self._predicted: dict[Sequence, float] = {}
        self._heap = SequenceHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        self._predicted[sequence] = self._predict(sequence)
        self.restore(sequence)

    def restore(self, sequence: Sequence) -> None:
        self._heap.add(sequence, self._predicted[sequence])

    def head(self) -> Sequence | None:
        return self._heap.first()

    def around(self, newcomer: Sequence) -> Line:
        """The longer make way for it, however late they are."""
        own = self._predict(newcomer)
        return Line([one for predicted, one in self._heap.in_order() if predicted <= own], [])

    def remove(self, sequence: Sequence) -> None:
        self._heap.remove(sequence)

    def settle(self, sequence: Sequence) -> None:
        self._predicted.pop(sequence, None)


Deadline = Callable[[Sequence], float]
"""Returns when a sequence should have its first token, on the engine's clock; always the same for a sequence."""


class EarliestDeadlineFirst(Indifferent):
    """Serves those that can be in time by deadline, then those that are late. O(log waiting).

    The time is that of the last call of `at`, or of the newest arrival.
    """

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

    def around(self, newcomer: Sequence) -> Line:
        now, due = max(self._now, newcomer.arrival), self._deadline(newcomer)
        waiting, late = self._in_time.in_order(), self._late.in_order()
        in_time = [(deadline, one) for deadline, one in waiting if deadline >= now]
        late = sorted([entry for entry in waiting if entry[0] < now] + late, key=_KEY)
        if due < now:
            first, last = [one for _, one in in_time], _split(late, due)
            return Line([*first, *last.before], last.behind)
        before, behind = _split(in_time, due)
        return Line(before, [*behind, *(one for _, one in late)])

    def remove(self, sequence: Sequence) -> None:
        (self._in_time if sequence in self._in_time else self._late).remove(sequence)


def _split(entries: list[tuple[float, Sequence]], key: float) -> Line:
    """Returns sequences in order around a newcomer with this key, which goes behind those with the same."""
    return Line([one for other, one in entries if other <= key], [one for other, one in entries if other > key])
