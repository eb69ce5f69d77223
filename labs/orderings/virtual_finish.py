"""Virtual finish time with a starvation boost, as tutorials sketch it. Kept to show why it is not the default.

    key = (V + cost / weight) * (1 - boost * waited / boost_seconds)         the smallest goes first

with V the virtual time, the finish time of the request admitted last (self-clocked: Golestani, 1994). Two faults, both
tested: finish times do not follow one another within a tenant, hence many small requests of one tenant all finish
"now"; and after boost_seconds / boost (3.3 times boost_seconds) the factor turns negative, and of the longest waits the
largest goes first.
"""

from admission.share import Share
from backend.scheduler.sequence import Sequence
from labs.orderings.ordering import Line
from labs.orderings.rescored import Rescored
from labs.orderings.sequence_heap import Predict


class VirtualFinishWithBoost(Rescored):
    """Serves the smallest key."""

    def __init__(self, share: Share, cost: Predict, boost: float = 0.3, boost_seconds: float = 10.0) -> None:
        """`cost` is a whole request's; `boost_seconds` is the time after which the boost is whole."""
        super().__init__()
        self._share, self._cost = share, cost
        self._boost = boost
        self._boost_seconds = boost_seconds
        self._virtual_time = 0.0

    def around(self, newcomer: Sequence) -> Line:
        """By the present keys, which change at different rates."""
        now, own = max(self.now, newcomer.arrival), (self.rate(newcomer), 0.0)
        keys = {one: self.key(one, now) for one in self.waiting}
        line = sorted(self.waiting, key=keys.__getitem__)
        return Line([one for one in line if keys[one] <= own], [one for one in line if keys[one] > own])

    def remove(self, sequence: Sequence) -> None:
        if sequence is self.head():
            self._virtual_time = max(self._virtual_time, self.rates[sequence])
        super().remove(sequence)

    def rate(self, sequence: Sequence) -> float:
        """Return its finish time."""
        return self._virtual_time + self._cost(sequence) / self._share.account(sequence.tenant).weight

    def key(self, sequence: Sequence, now: float) -> tuple[float, float]:
        waited = max(0.0, now - sequence.arrival)
        return self.rates[sequence] * (1 - self._boost * waited / self._boost_seconds), 0.0
