"""The waiting queue: sequences that hold no memory yet, in the order of their admission."""

from bisect import insort
from collections import OrderedDict
from itertools import chain
from typing import Protocol

from backend.scheduler.sequence import Sequence


class WaitingQueue(Protocol):
    """An order over waiting sequences, which can hold tenants back; the scheduler is its only caller."""

    def __len__(self) -> int: ...

    def add(self, sequence: Sequence) -> None:
        """Take a new arrival."""
        ...

    def restore(self, sequence: Sequence) -> None:
        """Take back a preempted sequence, which keeps its place."""
        ...

    def head(self) -> Sequence | None:
        """Return the sequence that is admitted next, of tenants not on hold; None if there is none."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was admitted or cancelled."""
        ...

    def hold(self, tenant: str, reason: str | None) -> None:
        """Offer no sequence of the tenant, because of a limit of its own; with None, offer them again."""
        ...


class FirstComeFirstServed:
    """A `WaitingQueue` by arrival. A preempted sequence arrived before every newcomer, so it goes first."""

    def __init__(self) -> None:
        self._arrived: OrderedDict[str, Sequence] = OrderedDict()  # a dict finds its first in linear time
        self._restored: list[Sequence] = []  # few, by arrival
        self._held: set[str] = set()  # tenants

    def __len__(self) -> int:
        return len(self._arrived) + len(self._restored)

    def add(self, sequence: Sequence) -> None:
        self._arrived[sequence.id] = sequence

    def restore(self, sequence: Sequence) -> None:
        insort(self._restored, sequence, key=lambda waiting: waiting.arrival)

    def head(self) -> Sequence | None:
        waiting = chain(self._restored, self._arrived.values())
        return next((sequence for sequence in waiting if sequence.tenant not in self._held), None)

    def remove(self, sequence: Sequence) -> None:
        if self._arrived.pop(sequence.id, None) is None:
            self._restored.remove(sequence)

    def hold(self, tenant: str, reason: str | None) -> None:
        if reason is None:
            self._held.discard(tenant)
        else:
            self._held.add(tenant)
