"""Virtual finish time with a starvation boost, as tutorials sketch it. Kept to show why it is not the default.

    key = (V + cost / weight) * (1 - boost * waited / boost_seconds)         the smallest goes first

with V the virtual time, the finish time of the request admitted last (self-clocked: Golestani, 1994). Two faults, both
tested: finish times do not follow one another within a tenant, hence many small requests of one tenant all finish
"now"; and after boost_seconds / boost (3.3 times boost_seconds) the factor turns negative, and of the longest waits the
largest goes first.
"""

from admission.share import Share
from backend.scheduler.sequence import Sequence
from labs.orderings.ordering import Indifferent, Line
from labs.orderings.sequence_heap import Predict


class VirtualFinishWithBoost(Indifferent):
    """Serves the smallest key. Keys change with time at different rates, so finding the head is O(waiting)."""

    def __init__(
        self,
        share: Share,
        cost: Predict,
        boost: float = 0.3,
        boost_seconds: float = 10.0,
    ) -> None:
        """`cost` is a whole request's; `boost_seconds` is the time after which the boost is whole."""
        self._share, self._cost = share, cost
        self._boost = boost
        self._boost_seconds = boost_seconds
        self._now = 0.0
        self._virtual_time = 0.0
        self._finish: dict[Sequence, float] = {}  # of all that have not ended
        self._waiting: dict[Sequence, None] = {}
        self._head: Sequence | None = None  # of now; None: not known

    def __len__(self) -> int:
        return len(self._waiting)

    def at(self, now: float) -> None:
        self._now, self._head = now, None

    def add(self, sequence: Sequence) -> None:
        self._finish[sequence] = self._finish_of(sequence)
        self.restore(sequence)
        self.at(max(self._now, sequence.arrival))

    def restore(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None
        self._head = None

    def head(self) -> Sequence | None:
        if self._head is None and self._waiting:
            self._head = min(self._waiting, key=self._key)
        return self._head

    def around(self, newcomer: Sequence) -> Line:
        """By the keys of the moment, which change at different rates."""
        now, own = max(self._now, newcomer.arrival), self._finish_of(newcomer)
        keys = {one: self._finish[one] * self._boosted(one, now) for one in self._waiting}
        line = sorted(self._waiting, key=keys.__getitem__)
        return Line([one for one in line if keys[one] <= own], [one for one in line if keys[one] > own])

    def remove(self, sequence: Sequence) -> None:
        if sequence is self.head():
            self._virtual_time = max(self._virtual_time, self._finish[sequence])
        del self._waiting[sequence]
        self._head = None

    def ended(self, sequence: Sequence) -> None:
        self._finish.pop(sequence, None)

    def _finish_of(self, newcomer: Sequence) -> float:
        return self._virtual_time + self._cost(newcomer) / self._share.account(newcomer.tenant).weight

    def _key(self, sequence: Sequence) -> float:
        return self._finish[sequence] * self._boosted(sequence, self._now)

    def _boosted(self, sequence: Sequence, now: float) -> float:
        waited = max(0.0, now - sequence.arrival)
        return 1 - self._boost * waited / self._boost_seconds
