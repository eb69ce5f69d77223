"""Highest response ratio next (Brinch Hansen, 1971): ratio = (waited + service) / service.

Short requests are served early and long ones do not starve, as the ratio of a waiting request grows without end. Magnus
(Cheng et al., 2024) orders its batches so, by a predicted service time. Blind to tenants, classes and weights.
"""

from backend.scheduler.sequence import Sequence
from labs.orderings.ordering import Line
from labs.orderings.rescored import Rescored
from labs.orderings.sequence_heap import Predict


class HighestResponseRatioNext(Rescored):
    """Serves the highest ratio, ties in order of arrival."""

    def __init__(self, service: Predict) -> None:
        """`service` returns the seconds, or any other amount of work, of a whole request; above 0."""
        super().__init__()
        self._service = service

    def around(self, newcomer: Sequence) -> Line:
        """By the present ratios: a newcomer has not waited, and comes last."""
        now = max(self.now, newcomer.arrival)
        return Line(sorted(self.waiting, key=lambda sequence: self.key(sequence, now)), [])

    def rate(self, sequence: Sequence) -> float:
        return self._service(sequence)

    def key(self, sequence: Sequence, now: float) -> tuple[float, float]:
        return (sequence.arrival - now) / self.rates[sequence], sequence.arrival
