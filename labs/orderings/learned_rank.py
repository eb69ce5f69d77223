"""Shortest predicted answer first; what that has passed over for long goes before all others.

Learning to rank (Fu et al., NeurIPS 2024, known as vllm-ltr): requests run in the order of predicted ranks of their
answers' lengths; one that was passed over for `PASSED_OVER` steps is promoted before all that were not. The paper ranks
what runs as well, and pauses the longest; here an admitted request goes on, so a promotion has done its work once its
request is admitted, and needs no quantum.

Blind to tenants, classes and weights. Nothing is passed over for more than `PASSED_OVER` steps but by what was promoted
before.
"""

from backend.scheduler.sequence import Sequence
from labs.orderings.ordering import Indifferent, Line
from labs.orderings.sequence_heap import Predict, SequenceHeap

PASSED_OVER = 200
"""The most steps that pass over a request: the paper's threshold of starvation."""


class LearnedRank(Indifferent):
    """Serves promoted requests first, then all others, each by rank. O(log waiting)."""

    def __init__(self, rank: Predict, passed_over: int = PASSED_OVER) -> None:
        """`rank` returns the expected length of the answer, in any unit."""
        self._rank, self._passed_over = rank, passed_over
        self._ranks: dict[Sequence, float] = {}  # of all that have not ended
        self._promoted, self._others = SequenceHeap(), SequenceHeap()
        self._waiting_since: dict[Sequence, int] = {}  # of the others, in this order
        self._step = 0

    def __len__(self) -> int:
        return len(self._promoted) + len(self._others)

    def add(self, sequence: Sequence) -> None:
        self._ranks[sequence] = self._rank(sequence)
        self.restore(sequence)

    def restore(self, sequence: Sequence) -> None:
        self._others.add(sequence, self._ranks[sequence])
        self._waiting_since[sequence] = self._step

    def at(self, now: float) -> None:
        """A step that is planned passes over all that still wait after it."""
        self._step += 1
        due = self._step - self._passed_over
        while (first := next(iter(self._waiting_since), None)) is not None and self._waiting_since[first] <= due:
            self.remove(first)
            self._promoted.add(first, self._ranks[first])

    def head(self) -> Sequence | None:
        return self._promoted.first() or self._others.first()

    def around(self, newcomer: Sequence) -> Line:
        """The longer make way for it, however late they are, unless they were promoted."""
        own = self._rank(newcomer)
        promoted = [one for _, one in self._promoted.in_order()]
        return Line([*promoted, *(one for rank, one in self._others.in_order() if rank <= own)], [])

    def remove(self, sequence: Sequence) -> None:
        if self._waiting_since.pop(sequence, None) is None:
            self._promoted.remove(sequence)
        else:
            self._others.remove(sequence)

    def ended(self, sequence: Sequence) -> None:
        self._ranks.pop(sequence, None)
