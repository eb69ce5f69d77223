"""Limits: the amounts of a resource that a tenant, or one of its API keys, may use within a window."""

from dataclasses import dataclass
from datetime import date, timedelta
from enum import StrEnum

MAX_AMOUNT = 10**15  # the store's scripts count in doubles, exact to 2**53; this leaves room for sums
MAX_RATE = 4 * 10**9  # of a rate and its burst: the scripts count their refills in 1e-6 of a unit
DAY_MICROSECONDS = 86_400 * 10**6
EPOCH = date(1970, 1, 1)


class Resource(StrEnum):
    REQUESTS = "requests"
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"
    TOKENS = "tokens"
    CONCURRENT_REQUESTS = "concurrent_requests"
    QUEUED_REQUESTS = "queued_requests"
    KV_BYTES = "kv_bytes"
    __hash__ = str.__hash__  # Enum's is interpreted

    @property
    def is_held(self) -> bool:
        """True if it is held and given back, rather than spent: its limits then have no window."""
        return self in HELD


HELD = frozenset({Resource.CONCURRENT_REQUESTS, Resource.QUEUED_REQUESTS, Resource.KV_BYTES})
TENANT_ONLY = frozenset({Resource.QUEUED_REQUESTS, Resource.KV_BYTES})
"""Bounded by tenant while serving: the store charges no request to them, and no key has a limit of them."""


class BudgetPeriod(StrEnum):
    """A period of the calendar in UTC; a week begins on Monday (ISO 8601)."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"

    def first_day(self, day: int) -> int:
        """Return the first day of the period that contains `day`; days are counted from the Unix epoch."""
        match self:
            case BudgetPeriod.WEEK:
                return day - (EPOCH + timedelta(day)).weekday()
            case BudgetPeriod.MONTH:
                return day - (EPOCH + timedelta(day)).day + 1
        return day

    def end(self, now: int) -> float:
        """Return the Unix time at which the period of `now`, in microseconds, ends."""
        first = EPOCH + timedelta(self.first_day(now // DAY_MICROSECONDS))
        match self:
            case BudgetPeriod.WEEK:
                following = first + timedelta(7)
            case BudgetPeriod.MONTH:
                following = (first + timedelta(32)).replace(day=1)
            case _:
                following = first + timedelta(1)
        return (following - EPOCH).days * 86_400.0


RATE_UNITS = {"s": 1, "min": 60, "h": 3600}
_RATE_NAMES = {seconds: unit for unit, seconds in RATE_UNITS.items()}


@dataclass(frozen=True, slots=True)
class Rate:
    """A token bucket that holds `burst` and refills by the limit's amount every `seconds` (1, 60 or 3600)."""

    seconds: int
    burst: int

    def __post_init__(self) -> None:
        if self.seconds not in _RATE_NAMES:
            raise ValueError(f"a rate is per 1, 60 or 3600 seconds, got {self.seconds}")
        if not 1 <= self.burst <= MAX_RATE:
            raise ValueError(f"a burst is 1 to {MAX_RATE}, got {self.burst}")

    @property
    def unit(self) -> str:
        return _RATE_NAMES[self.seconds]


@dataclass(frozen=True, slots=True)
class Budget:
    """A sum to spend in each calendar period; the rest at its end is lost."""

    period: BudgetPeriod

    @property
    def unit(self) -> str:
        return self.period.value


Window = Rate | Budget | None  # None: of held resources


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `amount` of `resource` in each window. `key` is the id of the API key that it applies to, None for the
    tenant.
    """

    resource: Resource
    amount: int
    window: Window = None
    key: str | None = None

    def __post_init__(self) -> None:
        is_held = self.resource in HELD
        if is_held != (self.window is None):
            raise ValueError(f"{self.resource} has {'no' if is_held else 'a'} window, got {self.window}")
        most = MAX_RATE if isinstance(self.window, Rate) else MAX_AMOUNT
        if not (0 if is_held else 1) <= self.amount <= most:
            raise ValueError(f"{self.resource} is limited to at most {most}, got {self.amount}")

    @property
    def name(self) -> str:
        """A stable name, unique among the limits of a tenant and its keys: "tokens/min", "key:ab12:requests/day"."""
        what = f"{self.resource}/{self.window.unit}" if self.window else self.resource.value
        return f"key:{self.key}:{what}" if self.key else what

    @property
    def is_charged(self) -> bool:
        """True if the store charges requests to it."""
        return self.resource not in TENANT_ONLY

    @property
    def capacity(self) -> int:
        """The most that the limit can ever hold: a larger request never fits."""
        return self.window.burst if isinstance(self.window, Rate) else self.amount
