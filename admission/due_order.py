"""The order of deadlines: who waits with a pressing one, the earliest due first (Liu and Layland, 1973)."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import count
from operator import itemgetter

from backend.scheduler.sequence import Sequence

Due = tuple[float, int, Sequence, int]
"""A waiting sequence with a pressing deadline: its key (see `Aging.due`), its number (of those with one key, the one
that came first goes first), and the tokens of its prompt that are to be computed.
"""
_KEY = itemgetter(0)


class DueOrder:
    """Keeps them sorted. Adding and removing cost O(log n) and a move of memory."""

    def __init__(self) -> None:
        self._entries: list[Due] = []
        self._of: dict[Sequence, Due] = {}
        self._numbers = count()

    def due_by(self, key: float) -> list[Due]:
        """Returns those that are due at a key or before."""
        return self._entries[: self._after(key)]

    def due_after(self, key: float) -> list[Due]:
        """Returns those that are due later."""
        return self._entries[self._after(key) :]

    def _after(self, key: float) -> int:
        return bisect_right(self._entries, key, key=_KEY)

    def __iter__(self) -> Iterator[Due]:
        return iter(self._entries)

    def add(self, sequence: Sequence, key: float, tokens: int) -> None:
        self._of[sequence] = entry = key, next(self._numbers), sequence, tokens
        insort(self._entries, entry)  # numbers differ, so that sequences are never compared

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is there."""
        entry = self._of.pop(sequence, None)
        if entry is not None:
            del self._entries[bisect_left(self._entries, entry)]
