"""Limits: the amounts of a resource that a tenant, or one of its API keys, may use within a window."""

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

MAX_AMOUNT = 10**15  # the store's scripts count in doubles, exact to 2**53; this leaves room for sums
MAX_RATE = 4 * 10**9  # of a rate and its burst: the scripts count their refills in 1e-6 of a unit
QUARTER_SECONDS = 900  # of an hour: the days of every time zone begin at one
QUARTER_MICROSECONDS = QUARTER_SECONDS * 10**6
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
"""Bounded by tenant while serving: the store charges no request to them, and no key or team has a limit of them."""


class TokenPrices(NamedTuple):
    """Prices of one token in billionths of the currency's unit. `cached_input` is of prompt tokens found in the prefix
    cache, `reasoning` of output tokens before the content of an answer.
    """

    input: int
    cached_input: int
    output: int
    reasoning: int
    currency: str  # ISO 4217
    model: str = ""  # which has prices of its own; empty: of all others

    def cost(self, input_tokens: int, cached_tokens: int, output_tokens: int, reasoning_tokens: int) -> int:
        """The exact cost in billionths; `cached_tokens` are part of `input_tokens`, and `reasoning_tokens` of
        `output_tokens`.
        """
        given = (input_tokens - cached_tokens) * self.input + cached_tokens * self.cached_input
        return given + (output_tokens - reasoning_tokens) * self.output + reasoning_tokens * self.reasoning

    def most(self, input_tokens: int, output_tokens: int) -> int:
        """The most that a request with these tokens may cost."""
        return input_tokens * self.input + output_tokens * self.dearest_output

    @property
    def dearest_output(self) -> int:
        return max(self.output, self.reasoning)


class BudgetPeriod(StrEnum):
    """A period of the calendar."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    __hash__ = str.__hash__  # Enum's is interpreted


WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


class Calendar(NamedTuple):
    """The calendar of budgets: the time zone of their days, by its name in the IANA database, and the weekday on which
    their weeks begin.
    """

    time_zone: str = "UTC"
    week_starts: int = 0  # of `WEEKDAYS`


UTC_CALENDAR = Calendar()


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
    """A sum to spend in each period of the calendar; the rest at its end is lost. Quarters of an hour are counted from
    the Unix epoch on, days of the calendar from 1 January 1970 on.
    """

    period: BudgetPeriod
    calendar: Calendar = UTC_CALENDAR

    @property
    def unit(self) -> str:
        return self.period

    def first_day(self, quarter: int) -> int:
        """Return the first day of the period that contains the quarter of an hour."""
        return _first_day(self.period, self.calendar, quarter)

    def end(self, now: int) -> float:
        """Return the Unix time at which the period of `now`, in microseconds, ends."""
        return _end(self, now // QUARTER_MICROSECONDS)


@lru_cache(maxsize=4096)
def _first_day(period: BudgetPeriod, calendar: Calendar, quarter: int) -> int:
    zone = UTC if calendar.time_zone == "UTC" else ZoneInfo(calendar.time_zone)
    today = datetime.fromtimestamp(quarter * QUARTER_SECONDS, zone).date()
    day = (today - EPOCH).days
    match period:
        case BudgetPeriod.WEEK:
            return day - (today.weekday() - calendar.week_starts) % 7
        case BudgetPeriod.MONTH:
            return day - today.day + 1
    return day


@lru_cache(maxsize=4096)
def _end(budget: Budget, quarter: int) -> float:
    first = EPOCH + timedelta(budget.first_day(quarter))
    match budget.period:
        case BudgetPeriod.WEEK:
            following = first + timedelta(7)
        case BudgetPeriod.MONTH:
            following = (first + timedelta(32)).replace(day=1)
        case _:
            following = first + timedelta(1)
    # A midnight that a change of the clocks skips is the moment of the change; of two, the first counts.
    return datetime.combine(following, time(), ZoneInfo(budget.calendar.time_zone)).timestamp()


@dataclass(frozen=True, slots=True)
class PerSession:
    """A sum to spend in each session of a tenant's clients, by their word; after an idle day a session begins anew."""

    @property
    def unit(self) -> str:
        return "session"


PER_SESSION = PerSession()
Window = Rate | Budget | PerSession | None  # None: of held resources


class Alert(NamedTuple):
    """The message to `url` that is sent once in a budget's period, when `percent` of its amount is used or reserved."""

    percent: int
    url: str


@lru_cache
def _label(resource: Resource, unit: str) -> str:
    return f"{resource}/{unit}"


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `amount` of `resource` in each window. It applies to an API key, by its id, or to a team, by its name, or
    to a session, by a digest of its name, or else to a tenant. Amounts of cost are in billionths of the currency of
    `prices`.
    """

    resource: Resource
    amount: int
    window: Window = None
    key: str | None = None
    prices: TokenPrices | None = None  # of cost
    team: str | None = None
    alerts: tuple[Alert, ...] = ()  # of a budget
    is_soft: bool = False  # of a budget: it refuses nothing
    session: str | None = None  # that a request counts to

    def __post_init__(self) -> None:
        is_held = self.resource in HELD
        if self.resource is Resource.COST and not isinstance(self.window, Budget | PerSession):
            raise ValueError(f"cost is limited by the day, week, month or session, got {self.window}")
        if is_held != (self.window is None):
            raise ValueError(f"{self.resource} has {'no' if is_held else 'a'} window, got {self.window}")
        if (self.alerts or self.is_soft) and not isinstance(self.window, Budget):
            raise ValueError(f"only budgets have alerts or are soft, got {self.window}")
        most = MAX_RATE if isinstance(self.window, Rate) else MAX_AMOUNT
        if not (0 if is_held else 1) <= self.amount <= most:
            raise ValueError(f"{self.resource} is limited to at most {most}, got {self.amount}")

    @property
    def label(self) -> str:
        """The resource and its window, unique among the limits of one owner: "tokens/min"."""
        return _label(self.resource, self.window.unit) if self.window else self.resource.value

    @property
    def owner(self) -> str:
        """The kind of owner that the limit applies to: "tenant", "key", "team" or "session"."""
        if isinstance(self.window, PerSession):
            return "session"
        return "key" if self.key else "team" if self.team else "tenant"

    @property
    def name(self) -> str:
        """A stable name, unique among the limits of a request: "tokens/min", "key:ab12:requests/day"."""
        owner = self.key or self.team
        return f"{self.owner}:{owner}:{self.label}" if owner else self.label

    @property
    def is_charged(self) -> bool:
        """True if the store charges requests to it; of a session's limit, once the session is known."""
        return self.resource not in TENANT_ONLY and (self.session is not None or self.window != PER_SESSION)

    def most_output(self, input_tokens: int) -> int | None:
        """The most output tokens that fit besides these input tokens; None if it does not bound them."""
        if self.is_soft:
            return None
        match self.resource:
            case Resource.OUTPUT_TOKENS:
                return self.capacity
            case Resource.TOKENS:
                return self.capacity - input_tokens
            case Resource.COST if self.prices is not None and self.prices.dearest_output:
                return (self.capacity - self.prices.most(input_tokens, 0)) // self.prices.dearest_output
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
