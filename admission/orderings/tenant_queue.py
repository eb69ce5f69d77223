"""Orders the waiting sequences of one tenant: by class and arrival, classes that wait rising (see `Aging`)."""

from collections.abc import Callable
from functools import cache
from heapq import heapify, heappop, heappush

from admission.aging import Aging
from backend.scheduler.sequence import Sequence

Place = tuple[float, int]
"""A waiting sequence's key by class and arrival, and the number that it was added with: the smaller came first."""


class OrderInTenant:
    """What the queues of all tenants order by."""

    def __init__(self, aging: Aging) -> None:
        self.offset: Callable[[int], float] = cache(aging.offset)  # in seconds, by class

    def age(self, aging: Aging) -> None:
        """Age classes in this way from now on; those that wait keep their places."""
        self.offset = cache(aging.offset)


class TenantQueue:
    """One tenant's waiting sequences. Adding and finding the first cost O(log waiting), removing O(1)."""

    def __init__(self, order: OrderInTenant) -> None:
        self._order = order
        self.entries: list[tuple[float, int, Sequence]] = []  # those that were removed leave it lazily
        self._waiting: dict[Sequence, int] = {}  # the number of each one's valid entry

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def add(self, sequence: Sequence, number: int) -> None:
        """Queue it. Of several with one key, that with the smallest number goes first."""
        assert sequence not in self._waiting, "it waits already"
        key = sequence.arrival - sequence.age_bonus + self._order.offset(sequence.priority_class)  # as `Aging.key`
        self._waiting[sequence] = number
        heappush(self.entries, (key, number, sequence))

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence]
        if not self._waiting:
            self.entries.clear()
        elif len(self.entries) > 2 * len(self._waiting) + 64:
            self.entries = [entry for entry in self.entries if self._waiting.get(entry[2]) == entry[1]]
            heapify(self.entries)

    def first(self, now: float) -> Sequence | None:
        """Returns the one that is admitted first; None where nothing waits."""
        while self.entries:
            _, number, sequence = self.entries[0]
            if self._waiting.get(sequence) == number:
                return sequence
            heappop(self.entries)
        return None

    def first_place(self, now: float) -> Place | None:
        """Returns the place of the one that is admitted first; None where nothing waits."""
        return None if self.first(now) is None else self.entries[0][:2]
