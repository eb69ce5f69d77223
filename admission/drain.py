"""How fast a backlog drains, as measured."""

from collections import deque

PERIODS = 60  # remembered
PERIOD = 1.0  # seconds
SLOW_SHARE = 0.1  # the quantile that a promise is made by
UNMEASURED = 0.5  # seconds of predicted engine time a second
SLOWEST = 0.01


class DrainMeter:
    """Predicted engine seconds that leave the queue in a second, over periods in which something waited throughout.

    A queue that runs empty says nothing of how fast a longer one would drain.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=PERIODS)
        self._slow = UNMEASURED
        self._since: float | None = None  # something has waited since
        self._drained = 0.0

    def left(self, seconds: float, still_waiting: bool, now: float) -> None:
        """Work of so many predicted seconds was taken from the queue."""
        self._drained += seconds
        self.look(still_waiting, now)

    def look(self, waiting: bool, now: float) -> None:
        """Whether anything waits at this moment."""
        if not waiting:
            self._since = None
        elif self._since is None:
            self._since, self._drained = now, 0.0
        elif now - self._since >= PERIOD:
            self._rates.append(self._drained / (now - self._since))
            self._slow = max(sorted(self._rates)[int(SLOW_SHARE * len(self._rates))], SLOWEST)
            self._since, self._drained = now, 0.0

    @property
    def slow_rate(self) -> float:
        """The rate that nine in ten periods reached."""
        return self._slow
