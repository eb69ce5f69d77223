"""The waiting queue: sequences that hold no memory yet, in the order of their admission."""

from bisect import insort
from collections import OrderedDict
from typing import Protocol

from backend.scheduler.sequence import Sequence


class SequenceQueue(Protocol):
    """An order over waiting sequences."""

    def __len__(self) -> int: ...

    def add(self, sequence: Sequence) -> None:
        """Take a new arrival."""
        ...

    def restore(self, sequence: Sequence) -> None:
        """Take back a preempted sequence, which keeps its place."""
        ...

    def head(self) -> Sequence | None:
        """Return the sequence that is admitted next; None when the queue is empty."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was admitted or cancelled."""
        ...


class WaitingQueue(SequenceQueue, Protocol):
    """A queue that can hold tenants back; the scheduler is its only caller."""

    def hold(self, tenant: str, reason: str | None) -> None:
        """Offer no sequence of the tenant, because of a limit of its own; with None, offer them again."""
        ...


class HoldingQueue:
    """Makes a `WaitingQueue` of any order: sequences of a held tenant lie aside, and keep their places."""

    def __init__(self, order: SequenceQueue) -> None:
        self._order = order
        self._aside: dict[str, set[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._order) + sum(map(len, self._aside.values()))

    def add(self, sequence: Sequence) -> None:
        self._order.add(sequence)
        self._lay_aside(sequence)

    def restore(self, sequence: Sequence) -> None:
        self._order.restore(sequence)
        self._lay_aside(sequence)

    def head(self) -> Sequence | None:
        """Return the first sequence of a tenant that is not held, and lay aside the sequences before it."""
        while (sequence := self._order.head()) is not None and sequence.tenant in self._aside:
            self._lay_aside(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        aside = self._aside.get(sequence.tenant)
        if aside and sequence in aside:
            aside.remove(sequence)
        else:
            self._order.remove(sequence)

    def hold(self, tenant: str, reason: str | None) -> None:
        if reason is not None:
            self._aside.setdefault(tenant, set())
            return
        for sequence in sorted(self._aside.pop(tenant, ()), key=lambda waiting: (waiting.arrival, waiting.id)):
            self._order.restore(sequence)

    def _lay_aside(self, sequence: Sequence) -> None:
        if sequence.tenant in self._aside:
            self._order.remove(sequence)
            self._aside[sequence.tenant].add(sequence)


class FirstComeFirstServed:
    """Orders by arrival. A preempted sequence arrived before every newcomer, so it goes first."""

    def __init__(self) -> None:
        self._arrived: OrderedDict[str, Sequence] = OrderedDict()  # a dict finds its first in linear time
        self._restored: list[Sequence] = []  # few, by arrival

    def __len__(self) -> int:
        return len(self._arrived) + len(self._restored)

    def add(self, sequence: Sequence) -> None:
        self._arrived[sequence.id] = sequence

    def restore(self, sequence: Sequence) -> None:
        insort(self._restored, sequence, key=lambda waiting: waiting.arrival)

    def head(self) -> Sequence | None:
        if self._restored:
            return self._restored[0]
        return next(iter(self._arrived.values()), None)

    def remove(self, sequence: Sequence) -> None:
        if self._arrived.pop(sequence.id, None) is None:
            self._restored.remove(sequence)
