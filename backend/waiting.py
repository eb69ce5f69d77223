"""Sequences that hold no memory yet, in the order they will be admitted."""

from bisect import insort
from collections import OrderedDict
from typing import Protocol

from backend.sequence import Sequence


class WaitingQueue(Protocol):
    """An order over waiting sequences. The scheduler is the only caller."""

    def __len__(self) -> int: ...

    def add(self, sequence: Sequence) -> None:
        """Take a new arrival."""
        ...

    def restore(self, sequence: Sequence) -> None:
        """Take back a preempted sequence, which keeps its place."""
        ...

    def head(self) -> Sequence | None:
        """Who is admitted next; None when nobody waits."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """It was admitted or cancelled."""
        ...


class FirstComeFirstServed:
    """Arrival order. A preempted sequence arrived before all who wait for the first time, so it goes before them."""

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
