"""Bounds on second attempts, and on how long a replica that fails is left out. Pure: a moment is given, not read."""

RETRY_SHARE = 0.1  # of requests that may be tried again
RESERVE_ATTEMPTS = 10.0  # attempts, beyond that share
MAX_FAILURES_IN_A_ROW = 2  # in a row, from which a replica is left out
FIRST_SECONDS, MOST_SECONDS = 1.0, 30.0  # of being left out: twice as long each time


class RetryBudget:
    """Allows a tenant one second attempt for every ten requests, and a reserve for the first that fail together. A
    tenant whose requests fail by its own doing, such as deadlines that no replica can keep, uses up only its own
    reserve.
    """

    def __init__(self, share: float = RETRY_SHARE, reserve: float = RESERVE_ATTEMPTS) -> None:
        self._share, self._reserve = share, reserve
        self._owed: dict[str, float] = {}  # by tenant, second attempts that its requests have yet to make up for
        self.taken = 0

    def requested(self, tenant: str) -> None:
        """Note a first attempt."""
        if owed := max(0.0, self._owed.pop(tenant, 0.0) - self._share):
            self._owed[tenant] = owed

    @property
    def is_left_for_all(self) -> bool:
        """Whether every tenant may have a second attempt made."""
        return all(map(self.is_left, self._owed))

    def is_left(self, tenant: str) -> bool:
        """Return whether the tenant may have a second attempt made."""
        return self._owed.get(tenant, 0.0) <= self._reserve - 1

    def take(self, tenant: str) -> bool:
        """Return whether the tenant may have a second attempt made, and count it."""
        if not self.is_left(tenant):
            return False
        self._owed[tenant] = self._owed.get(tenant, 0.0) + 1
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
        if self._failures >= MAX_FAILURES_IN_A_ROW and now >= self.until:
            self.until = now + self._seconds
            self.times += 1
            self._seconds = min(2 * self._seconds, MOST_SECONDS)

    def succeeded(self) -> None:
        self._failures = 0
        self._seconds = FIRST_SECONDS
        self.until = 0.0

    def is_out(self, now: float) -> bool:
        return now < self.until
