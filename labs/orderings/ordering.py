"""A `WaitingOrder` made of a published ordering, which names the head and a newcomer's neighbours.

Prompts are computed in the order of arrival, and the newest is the victim of a preemption: the publications say nothing
of either.
"""

from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import NamedTuple, Protocol

from admission.forecast import DueRequest, WorkAhead
from backend.scheduler.sequence import Sequence
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


class Ordering(Protocol):
    """An order of waiting sequences, as a `WaitingQueue` without tenants on hold."""

    def __len__(self) -> int: ...

    def add(self, sequence: Sequence) -> None: ...

    def restore(self, sequence: Sequence) -> None: ...

    def head(self) -> Sequence | None: ...

    def remove(self, sequence: Sequence) -> None: ...

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


class PublishedOrder:
    """The order of a published ordering. Tenants have no shares in it unless the ordering reads their accounts.

    Sequences of a held tenant lie aside, and keep their places.
    """

    def __init__(
        self, ordering: Ordering, uncached: Callable[[Sequence], int], predicted: Predicted | None = None
    ) -> None:
        """`uncached` returns a sequence's tokens to compute; `predicted` learns from answers for the ordering; None: it
        needs none.
        """
        self.ordering, self.predicted, self._uncached = ordering, predicted, uncached
        self._aside: dict[str, set[Sequence]] = {}

    def __len__(self) -> int:
        return len(self.ordering) + sum(map(len, self._aside.values()))

    def add(self, sequence: Sequence) -> None:
        self.ordering.add(sequence)
        self._lay_aside(sequence)

    def restore(self, sequence: Sequence) -> None:
        self.ordering.restore(sequence)
        self._lay_aside(sequence)

    def head(self) -> Sequence | None:
        """Return the first sequence of a tenant that is not held, and lay aside the sequences before it."""
        while (sequence := self.ordering.head()) is not None and sequence.tenant in self._aside:
            self._lay_aside(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        aside = self._aside.get(sequence.tenant)
        if aside and sequence in aside:
            aside.remove(sequence)
        else:
            self.ordering.remove(sequence)

    def hold(self, tenant: str, reason: str | None) -> None:
        if reason is not None:
            self._aside.setdefault(tenant, set())
            return
        for sequence in sorted(self._aside.pop(tenant, ()), key=lambda waiting: (waiting.arrival, waiting.id)):
            self.ordering.restore(sequence)

    def _lay_aside(self, sequence: Sequence) -> None:
        if sequence.tenant in self._aside:
            self.ordering.remove(sequence)
            self._aside[sequence.tenant].add(sequence)

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
