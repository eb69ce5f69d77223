"""A `WaitingOrder` of a published ordering, which says what goes first, and what stands around a newcomer.

Prompts are computed in the order of arrival, and the newest gives way first: the publications say nothing of either.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import NamedTuple, Protocol

from admission.forecast import Ahead, Due
from backend.scheduler.sequence import Sequence
from backend.scheduler.waiting_queue import HoldingQueue, SequenceQueue
from labs.orderings.predicted import Predicted


class Line(NamedTuple):
    """What waits before and behind a newcomer, in the order in which it is served if nothing else comes."""

    before: Listed[Sequence]
    behind: Listed[Sequence]  # which the newcomer must not make late; an order may sacrifice it

    @classmethod
    def split(cls, line: list[Sequence], newcomer: Sequence) -> "Line":
        """Return the parts of a line before and behind the newcomer, which stands in it."""
        place = line.index(newcomer)
        return cls(line[:place], line[place + 1 :])


class Ordering(SequenceQueue, Protocol):
    """An order of what waits, without tenants on hold."""

    def at(self, now: float) -> None:
        """Let the time be `now`: a step is planned next."""
        ...

    def around(self, newcomer: Sequence) -> Line:
        """Return what waits before and behind a sequence that arrives at its `arrival` and does not wait yet.

        Changes nothing that anybody can see; O(n log n) of what waits.
        """
        ...

    def ended(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        ...


class Indifferent:
    """The part of an ordering that depends neither on time nor on what is kept of sequences."""

    def at(self, now: float) -> None:
        pass

    def ended(self, sequence: Sequence) -> None:
        pass


class PublishedOrder(HoldingQueue):
    """Tenants have no shares in it unless the ordering reads their accounts."""

    def __init__(
        self, ordering: Ordering, uncached: Callable[[Sequence], int], predicted: Predicted | None = None
    ) -> None:
        """`uncached` returns the tokens that are to be computed for a sequence; `predicted` is what the ordering goes
        by and is to learn from answers; None: nothing.
        """
        super().__init__(ordering)
        self.ordering, self.predicted, self._uncached = ordering, predicted, uncached

    def due(self, sequence: Sequence) -> float:
        return sequence.arrival

    def ahead(self, sequence: Sequence, due: float) -> Ahead:
        before = self.ordering.around(sequence).before
        own = sum([self._uncached(one) for one in before if one.tenant == sequence.tenant])
        return Ahead(float(sum(map(self._uncached, before))), float(len(before)), float(own))

    def behind(self, sequence: Sequence, due: float) -> list[Due]:
        """Return what goes later, each as if it were due at its place in the line."""
        behind = self.ordering.around(sequence).behind
        return [Due(float(place), place, one, self._uncached(one)) for place, one in enumerate(behind)]

    def at(self, now: float) -> None:
        self.ordering.at(now)

    def ended(self, sequence: Sequence) -> None:
        self.ordering.ended(sequence)
        if self.predicted is not None:
            self.predicted.ended(sequence)
