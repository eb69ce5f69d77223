"""Limits the rate of refused requests, since no quota is charged for them.

A refused request counts 1, and 1 more for each 64 KiB of its body, read or still to be discarded. Two rates hold:

- An API key may have so many requests a second refused for what they are (400, 404, 413 ...), and its tenant twice as
  many. Beyond that the gateway answers 429 before it reads a body, until the excess has been waited out.
- A key or tenant is sent twice as many refusals of any kind a second, and an address that has shown no valid key (401,
  unknown paths) as many as a key. A refusal beyond the rate is delayed for the refusals before it, not for its own
  body, which delays those that come after: the sender of one body that is too large learns so at once. A valid key
  behind the same address is not delayed.
"""

from collections import OrderedDict
from collections.abc import Callable

from admission.outcome import Outcome
from gateway.errors import ApiError, TooManyRefused
from gateway.http.address import network_of
from gateway.http.json_body import BLOCK

BURST_SECONDS = 1.0  # seconds of a rate that may come at once
MAX_DELAY = 30.0  # seconds that a refusal is delayed
REFUSALS_SHARE = 2.0  # refusals of any kind, for each request that may be refused for what it is
TENANT_SHARE = 2.0  # times the rate of a key
MAX_OWNERS = 16_384  # the latest are remembered

_Owner = tuple[str, str | None]  # a tenant and one of its keys, or none: the tenant as a whole


class RefusalLimiter:
    """Counts the refusals of keys, tenants and addresses; there is one per process."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        """`per_second` is the rate of a key; `clock` is in seconds and never goes back."""
        self.refused_tenants = set[str]()  # of whose requests any was refused for what it is: `check` passes all others
        self.on_suspect: list[Callable[[str], object]] = []  # called with each tenant that joins them
        self._clock = clock
        self._requests = _Buckets(per_second)
        self._refusals = _Buckets(per_second * REFUSALS_SHARE)
        self._addresses = _Buckets(per_second)

    def check(self, tenant: str, key: str) -> None:
        """Raises `TooManyRefused` if a key, or its tenant, has had too many requests refused."""
        now = self._clock()
        for owner, whose in (((tenant, key), "API key"), ((tenant, None), "tenant")):
            bucket = self._requests.find(owner)
            if bucket is not None and (wait := bucket.wait(now)):
                raise TooManyRefused(
                    f"Too many requests of your {whose} were refused: {bucket.rate:g} a second may be, and each counts "
                    f"one more for {BLOCK} bytes of its body. Correct what they were refused for; "
                    f"try again in {wait:.3g} s.",
                    retry_after=wait,
                )

    def count(self, error: ApiError, tenant: str | None, key: str | None, peer: str, num_bytes: int) -> float:
        """Count a refusal, and return the seconds by which it is to be delayed."""
        if error.status >= 500:
            return 0.0
        now, cost = self._clock(), 1.0 + num_bytes // BLOCK
        if tenant is None:
            return self._addresses.bucket((network_of(peer), None), 1.0, now).take(cost, now)
        owners: list[tuple[_Owner, float]] = [((tenant, key), 1.0), ((tenant, None), TENANT_SHARE)]
        if error.outcome is Outcome.INVALID:
            self._suspect(tenant)
            for owner, share in owners:
                self._requests.bucket(owner, share, now).take(cost, now)
        return max(self._refusals.bucket(owner, share, now).take(cost, now) for owner, share in owners)

    def _suspect(self, tenant: str) -> None:
        if tenant not in self.refused_tenants:
            self.refused_tenants.add(tenant)
            for listener in self.on_suspect:
                listener(tenant)


class _Buckets:
    """Token buckets by owner, of which the least recently used is forgotten for a new one."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._buckets: OrderedDict[_Owner, _Bucket] = OrderedDict()

    def find(self, owner: _Owner) -> "_Bucket | None":
        """Returns an owner's bucket; None if it has none, which is as good as a full one."""
        bucket = self._buckets.get(owner)
        if bucket is not None:
            self._buckets.move_to_end(owner)
        return bucket

    def bucket(self, owner: _Owner, share: float, now: float) -> "_Bucket":
        """Returns an owner's bucket, a new one that is full if it has none."""
        bucket = self.find(owner)
        if bucket is None:
            bucket = self._buckets[owner] = _Bucket(self._rate * share, now)
            if len(self._buckets) > MAX_OWNERS:
                self._buckets.popitem(last=False)
        return bucket


class _Bucket:
    """A token bucket that holds `BURST_SECONDS` of its rate and may be overdrawn by `MAX_DELAY` of it."""

    __slots__ = ("_at", "_level", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._level = BURST_SECONDS * rate
        self._at = now

    def take(self, cost: float, now: float) -> float:
        """Take `cost` tokens, and return the seconds until the first is covered: the others delay the next refusal."""
        self._refill(now)
        self._draw(1.0)
        seconds = self.wait(now)
        self._draw(cost - 1.0)
        return seconds

    def wait(self, now: float) -> float:
        self._refill(now)
        return max(0.0, -self._level / self.rate)

    def _draw(self, cost: float) -> None:
        self._level = max(self._level - cost, -MAX_DELAY * self.rate)

    def _refill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at) * self.rate, BURST_SECONDS * self.rate)
        self._at = now
