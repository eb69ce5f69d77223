"""Limits: the amounts of a resource that a tenant, or one of its API keys, may use within a window."""

from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import NamedTuple

MAX_AMOUNT = 10**15  # the store's scripts count in doubles, exact to 2**53; this leaves room for sums
MAX_RATE = 4 * 10**9  # of a rate and its burst: the scripts count their refills in 1e-6 of a unit
DAY_MICROSECONDS = 86_400 * 10**6
EPOCH = date(1970, 1, 1)
NANOS = 10**9  # of a currency's unit: money is counted in billionths, so that the price of a token is a whole number


class Resource(StrEnum):
    REQUESTS = "requests"
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"
    TOKENS = "tokens"
    COST = "cost"
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


class TokenPrices(NamedTuple):
    """Prices of one token in billionths of the currency's unit. `cached_input` is of prompt tokens found in the prefix
    cache.
    """

    input: int
    cached_input: int
    output: int
    currency: str  # ISO 4217

    def cost(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """The exact cost in billionths; `cached_tokens` are part of `input_tokens`."""
        computed = (input_tokens - cached_tokens) * self.input + cached_tokens * self.cached_input
        return computed + output_tokens * self.output


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
    tenant. Amounts of cost are in billionths of the currency of `prices`.
    """

    resource: Resource
    amount: int
    window: Window = None
    key: str | None = None
    prices: TokenPrices | None = None  # of cost

    def __post_init__(self) -> None:
        is_held = self.resource in HELD
        if self.resource is Resource.COST and not isinstance(self.window, Budget):
            raise ValueError(f"cost is limited by the day, week or month, got {self.window}")
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

    def most_output(self, input_tokens: int) -> int | None:
        """The most output tokens that fit besides these input tokens; None if it does not count them."""
        match self.resource:
            case Resource.OUTPUT_TOKENS:
                return self.capacity
            case Resource.TOKENS:
                return self.capacity - input_tokens
            case Resource.COST if self.prices is not None and self.prices.output:
                return (self.capacity - self.prices.cost(input_tokens, 0, 0)) // self.prices.output
        return None

    def number(self, amount: int) -> int | float:
        """An amount as APIs show it: of cost in the currency's unit."""
        return float(Decimal(amount) / NANOS) if self.resource is Resource.COST else amount

    @property
    def currency(self) -> str | None:
        """The currency of its amounts; None of a limit that is not of cost."""
        return None if self.prices is None else self.prices.currency

    @property
    def capacity(self) -> int:
        """The most that the limit can ever hold: a larger request never fits."""
        return self.window.burst if isinstance(self.window, Rate) else self.amount
