"""Shortest predicted first: the least mean waiting time, if predictions are right and nobody minds starving.

Predicted order is enough (Fu et al., Efficient LLM Scheduling by Learning to Rank, 2024). Nothing keeps a long request
from being overtaken for ever: that paper promotes those that have been passed over 200 times, we keep the plain form.
"""

from collections.abc import Callable

from admission.ordering import Indifferent
from admission.orderings.sequence_heap import SequenceHeap
from backend.sequence import Sequence

Predict = Callable[[Sequence], float]
"""How much work a sequence is, in any unit; asked once, when it first waits."""


class ShortestPredictedFirst(Indifferent):
    """Ties in order of arrival. A preempted sequence keeps its prediction. O(log waiting)."""

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

    def remove(self, sequence: Sequence) -> None:
        self._heap.remove(sequence)

    def settle(self, sequence: Sequence) -> None:
        self._predicted.pop(sequence, None)
