"""Limits the rate of refused requests, since no quota is charged for them.

A refused request counts 1, and 1 more for each 64 KiB that was read of its body, up to `MAX_BODY_COST_SECONDS` of the
rate. Two rates hold:

- An API key may have `refused_per_second` faulty requests refused (400, 404, 413 ...). Beyond that the gateway
  answers 429 before it reads a body, until the excess has been waited out.
- A key is sent twice as many refusals of any kind a second, and an address without a valid key (401, unknown paths)
  as many as a key. A refusal beyond the rate is delayed by the refusals before it, not by its own body, which delays
  later ones: the sender of one body that is too large learns so at once. A valid key behind the same address is not
  delayed.

A tenant has the rate of `KEY_RATES_PER_TENANT` keys, and none of its keys is kept out for another's refusals: while
more keys have requests refused, each refusal costs its own key more, so that they share that rate.
"""

from collections import OrderedDict
from collections.abc import Callable

from admission.outcome import Outcome
from gateway.errors import ApiError, TooManyRefused
from gateway.http.address import network_of
from gateway.http.json_body import BLOCK_BYTES
from quotas.policy.units import show_size, show_wait

BURST_SECONDS = 1.0  # of a rate, as its burst
MAX_DELAY_SECONDS = 30.0  # that a refusal is delayed
MAX_BODY_COST_SECONDS = 10.0  # of a rate: the maximum cost of one refused body
REFUSALS_PER_FAULT = 2.0  # refusals of any kind, for each faulty request
KEY_RATES_PER_TENANT = 2  # a tenant's rate, in rates of a key
MAX_OWNERS = 16_384  # tenants, or networks: the latest are remembered


class RefusalLimiter:
    """Counts the refusals of keys, tenants and addresses; there is one per process."""

    def __init__(self, per_second: float, clock: Callable[[], float]) -> None:
        """`per_second` is the rate of a key; `clock` is in seconds and never goes back."""
        self.refused_tenants = set[str]()  # with a faulty request; `check` passes all others
        self.on_suspect: list[Callable[[str], object]] = []  # called with each tenant that joins them
        self._clock = clock
        self._requests = _Buckets(per_second)
        self._refusals = _Buckets(per_second * REFUSALS_PER_FAULT)
        self._addresses = _Buckets(per_second)

    def check(self, tenant: str, key: str) -> None:
        """Raises `TooManyRefused` if a key has had too many requests refused."""
        if wait := self._requests.wait(tenant, key, self._clock()):
            raise TooManyRefused(
                f"Too many requests of your API key were refused: at most {self._requests.rate:g} a second, each "
                f"counting one more for {show_size(BLOCK_BYTES)} read of its body. Correct them; try again in "
                f"{show_wait(wait)}.",
                retry_after=wait,
            )

    def count(self, error: ApiError, tenant: str | None, key: str | None, peer: str, num_bytes: int) -> float:
        """Count a refusal after `num_bytes` of the body were read, and return the seconds by which to delay it."""
        if error.status >= 500:
            return 0.0
        now, num_blocks = self._clock(), num_bytes // BLOCK_BYTES
        if tenant is None:
            return self._addresses.take(network_of(peer), None, num_blocks, now)
        if error.outcome is Outcome.INVALID:
            self._suspect(tenant)
            self._requests.take(tenant, key, num_blocks, now)
        return self._refusals.take(tenant, key, num_blocks, now)

    def _suspect(self, tenant: str) -> None:
        if tenant not in self.refused_tenants:
            for listener in self.on_suspect:
                listener(tenant)
            self.refused_tenants.add(tenant)


class _Buckets:
    """Token buckets by owner (a tenant or a network) and key, until they are full. The least recently used owner is
    forgotten for a new one.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._buckets: OrderedDict[str, dict[str | None, _Bucket]] = OrderedDict()

    def wait(self, owner: str, key: str | None, now: float) -> float:
        """Seconds until the bucket's debt is paid."""
        bucket = self._buckets.get(owner, {}).get(key)
        return 0.0 if bucket is None else bucket.wait(now)

    def take(self, owner: str, key: str | None, num_blocks: int, now: float) -> float:
        """Charge a refusal that came after `num_blocks` of a body, and return the seconds until earlier charges are
        covered.
        """
        before = self._buckets.pop(owner, {})
        buckets = self._buckets[owner] = {one: bucket for one, bucket in before.items() if not bucket.is_full(now)}
        if len(self._buckets) > MAX_OWNERS:
            self._buckets.popitem(last=False)
        bucket = buckets.setdefault(key, _Bucket(self.rate, now))
        share = max(1.0, len(buckets) / KEY_RATES_PER_TENANT)
        bucket.draw(share)
        seconds = bucket.wait(now)
        bucket.draw(share * min(num_blocks, MAX_BODY_COST_SECONDS * self.rate))
        return seconds


class _Bucket:
    """A token bucket that holds `BURST_SECONDS` of its rate and may be overdrawn by `MAX_DELAY_SECONDS` of it."""

    __slots__ = ("_at", "_level", "_rate")

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._level = BURST_SECONDS * rate
        self._at = now

    def wait(self, now: float) -> float:
        self._refill(now)
        return max(0.0, -self._level / self._rate)

    def is_full(self, now: float) -> bool:
        self._refill(now)
        return self._level >= BURST_SECONDS * self._rate

    def draw(self, cost: float) -> None:
        self._level = max(self._level - cost, -MAX_DELAY_SECONDS * self._rate)

    def _refill(self, now: float) -> None:
        self._level = min(self._level + (now - self._at) * self._rate, BURST_SECONDS * self._rate)
        self._at = now
