"""Who has the least time to spare goes first: least laxity first (Dertouzos and Mok, 1989), over first tokens.

The laxity of a request is the time until its first token is due, less the time that its prefill takes. It falls for all
that wait at one pace, so their order is that of the latest moments at which they can begin, and is never sorted again.
As with deadlines, who can no longer be in time waits behind all who can: the textbook's rule would serve it first, and
make others late for nothing. Who is admitted goes on, where the textbook's rule changes over whenever laxities cross.

Blind to tenants and weights: it waives the bounds on fairness and on overtaking.
"""

from admission.orderings.by_key import Deadline, EarliestDeadlineFirst, Predict
from backend.scheduler.sequence import Sequence


class LeastLaxityFirst(EarliestDeadlineFirst):
    """Serves those that can be in time by when they have to begin, then those that are late. O(log waiting)."""

    def __init__(self, deadline: Deadline, seconds: Predict) -> None:
        """`seconds` returns how long the prefill takes."""
        super().__init__(self._latest_start)
        self._due, self._seconds = deadline, seconds
        self._starts: dict[Sequence, float] = {}  # of all that have not ended

    def add(self, sequence: Sequence) -> None:
        self._starts[sequence] = self._latest_start(sequence)
        super().add(sequence)

    def settle(self, sequence: Sequence) -> None:
        self._starts.pop(sequence, None)

    def _latest_start(self, sequence: Sequence) -> float:
        known = self._starts.get(sequence)
        return self._due(sequence) - self._seconds(sequence) if known is None else known
