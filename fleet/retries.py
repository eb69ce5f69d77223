"""Bounds on second attempts, and on the ejection of failing replicas. Pure: moments are arguments."""

RETRY_SHARE = 0.1  # of requests
RESERVE_ATTEMPTS = 10.0  # beyond that share
MAX_FAILURES_IN_A_ROW = 2  # in a row, after which a replica is ejected
FIRST_SECONDS, MOST_SECONDS = 1.0, 30.0  # of an ejection, doubled each time


class RetryBudget:
    """Allows a tenant one second attempt for every ten requests, and a reserve for the first that fail together.

    A tenant whose requests fail by its own fault, such as unmeetable deadlines, uses up its own reserve only.
    """

    def __init__(self, share: float = RETRY_SHARE, reserve: float = RESERVE_ATTEMPTS) -> None:
        self._share, self._reserve = share, reserve
        self._owed: dict[str, float] = {}  # second attempts not yet earned by requests, by tenant
        self.taken = 0

    def requested(self, tenant: str) -> None:
        if owed := max(0.0, self._owed.pop(tenant, 0.0) - self._share):
            self._owed[tenant] = owed

    @property
    def is_left_for_all(self) -> bool:
        """True if every tenant has a second attempt left."""
        return all(map(self.is_left, self._owed))

    def is_left(self, tenant: str) -> bool:
        """True if the tenant has a second attempt left."""
        return self._owed.get(tenant, 0.0) <= self._reserve - 1

    def take(self, tenant: str) -> bool:
        """Count a second attempt of the tenant; returns False if none is left."""
        if not self.is_left(tenant):
            return False
        self._owed[tenant] = self._owed.get(tenant, 0.0) + 1
        self.taken += 1
        return True


class Ejection:
    """Ejects a replica whose requests fail in a row.

    It returns by itself, and is ejected for twice as long at its next failure; a success resets it.
    """

    def __init__(self) -> None:
        self.until = 0.0  # the end of the ejection
        self.times = 0  # ejections since the start
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
