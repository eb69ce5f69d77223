"""What a request asks of its tenant's limits, what it was granted, and what it used."""

from collections.abc import Callable
from dataclasses import dataclass, field

from quotas.limit import Limit, Resource


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request may use at most."""

    requests: int = 1
    input_tokens: int = 0
    output_tokens: int = 0

    def __post_init__(self) -> None:
        if min(self.requests, self.input_tokens, self.output_tokens) < 0:
            raise ValueError(f"nothing negative can be asked for: {self}")

    def of(self, resource: Resource) -> int:
        """How much of `resource` it takes; what is leased in other ways, it does not take."""
        match resource:
            case Resource.REQUESTS | Resource.CONCURRENT_REQUESTS:
                return self.requests
            case Resource.INPUT_TOKENS:
                return self.input_tokens
            case Resource.OUTPUT_TOKENS:
                return self.output_tokens
            case Resource.TOKENS:
                return self.input_tokens + self.output_tokens
        return 0


@dataclass(frozen=True, slots=True)
class Usage:
    """What was really computed. `requests` is 0 for a request that was refused later and costs nothing."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # of the input tokens, those found in the prefix cache
    kv_byte_seconds: float = 0.0
    requests: int = 1

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.kv_byte_seconds + other.kv_byte_seconds,
            self.requests + other.requests,
        )


NOTHING = Usage(requests=0)


@dataclass(frozen=True, slots=True)
class LimitState:
    """`remaining` units may be taken now; all of them after `reset` seconds, if nobody takes any (held: 0)."""

    limit: Limit
    remaining: int
    reset: float


@dataclass(slots=True, eq=False)
class Reservation:
    """Held from `reserve` to `settle`. Its holder keeps `progress` up to date: if this replica dies, that counts."""

    id: str
    tenant: str
    key: str | None
    ask: Ask
    limits: tuple[Limit, ...]
    measure: Callable[[], tuple[LimitState, ...]] = field(repr=False)
    progress: Usage = Usage()

    @property
    def states(self) -> tuple[LimitState, ...]:
        """Of each limit, once this was charged."""
        return self.measure()
