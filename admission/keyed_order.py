"""Plain orders of waiting requests, by a key fixed at arrival: first come first served, and those of `labs`."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from itertools import count
from operator import attrgetter

from admission.forecast import DueRequest, WorkAhead
from backend.scheduler.sequence import Sequence

_DUE = attrgetter("due")


class KeyedOrder:
    """A `WaitingOrder` ordered by a key fixed at arrival, for example the arrival time.

    Tenants have no shares in it.
    """

    def __init__(self, key: Callable[[Sequence], float], uncached: Callable[[Sequence], int]) -> None:
        """`uncached` as `DueOrder` takes it."""
        self._key, self._uncached = key, uncached
        self._line: list[DueRequest] = []  # sorted
        self._keys: dict[Sequence, float] = {}  # of requests that have not ended
        self._entries: dict[Sequence, DueRequest] = {}
        self._held: set[str] = set()  # tenants on hold for limits of their own
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._line)

    def due(self, sequence: Sequence) -> float:
        key = self._keys.get(sequence)
        return self._key(sequence) if key is None else key

    def add(self, sequence: Sequence) -> None:
        key = self._keys[sequence] = self.due(sequence)
        entry = self._entries[sequence] = DueRequest(key, next(self._numbers), sequence, self._uncached(sequence))
        insort(self._line, entry)

    def restore(self, sequence: Sequence) -> None:
        self.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        del self._line[bisect_left(self._line, self._entries.pop(sequence))]

    def head(self) -> Sequence | None:
        return next((entry.sequence for entry in self._line if entry.sequence.tenant not in self._held), None)

    def hold(self, tenant: str, reason: str | None) -> None:
        if reason is None:
            self._held.discard(tenant)
        else:
            self._held.add(tenant)

    def ahead(self, sequence: Sequence, due: float) -> WorkAhead:
        before = self._line[: bisect_right(self._line, due, key=_DUE)]
        others = [entry for entry in before if entry.sequence.tenant not in self._held]
        own = sum([entry.tokens for entry in others if entry.sequence.tenant == sequence.tenant])
        return WorkAhead(float(sum([entry.tokens for entry in others])), float(len(others)), float(own))

    def behind(self, sequence: Sequence, due: float) -> list[DueRequest]:
        later = self._line[bisect_right(self._line, due, key=_DUE) :]
        return [entry for entry in later if entry.sequence.tenant not in self._held]

    def ended(self, sequence: Sequence) -> None:
        self._keys.pop(sequence, None)

    def set_time(self, now: float) -> None:
        pass
