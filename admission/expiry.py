"""Expiry: rules that select sequences whose deadlines have passed or cannot be met. The controller ends them."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Protocol

from backend.scheduler.sequence import Sequence, SequenceStatus


class Expiry(Protocol):
    """A rule that selects the sequences to expire. Times are in seconds of the engine's clock."""

    next_due: float  # no sequence is due at this moment or earlier; possibly none afterwards

    def arrived(self, sequence: Sequence, now: float) -> None: ...

    def left_queue(self, sequence: Sequence, now: float) -> None:
        """Record that a sequence was admitted, or has ended."""
        ...

    def due(self, now: float) -> list[Sequence]:
        """Return the sequences to end now."""
        ...


class NoExpiry:
    """The rule under which no sequence expires."""

    next_due = inf

    def arrived(self, sequence: Sequence, now: float) -> None:
        pass

    def left_queue(self, sequence: Sequence, now: float) -> None:
        pass

    def due(self, now: float) -> list[Sequence]:
        return []


class DeadlineExpiry:
    """A sequence expires when it cannot have a token in time, or has not ended in time. O(log n) each.

    A waiting sequence expires as soon as the shortest possible prefill would end too late, so that no prefill is
    computed in vain; a running one expires when the deadline itself has passed. A feasible deadline never expires.
    """

    def __init__(self, shortest_prefill: Callable[[Sequence], float]) -> None:
        """`shortest_prefill` returns the prefill seconds of a prompt on an otherwise idle machine."""
        self._shortest_prefill = shortest_prefill
        self._heap: list[tuple[float, int, Sequence]] = []  # entries of ended sequences leave it lazily
        self.next_due = inf
        self._numbers = count()
        self._tolerated = 64  # entries, before the entries of ended sequences are cleared out

    def arrived(self, sequence: Sequence, now: float) -> None:
        deadlines = _deadlines(sequence)
        if deadlines:
            self._watch(sequence, self._latest_start(sequence))
        for time in deadlines:
            self._watch(sequence, time)

    def left_queue(self, sequence: Sequence, now: float) -> None:
        pass

    def due(self, now: float) -> list[Sequence]:
        expired: dict[Sequence, None] = {}  # in the order in which their times passed; each has several entries
        while self._heap and self._heap[0][0] < now:
            sequence = heappop(self._heap)[2]
            if _is_late(sequence, now) or (_is_idle(sequence) and self._is_too_late(sequence, now)):
                expired[sequence] = None
        self.next_due = self._heap[0][0] if self._heap else inf
        return list(expired)

    def _is_too_late(self, sequence: Sequence, now: float) -> bool:
        """Return True if it is too late to begin. Prefill may have become faster since the arrival."""
        latest = self._latest_start(sequence)
        if latest >= now:
            self._watch(sequence, latest)
        return latest < now

    def _latest_start(self, sequence: Sequence) -> float:
        return min(_deadlines(sequence)) - self._shortest_prefill(sequence)

    def _watch(self, sequence: Sequence, time: float) -> None:
        heappush(self._heap, (time, next(self._numbers), sequence))
        self.next_due = self._heap[0][0]
        if len(self._heap) > self._tolerated:
            self._heap = [entry for entry in self._heap if entry[2].status is not SequenceStatus.FINISHED]
            heapify(self._heap)
            self._tolerated = 2 * len(self._heap) + 64


def _deadlines(sequence: Sequence) -> list[float]:
    return [time for time in (sequence.request.first_token_by, sequence.request.done_by) if time is not None]


def _is_late(sequence: Sequence, now: float) -> bool:
    """Return True if the sequence has missed a deadline."""
    if sequence.status is SequenceStatus.FINISHED:
        return False
    if sequence.request.done_by is not None and sequence.request.done_by < now:
        return True
    return not sequence.output and sequence.request.first_token_by is not None and sequence.request.first_token_by < now


def _is_idle(sequence: Sequence) -> bool:
    """Return True if the sequence has neither prefill nor tokens yet."""
    return sequence.status is SequenceStatus.WAITING and sequence.num_computed_tokens == 0 and not sequence.output
