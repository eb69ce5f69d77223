"""What was estimated of those that wait for their first token, held against what comes."""

from dataclasses import dataclass

from admission.conformal import Conformal
from admission.estimate import Estimate
from backend.sequence import Sequence

CONFIDENCE = 0.9  # of the bounds that clients are told


@dataclass(frozen=True, slots=True)
class Promise:
    """In seconds from the arrival. `bound` is what the client is told; `likely` is what its admission was decided by;
    `prefill` is the part of the estimate that its own prompt takes.
    """

    arrival: float
    estimate: float
    prefill: float
    bound: float
    likely: float


class Promises:
    """Bounds by class, and the residuals that they are learned from. A sequence without a promise is ignored.

    One that expires counts as a miss: its token would have come later still, by the time of its own prefill.
    """

    def __init__(self, decisive: float) -> None:
        """`decisive` is the confidence with which an admission is decided."""
        self._decisive = decisive
        self._bounds: dict[int, tuple[Conformal, Conformal]] = {}
        self._open: dict[Sequence, Promise] = {}
        self.kept = 0
        self.broken = 0

    def promise(self, priority_class: int, estimate: Estimate, now: float) -> Promise:
        bound, likely = self._of_class(priority_class)
        first = estimate.first_token
        return Promise(now, first, estimate.prefill, bound.bound(first), likely.bound(first))

    def give(self, sequence: Sequence, promise: Promise) -> None:
        self._open[sequence] = promise

    def first_token(self, sequence: Sequence, now: float) -> None:
        if (promise := self._open.pop(sequence, None)) is not None:
            waited = now - promise.arrival
            self._observe(sequence, promise, waited, waited > promise.bound, waited > promise.likely)

    def expired(self, sequence: Sequence, now: float) -> None:
        if (promise := self._open.pop(sequence, None)) is not None:
            waited = max(now - promise.arrival, promise.bound) + promise.prefill
            self._observe(sequence, promise, waited, True, True)

    def forget(self, sequence: Sequence) -> None:
        """It was cancelled: nobody will know."""
        self._open.pop(sequence, None)

    def _observe(self, sequence: Sequence, promise: Promise, waited: float, late: bool, unlikely: bool) -> None:
        bound, likely = self._of_class(sequence.priority_class)
        bound.observe(waited - promise.estimate, late)
        likely.observe(waited - promise.estimate, unlikely)
        self.broken += late
        self.kept += not late

    def _of_class(self, priority_class: int) -> tuple[Conformal, Conformal]:
        if priority_class not in self._bounds:
            self._bounds[priority_class] = Conformal(CONFIDENCE), Conformal(self._decisive)
        return self._bounds[priority_class]
