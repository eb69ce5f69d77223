"""What requests that are refused cost whoever sends them, since no quota is charged for them.

A refused request counts 1, and 1 more for each 64 KiB of its body, read or still to be discarded. Two rates hold:

- Of requests refused for what they are (400, 404, 413 ...), so many a second of an API key and twice as many of its
  tenant. Whoever sends more is answered 429 before a body is read, until the time for what was too much is over.
- Of answers that refuse anything to a key or tenant, twice as many; of those to an address that has shown no good
  key (401, unknown paths), as many as of a key. An answer beyond the rate is held back until it is its turn: for
  what was refused before it, not for its own body, which those pay for that come after. Whoever sends one that is
  too large learns so at once. A good key behind the same address is served as ever.
"""

import ipaddress
from collections import OrderedDict
from collections.abc import Callable

from admission.outcome import Outcome
from gateway.errors import ApiError, TooManyRefused
from gateway.http.json_body import BLOCK

BURST_SECONDS = 1.0  # of a rate that may come at once
MOST_SECONDS = 30.0  # that an answer is held back
ANSWERS = 2.0  # answers that refuse, for each request that is refused for what it is
TENANT = 2.0  # times what a key may
MAX_OWNERS = 16_384  # that are remembered, the latest

_Owner = tuple[str, str | None]  # a tenant and one of its keys, or none: the tenant as a whole


class RefusedRate:
    """One per process."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        """`clock` is in seconds and never goes back."""
        self._clock = clock
        self._requests = _Buckets(per_second)
        self._answers = _Buckets(per_second * ANSWERS)
        self._strangers = _Buckets(per_second)

    def check(self, tenant: str, key: str) -> None:
        """Raises `TooManyRefused` for one whose requests are not looked at for now."""
        now = self._clock()
        for owner, share, whose in (((tenant, key), 1.0, "API key"), ((tenant, None), TENANT, "tenant")):
            bucket = self._requests.of(owner, share, now)
            if wait := bucket.wait(now):
                raise TooManyRefused(
                    f"Too many requests of your {whose} were refused: {bucket.rate:g} a second may be, and each counts "
                    f"one more for {BLOCK} bytes of its body. Correct what they were refused for; "
                    f"try again in {wait:.3g} s.",
                    retry_after=wait,
                )

    def count(self, error: ApiError, tenant: str | None, key: str | None, peer: str, num_bytes: int) -> float:
        """A request was refused; returns for how many seconds its answer is to be held back."""
        if error.status >= 500:
            return 0.0
        now, cost = self._clock(), 1.0 + num_bytes // BLOCK
        if tenant is None:
            return self._strangers.of((_network(peer), None), 1.0, now).take(cost, now)
        owners: list[tuple[_Owner, float]] = [((tenant, key), 1.0), ((tenant, None), TENANT)]
        if error.outcome is Outcome.INVALID:
            for owner, share in owners:
                self._requests.of(owner, share, now).take(cost, now)
        return max(self._answers.of(owner, share, now).take(cost, now) for owner, share in owners)


class _Buckets:
    """Token buckets by owner; the longest unused is forgotten for another."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._buckets: OrderedDict[_Owner, _Bucket] = OrderedDict()

    def of(self, owner: _Owner, share: float, now: float) -> "_Bucket":
        bucket = self._buckets.get(owner)
        if bucket is None:
            bucket = self._buckets[owner] = _Bucket(self._rate * share, now)
            if len(self._buckets) > MAX_OWNERS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(owner)
        return bucket


class _Bucket:
    """Holds `BURST_SECONDS` of its rate, and may be overdrawn by `MOST_SECONDS` of it."""

    __slots__ = ("_at", "_level", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._level = BURST_SECONDS * rate
        self._at = now

    def take(self, cost: float, now: float) -> float:
        """The seconds until it would not be overdrawn if the cost were 1: what is beyond that delays who comes next."""
        self._refill(now)
        self._draw(1.0)
        seconds = self.wait(now)
        self._draw(cost - 1.0)
        return seconds

    def wait(self, now: float) -> float:
        self._refill(now)
        return max(0.0, -self._level / self.rate)

    def _draw(self, cost: float) -> None:
        self._level = max(self._level - cost, -MOST_SECONDS * self.rate)

    def _refill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at) * self.rate, BURST_SECONDS * self.rate)
        self._at = now


def _network(peer: str) -> str:
    """An IPv4 address itself; of IPv6 the /64, which is one subscriber's."""
    if ":" not in peer:
        return peer
    return str(int(ipaddress.IPv6Address(peer.partition("%")[0])) >> 64)
