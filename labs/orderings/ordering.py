"""A `WaitingOrder` made of a published ordering, which names the head and a newcomer's neighbours.

Prompts are computed in the order of arrival, and the newest is the victim of a preemption: the publications say nothing
of either.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import NamedTuple, Protocol

from admission.forecast import DueRequest, WorkAhead
from backend.scheduler.sequence import Sequence
from backend.scheduler.waiting_queue import HoldingQueue, SequenceQueue
from labs.orderings.predicted import Predicted


class Line(NamedTuple):
    """The waiting sequences before and behind a newcomer, in their order of service without further arrivals."""

    before: Listed[Sequence]
    behind: Listed[Sequence]  # not to be made late by the newcomer; an order may sacrifice it

    @classmethod
    def split(cls, line: list[Sequence], newcomer: Sequence) -> "Line":
        """Split a line at the newcomer, which stands in it."""
        place = line.index(newcomer)
        return cls(line[:place], line[place + 1 :])


class Ordering(SequenceQueue, Protocol):
    """An order of waiting sequences, without tenants on hold."""

    def set_time(self, now: float) -> None:
        """Set the time to `now`: a step is planned next."""
        ...

    def around(self, newcomer: Sequence) -> Line:
        """The line around a sequence that arrives at its `arrival` and does not wait yet.

        Without visible changes; O(n log n) of the waiting sequences.
        """
        ...

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        ...


class Indifferent:
    """An ordering without time and without state of ended sequences."""

    def set_time(self, now: float) -> None:
        pass

    def ended(self, sequence: Sequence) -> None:
        pass


class PublishedOrder(HoldingQueue):
    """The order of a published ordering. Tenants have no shares in it unless the ordering reads their accounts."""

    def __init__(
        self, ordering: Ordering, uncached: Callable[[Sequence], int], predicted: Predicted | None = None
    ) -> None:
        """`uncached` returns a sequence's tokens to compute; `predicted` learns from answers for the ordering; None: it
        needs none.
        """
        super().__init__(ordering)
        self.ordering, self.predicted, self._uncached = ordering, predicted, uncached

    def due(self, sequence: Sequence) -> float:
        return sequence.arrival

    def ahead(self, sequence: Sequence, due: float) -> WorkAhead:
        before = self.ordering.around(sequence).before
        own = sum([self._uncached(one) for one in before if one.tenant == sequence.tenant])
        return WorkAhead(float(sum(map(self._uncached, before))), float(len(before)), float(own))

    def behind(self, sequence: Sequence, due: float) -> list[DueRequest]:
        """Later sequences, each due at its place in the line."""
        behind = self.ordering.around(sequence).behind
        return [DueRequest(float(place), place, one, self._uncached(one)) for place, one in enumerate(behind)]

    def set_time(self, now: float) -> None:
        self.ordering.set_time(now)

    def ended(self, sequence: Sequence) -> None:
        self.ordering.ended(sequence)
        if self.predicted is not None:
            self.predicted.ended(sequence)
