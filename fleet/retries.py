"""Bounds on second attempts, and on how long a replica that fails is left out. Pure: a moment is given, not read."""

SHARE = 0.1  # of requests that may be tried again
RESERVE = 10.0  # attempts, beyond that share
FAILURES = 2  # in a row, from which a replica is left out
FIRST_SECONDS, MOST_SECONDS = 1.0, 30.0  # of being left out: twice as long each time


class RetryBudget:
    """Allows one second attempt for every ten requests, and a reserve for the first that fail together."""

    def __init__(self, share: float = SHARE, reserve: float = RESERVE) -> None:
        self._share, self._reserve = share, reserve
        self._left = reserve
        self.taken = 0

    def requested(self) -> None:
        """Note a first attempt."""
        self._left = min(self._reserve, self._left + self._share)

    @property
    def is_left(self) -> bool:
        """Whether a second attempt may be made."""
        return self._left >= 1

    def take(self) -> bool:
        """Return whether a second attempt may be made, and count it."""
        if not self.is_left:
            return False
        self._left -= 1
        self.taken += 1
        return True


class Ejection:
    """Leaves out a replica whose requests fail in a row. It comes back by itself, and at its next failure is left out
    for twice as long; a success makes all forgotten.
    """

    def __init__(self) -> None:
        self.until = 0.0  # left out before this moment
        self.times = 0  # that it was, since the start
        self._failures = 0
        self._seconds = FIRST_SECONDS

    def failed(self, now: float) -> None:
        self._failures += 1
        if self._failures >= FAILURES and now >= self.until:
            self.until = now + self._seconds
            self.times += 1
            self._seconds = min(2 * self._seconds, MOST_SECONDS)

    def succeeded(self) -> None:
        self._failures = 0
        self._seconds = FIRST_SECONDS
        self.until = 0.0

    def is_out(self, now: float) -> bool:
        return now < self.until
