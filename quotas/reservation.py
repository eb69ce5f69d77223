"""The amounts of a request: asked, granted, and used."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from quotas.policy.limit import Limit, Resource


class Attempt(NamedTuple):
    """One attempt of a request, of which at most one runs and the last is charged."""

    request: str  # hexadecimal digits, common to its attempts
    number: int  # the first is 1


class Delivered(NamedTuple):
    """The delivered part of a cut answer, as far as the router knows."""

    request: str  # common to its attempts
    has_begun: bool
    output_tokens: int | None  # None: unknown


@dataclass(slots=True)
class Ask:
    """The most that a request may use; frozen."""

    requests: int = 1
    input_tokens: int = 0
    output_tokens: int = 0
    attempt: Attempt | None = field(default=None, kw_only=True)  # None: the only one
    row: str | None = field(default=None, kw_only=True)  # of the ledger, in which its use is booked; None: its key's

    def __post_init__(self) -> None:
        if self.requests < 0 or self.input_tokens < 0 or self.output_tokens < 0:
            raise ValueError(f"nothing negative can be asked for: {self}")

    def of(self, limit: Limit) -> int:
        """The amount that it takes of a limit; 0 of resources leased otherwise."""
        if limit.prices is not None:
            return limit.prices.most(self.input_tokens, self.output_tokens)
        return _counted(limit, self.requests, self.input_tokens, self.output_tokens)


def _counted(limit: Limit, requests: int, input_tokens: int, output_tokens: int) -> int:
    match limit.resource:
        case Resource.REQUESTS | Resource.CONCURRENT_REQUESTS:
            return requests
        case Resource.INPUT_TOKENS:
            return input_tokens
        case Resource.OUTPUT_TOKENS:
            return output_tokens
        case Resource.TOKENS:
            return input_tokens + output_tokens
    return 0


class Usage(NamedTuple):
    """The computed amounts. `requests` is 0 for a request refused later, which costs nothing."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # input tokens found in the prefix cache
    kv_byte_seconds: float = 0.0
    requests: int = 1
    engine_seconds: float = 0.0  # of the tenant, whose requests' parts are not booked apart
    reasoning_tokens: int = 0  # of the output, as far as the answer was read
    batch_input_tokens: int = 0  # of the above, in batches, where tokens have a price of their own
    batch_output_tokens: int = 0
    batch_cached_tokens: int = 0
    batch_reasoning_tokens: int = 0

    def of(self, limit: Limit) -> int:
        """The amount that it takes of a limit; 0 of resources leased otherwise."""
        if limit.prices is not None:
            return limit.prices.cost(self.input_tokens, self.cached_tokens, self.output_tokens, self.reasoning_tokens)
        return _counted(limit, self.requests, self.input_tokens, self.output_tokens)

    def __add__(self, other: "Usage") -> "Usage":  # type: ignore[override]  # amounts add up
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.kv_byte_seconds + other.kv_byte_seconds,
            self.requests + other.requests,
            self.engine_seconds + other.engine_seconds,
            self.reasoning_tokens + other.reasoning_tokens,
            self.batch_input_tokens + other.batch_input_tokens,
            self.batch_output_tokens + other.batch_output_tokens,
            self.batch_cached_tokens + other.batch_cached_tokens,
            self.batch_reasoning_tokens + other.batch_reasoning_tokens,
        )


NO_USAGE = Usage()  # of a counted request
NOTHING = Usage(requests=0)


class LimitState(NamedTuple):
    """The state of a limit: `remaining` units may be taken now, and all of them after `reset` seconds without further
    use.

    `reset` is 0 if nothing refills. `set_aside` units are for replicas to spend while the store is away, and count as
    remaining; `lost` units count as used because replicas were lost. Both are reported by `states` only.
    """

    limit: Limit
    remaining: int
    reset: float
    set_aside: int = 0
    lost: int = 0


@dataclass(slots=True, eq=False)
class Reservation:
    """The charge of a request between `reserve` and `settle`.

    Its owner keeps `progress` up to date, which counts if this replica dies.
    """

    id: str
    tenant: str
    key: str | None
    ask: Ask
    limits: tuple[Limit, ...]
    measure: Callable[[], tuple[LimitState, ...]] = field(repr=False)
    progress: Usage = NO_USAGE

    @property
    def states(self) -> tuple[LimitState, ...]:
        """The state of each limit after this charge."""
        return self.measure()


MAX_TENANTS = 4096
NEWEST_SHARE = 0.1  # weight of the newest request in the mean
MIN_SECONDS = 0.1


class RequestDurations:
    """A running mean of the durations of each tenant's requests."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, float] = OrderedDict()

    def until_next_end(self, tenant: str, running: int) -> float:
        """The expected seconds until one of `running` requests ends, without further knowledge of them."""
        return max(MIN_SECONDS, self._means.get(tenant, 1.0) / max(running, 1))

    def observe(self, tenant: str, seconds: float) -> None:
        """Add the duration of a request of the tenant that has ended."""
        mean = self._means.pop(tenant, seconds)
        self._means[tenant] = mean + NEWEST_SHARE * (seconds - mean)
        if len(self._means) > MAX_TENANTS:
            self._means.popitem(last=False)
