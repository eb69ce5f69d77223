"""Shortest predicted first, blind to tenants, classes and weights."""

from backend.scheduler.sequence import Sequence
from labs.orderings.ordering import Line
from labs.orderings.sequence_heap import Predict, SequenceHeap


class ShortestFirst:
    """Ties go in the order of arrival. A preempted sequence keeps its prediction. O(log waiting)."""

    def __init__(self, predict: Predict) -> None:
        self._predict = predict
        self._predicted: dict[Sequence, float] = {}  # of live sequences
        self._heap = SequenceHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def set_time(self, now: float) -> None:
        pass

    def add(self, sequence: Sequence) -> None:
        self._predicted[sequence] = self._predict(sequence)
        self.restore(sequence)

    def restore(self, sequence: Sequence) -> None:
        self._heap.add(sequence, self._predicted[sequence])

    def head(self) -> Sequence | None:
        return self._heap.first()

    def around(self, newcomer: Sequence) -> Line:
        """Longer requests come behind it, however late they are."""
        own = self._predict(newcomer)
        return Line([one for predicted, one in self._heap.in_order() if predicted <= own], [])

    def remove(self, sequence: Sequence) -> None:
        self._heap.remove(sequence)

    def ended(self, sequence: Sequence) -> None:
        self._predicted.pop(sequence, None)
