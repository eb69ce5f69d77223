"""Orders the waiting sequences of one tenant: classes by age, and in a class the shorter first, for a while.

By class and by when they are due (see `Aging.due`) the one with the smallest key is the head. Where the head is of the
highest class that waits, and nothing of the tenant has a pressing deadline, a shorter one of its class goes before it:

- while the head has not waited for `overtaking_seconds`, beyond the offset of its class: the smallest of those that
  can still be in time, and where none can, the smallest of all;
- after that the smallest of those that can still be in time, if the tenant's balance pays for it: what goes in order
  adds `OVERTAKING` of its size to it, up to `SAVED` typical requests, and what goes so takes its size from it.

What was preempted goes on before either. Sizes are in the unit of account, as predicted when a sequence came.

Bound. Once a sequence has waited for so long, the work of its class that goes before it out of order is at
most `OVERTAKING` times the work that goes before it in order, and `SAVED` times the largest. `Aging.worst_wait` has the
wait that follows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from admission.aging import OVERTAKING, SAVED, Aging
from backend.scheduler.sequence import TARGET, Sequence

IN_TIME = 0.85
"""The share of its target that a sequence may wait and still be in time: what is left is for its own prefill.
Of recorded lengths at 1.3 times capacity 57 % are in time with 0.5, 60 % with this, 61 % with 0.95; where any that is
shorter may overtake an old head, and not those in time alone, 55 %, though completions where slots bind are 7 % sooner.
"""
_FORGET = 0.02  # share of a running mean that each newcomer replaces

Place = tuple[float, int]
"""A waiting sequence's key by class and by when it is due, and the number that it was added with."""

_Heap = list[tuple[float, int, Sequence]]  # what was removed leaves it lazily


def _prompt_tokens(sequence: Sequence) -> float:
    return float(len(sequence.prompt))


class OrderInTenant:
    """What the queues of all tenants order by."""

    def __init__(
        self, aging: Aging, overtaking_seconds: float = 0.0, size: Callable[[Sequence], float] = _prompt_tokens
    ) -> None:
        """`size` predicts what a sequence costs, in the unit of account; it is asked once, when one is added."""
        self.overtaking_seconds, self.size = overtaking_seconds, size
        self.age(aging)

    def age(self, aging: Aging) -> None:
        """Age classes in this way from now on; those that wait keep their places."""
        self.offset: Callable[[int], float] = cache(aging.offset)  # in seconds, by class

    def late_at(self, sequence: Sequence) -> float:
        """Returns when it is too late to begin with a sequence, on the engine's clock."""
        target = sequence.first_token_target
        return sequence.arrival + IN_TIME * (TARGET if target is None else target)


class _Waiting(NamedTuple):
    """The place and the size of a sequence that waits."""

    key: float
    number: int
    size: float


@dataclass(slots=True)
class _Class:
    """The waiting sequences of one class: heaps by key, and by size. A late one may still be among those in time."""

    by_key: _Heap
    in_time: _Heap
    late: _Heap
    restored: dict[Sequence, None]
    count: int = 0


class TenantQueue:
    """One tenant's waiting sequences. Adding and finding the first cost O(log waiting), removing O(1)."""

    def __init__(self, order: OrderInTenant) -> None:
        self._order = order
        self._waiting: dict[Sequence, _Waiting] = {}
        self._classes: dict[int, _Class] = {}
        self._num_pressing = 0
        self._balance = 0.0  # in the unit of account: what may overtake an old head
        self._typical = 0.0  # a running mean of sizes

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    @property
    def num_entries(self) -> int:
        """The entries in memory, those that were removed and have not left yet included."""
        return sum(len(one.by_key) + len(one.in_time) + len(one.late) for one in self._classes.values())

    def add(self, sequence: Sequence, number: int) -> None:
        """Queue it. Of several with one key, that with the smallest number goes first."""
        assert sequence not in self._waiting, "it waits already"
        order, level = self._order, sequence.priority_class
        key = sequence.due + order.offset(level)  # as `Aging.due`
        size = order.size(sequence) if order.overtaking_seconds else 0.0
        self._waiting[sequence] = _Waiting(key, number, size)
        one = self._classes.get(level)
        if one is None:
            one = self._classes[level] = _Class([], [], [], {})
        one.count += 1
        heappush(one.by_key, (key, number, sequence))
        if order.overtaking_seconds:
            heappush(one.in_time, (size, number, sequence))
            self._typical += (_FORGET if self._typical else 1.0) * (size - self._typical)
            if not sequence.is_newcomer:
                one.restored[sequence] = None
        self._num_pressing += sequence.is_pressing

    def remove(self, sequence: Sequence, now: float) -> None:
        """Take it out at this time, on the engine's clock, because it was admitted or has ended."""
        if self._order.overtaking_seconds:
            self._balance_for(sequence, now)
        del self._waiting[sequence]
        self._num_pressing -= sequence.is_pressing
        level = sequence.priority_class
        one = self._classes[level]
        one.count -= 1
        one.restored.pop(sequence, None)
        if not one.count:
            del self._classes[level]
        elif len(one.by_key) + len(one.in_time) + len(one.late) > 4 * one.count + 128:
            for heap in (one.by_key, one.in_time, one.late):
                heap[:] = [entry for entry in heap if self._waits(entry)]
                heapify(heap)

    def first(self, now: float) -> Sequence | None:
        """Returns the one that is admitted first, at this time on the engine's clock; None where nothing waits."""
        if not self._waiting:
            return None
        head = self._head()
        seconds, level = self._order.overtaking_seconds, head.priority_class
        if not seconds or self._num_pressing or (len(self._classes) > 1 and min(self._classes) < level):
            return head
        one = self._classes[level]
        if one.restored:
            return min(one.restored, key=self._waiting.__getitem__)
        if self._age(head, now) < seconds:
            return self._smallest_in_time(one, now) or self._smallest_late(one)
        small = self._smallest_in_time(one, now)
        return head if small is None or self._waiting[small].size > self._balance else small

    def first_place(self, now: float) -> Place | None:
        """Returns the place of the one that is admitted first; None where nothing waits."""
        first = self.first(now)
        return None if first is None else self._waiting[first][:2]

    def _balance_for(self, sequence: Sequence, now: float) -> None:
        head, size = self._head(), self._waiting[sequence].size
        if sequence is head:
            self._balance = min(SAVED * self._typical, self._balance + OVERTAKING * size)
        elif self._age(head, now) >= self._order.overtaking_seconds:
            self._balance -= size

    def _head(self) -> Sequence:
        """Returns the one with the smallest key, of those that wait: there are some."""
        least: tuple[float, int, Sequence] | None = None
        for one in self._classes.values():
            entry = self._top(one.by_key)
            if entry is not None and (least is None or entry < least):
                least = entry
        assert least is not None, "it has work waiting"
        return least[2]

    def _age(self, sequence: Sequence, now: float) -> float:
        """Returns for how long a sequence has waited, less the offset of its class."""
        return now - sequence.arrival - self._order.offset(sequence.priority_class)

    def _smallest_in_time(self, one: _Class, now: float) -> Sequence | None:
        while (entry := self._top(one.in_time)) is not None:
            if now <= self._order.late_at(entry[2]):
                return entry[2]
            heappush(one.late, heappop(one.in_time))
        return None

    def _smallest_late(self, one: _Class) -> Sequence | None:
        entry = self._top(one.late)
        return None if entry is None else entry[2]

    def _top(self, heap: _Heap) -> tuple[float, int, Sequence] | None:
        while heap:
            if self._waits(heap[0]):
                return heap[0]
            heappop(heap)
        return None

    def _waits(self, entry: tuple[float, int, Sequence]) -> bool:
        waiting = self._waiting.get(entry[2])
        return waiting is not None and waiting.number == entry[1]
