"""Controlled delay as a rule of overload control, added to `admission.core.EXPIRIES` once this is imported."""

from collections import OrderedDict
from math import inf

from admission.core import EXPIRIES, Overload
from backend.scheduler.sequence import Sequence


class ControlledDelay:
    """Controlled delay (CoDel: Nichols and Jacobson, 2012) for requests: the allowed wait is short while the queue does
    not run empty. `interval` and `target` are in seconds.
    """

    def __init__(self, interval: float = 2.0, target: float = 0.5) -> None:
        self.next_due = -inf  # due at every call
        self._interval, self._target = interval, target
        self._waiting: OrderedDict[Sequence, float] = OrderedDict()
        self._empty_at = 0.0

    def arrived(self, sequence: Sequence, now: float) -> None:
        if not self._waiting:
            self._empty_at = now
        self._waiting[sequence] = now

    def left_queue(self, sequence: Sequence, now: float) -> None:
        self._waiting.pop(sequence, None)
        if not self._waiting:
            self._empty_at = now

    def due(self, now: float) -> list[Sequence]:
        """Return the sequences to end: they have waited too long."""
        allowed = self._interval if now - self._empty_at < self._interval else self._target
        late = []
        for sequence, since in self._waiting.items():
            if now - since <= allowed:
                break
            late.append(sequence)
        return late


EXPIRIES[Overload.CONTROLLED_DELAY] = lambda forecaster: ControlledDelay()
