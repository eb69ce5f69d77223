"""The longest wait for the service that is needed goes first: highest response ratio next (Brinch Hansen, 1971).

    ratio = (waited + service) / service

The short are served early and the long do not starve, as the ratio of what waits grows without end. Magnus (Cheng et
al., 2024) orders its batches so, by a predicted service time.

Blind to tenants, classes and weights.
"""

from functools import partial

from backend.scheduler.sequence import Sequence
from labs.orderings.ordering import Indifferent, Line
from labs.orderings.sequence_heap import Predict


class HighestResponseRatioNext(Indifferent):
    """Serves the highest ratio, ties in order of arrival. Ratios grow at different rates: finding it is O(waiting)."""

    def __init__(self, service: Predict) -> None:
        """`service` returns the seconds, or any other amount of work, that all of a request takes; above 0."""
        self._service = service
        self._services: dict[Sequence, float] = {}  # of all that have not ended
        self._waiting: dict[Sequence, None] = {}
        self._now = 0.0
        self._head: Sequence | None = None  # of now; None: not known

    def __len__(self) -> int:
        return len(self._waiting)

    def at(self, now: float) -> None:
        self._now, self._head = now, None

    def add(self, sequence: Sequence) -> None:
        self._services[sequence] = self._service(sequence)
        self.restore(sequence)
        self.at(max(self._now, sequence.arrival))

    def restore(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None
        self._head = None

    def head(self) -> Sequence | None:
        if self._head is None and self._waiting:
            self._head = min(self._waiting, key=partial(self._key, self._now))
        return self._head

    def around(self, newcomer: Sequence) -> Line:
        """By the ratios of the moment: a newcomer has waited for nothing, and all go before it."""
        now = max(self._now, newcomer.arrival)
        return Line(sorted(self._waiting, key=partial(self._key, now)), [])

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence]
        self._head = None

    def ended(self, sequence: Sequence) -> None:
        self._services.pop(sequence, None)

    def _key(self, now: float, sequence: Sequence) -> tuple[float, float]:
        return (sequence.arrival - now) / self._services[sequence], sequence.arrival
