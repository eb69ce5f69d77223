"""CoDel for requests: a baseline that bounds waiting without estimates.

Nichols and Jacobson (2012); for servers Maurer, Fail at Scale (2015). While the queue has run empty within the last
`interval`, whoever waits may wait that long; once it has not, only `target`, until it runs empty again.
"""

from collections import OrderedDict

from backend.sequence import Sequence


class ControlledDelay:
    """Told of all that wait. Times in seconds."""

    def __init__(self, interval: float = 2.0, target: float = 0.5) -> None:
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
        """Those that have waited too long; each is to be ended."""
        patience = self._interval if now - self._empty_at < self._interval else self._target
        late = []
        for sequence, since in self._waiting.items():
            if now - since <= patience:
                break
            late.append(sequence)
        return late
