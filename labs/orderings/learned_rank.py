"""Shortest predicted answer first, with promotion of starving requests.

Learning to rank (Fu et al., NeurIPS 2024, known as vllm-ltr): requests run in the order of predicted ranks of their
answers' lengths; a request passed over for `STARVATION_STEPS` is promoted before all others. The paper ranks running
requests as well, and pauses the longest; here an admitted request goes on, so a promotion ends with its request's
admission, and needs no quantum.

Blind to tenants, classes and weights. A request is passed over for more than `STARVATION_STEPS` only by earlier
promoted ones.
"""

from backend.scheduler.sequence import Sequence
from labs.orderings.ordering import Indifferent, Line
from labs.orderings.sequence_heap import Predict, SequenceHeap

STARVATION_STEPS = 200
"""The most steps that pass over a request: the paper's threshold of starvation."""


class LearnedRank(Indifferent):
    """Serves promoted requests first, then all others, each by rank. O(log waiting)."""

    def __init__(self, rank: Predict, passed_over: int = STARVATION_STEPS) -> None:
        """`rank` returns the expected length of the answer, in any unit."""
        self._rank, self._passed_over = rank, passed_over
        self._ranks: dict[Sequence, float] = {}  # of live sequences
        self._promoted, self._others = SequenceHeap(), SequenceHeap()
        self._waiting_since: dict[Sequence, int] = {}  # of the others, oldest first
        self._step = 0

    def __len__(self) -> int:
        return len(self._promoted) + len(self._others)

    def add(self, sequence: Sequence) -> None:
        self._ranks[sequence] = self._rank(sequence)
        self.restore(sequence)

    def restore(self, sequence: Sequence) -> None:
        self._others.add(sequence, self._ranks[sequence])
        self._waiting_since[sequence] = self._step

    def set_time(self, now: float) -> None:
        """A planned step passes over all requests that wait after it."""
        self._step += 1
        due = self._step - self._passed_over
        while (first := next(iter(self._waiting_since), None)) is not None and self._waiting_since[first] <= due:
            self.remove(first)
            self._promoted.add(first, self._ranks[first])

    def head(self) -> Sequence | None:
        return self._promoted.first() or self._others.first()

    def around(self, newcomer: Sequence) -> Line:
        """Longer requests come behind it, however late they are, unless they were promoted."""
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
