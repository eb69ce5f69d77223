"""First in, first out while the queue is short-lived; last in, first out once it has been busy for a while.

The companion of controlled delay (Maurer, Fail at Scale, 2015): under overload the newest can still be in time. Blind
to tenants.
"""

from collections import OrderedDict

from backend.scheduler.sequence import Sequence
from labs.orderings.ordering import Indifferent, Line


class AdaptiveLifo(Indifferent):
    """Serves in order or newest first, in O(1). A preempted sequence returns as the newest: it was served already."""

    def __init__(self, in_order_seconds: float = 0.5) -> None:
        """`in_order_seconds` is the time for which the queue may be busy and still be served in order."""
        self._in_order_seconds = in_order_seconds
        self._now = self._empty_at = 0.0
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def set_time(self, now: float) -> None:
        self._now = now

    def add(self, sequence: Sequence) -> None:
        self.set_time(max(self._now, sequence.arrival))
        self.restore(sequence)

    def restore(self, sequence: Sequence) -> None:
        if not self._waiting:
            self._empty_at = self._now
        self._waiting[sequence] = None

    def head(self) -> Sequence | None:
        if not self._waiting:
            return None
        return next(reversed(self._waiting)) if self._is_busy(self._now) else next(iter(self._waiting))

    def around(self, newcomer: Sequence) -> Line:
        if self._is_busy(max(self._now, newcomer.arrival)):
            return Line([], list(reversed(self._waiting)))
        return Line(list(self._waiting), [])

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence]

    def _is_busy(self, now: float) -> bool:
        return bool(self._waiting) and now - self._empty_at > self._in_order_seconds
