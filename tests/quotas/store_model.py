"""What the store's scripts should decide, in exact fractions: the reference of the property tests."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from fractions import Fraction
from math import floor
from zoneinfo import ZoneInfo

from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate
from quotas.reservation import Ask, Usage

DAY = 86_400_000_000  # microseconds
QUARTER = 900_000_000
Stretch = tuple[int, ...]


def stretch(budget: Budget, now: int) -> Stretch:
    """The period of `now`."""
    moment = datetime.fromtimestamp(now // 10**6, ZoneInfo(budget.calendar.time_zone))
    match budget.period:
        case BudgetPeriod.DAY:
            return moment.year, moment.month, moment.day
        case BudgetPeriod.WEEK:  # ISO's, which begins on Monday, of the day that is as far in it as today in ours
            return tuple((moment.replace(tzinfo=None) - timedelta(budget.calendar.week_starts)).isocalendar()[:2])
        case BudgetPeriod.MONTH:
            return moment.year, moment.month


@dataclass
class Level:
    used: Fraction = Fraction(0)
    at: int = 0
    period: int = 0  # first day of the budget's period; after an edit of the calendar, perhaps an earlier one
    moves: list[tuple[int, Fraction]] = field(default_factory=list)  # times, and what was admitted or came back

    def after(self, limit: Limit, now: int) -> Fraction:
        """What is used of it now."""
        match limit.window:
            case Rate(seconds=seconds):
                return max(self.used - Fraction(limit.amount * (now - self.at), seconds * 10**6), Fraction(0))
            case Budget() as budget if budget.first_day(now // QUARTER) > self.period:
                return Fraction(0)
        return self.used

    def charge(self, limit: Limit, cost: int, now: int) -> None:
        self.used = self.after(limit, now) + cost
        self.at = now
        if isinstance(limit.window, Budget):
            self.period = limit.window.first_day(now // QUARTER)
        self.moves.append((now, Fraction(cost)))

    def refund(self, amount: int, now: int) -> None:
        back = min(Fraction(amount), self.used)
        self.used -= back
        self.moves.append((now, -back))


@dataclass
class Taken:
    """A reservation: when and by how much it was charged, and the progress that the store was told."""

    limits: tuple[Limit, ...]
    charges: list[tuple[int, Ask]]
    booked: Usage = field(default_factory=Usage)

    def refundable(self, limit: Limit, level: Level, refund: int) -> int:
        """A budget gets back what was taken from the period it counts in. Extensions of earlier quarters of an hour
        than the last, in another period than the first charge, count as used.
        """
        if not isinstance(limit.window, Budget) or level.period <= limit.window.first_day(
            self.charges[0][0] // QUARTER
        ):
            return refund
        last = max(moment for moment, _ in self.charges)
        if level.period > limit.window.first_day(last // QUARTER):
            return 0
        late = sum(ask.of(limit) for moment, ask in self.charges if moment // QUARTER == last // QUARTER)
        return min(refund, late)


class Model:
    def __init__(self) -> None:
        self.levels: dict[str, Level] = {}
        self.spent: list[Usage] = []

    def left(self, limit: Limit, now: int) -> int:
        return max(floor(limit.capacity - self.used(limit, now)), 0)

    def used(self, limit: Limit, now: int) -> Fraction:
        return self._level(limit).after(limit, now)

    def charge(self, limits: tuple[Limit, ...], ask: Ask, now: int) -> bool:
        costs = [(limit, ask.of(limit)) for limit in limits]
        if any(cost and self.used(limit, now) + cost > limit.capacity for limit, cost in costs):
            return False
        for limit, cost in costs:
            self._level(limit).charge(limit, cost, now)
        return True

    def settle(self, taken: Taken, usage: Usage, now: int) -> None:
        whole = Ask(
            sum(ask.requests for _, ask in taken.charges),
            sum(ask.input_tokens for _, ask in taken.charges),
            sum(ask.output_tokens for _, ask in taken.charges),
        )
        computed = min(usage.input_tokens, whole.input_tokens)
        used = Usage(
            computed,
            generated := min(usage.output_tokens, whole.output_tokens),
            min(usage.cached_tokens, computed),
            requests=min(usage.requests, whole.requests),
            reasoning_tokens=min(usage.reasoning_tokens, generated),
        )
        for limit in taken.limits:
            level, kept = self._level(limit), used.of(limit) if limit.window else 0
            level.refund(taken.refundable(limit, level, whole.of(limit) - kept), now)
        self.spent.append(usage)

    def _level(self, limit: Limit) -> Level:
        return self.levels.setdefault(limit.name, Level())
