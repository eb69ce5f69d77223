"""The limits of one gateway without a store: the decisions of lua/reserve, extend and settle, made in memory. Pure.

A level counts as lua/level.lua does, in whole numbers, so that both decide every sequence of calls alike.
"""

import math
from dataclasses import dataclass, field

from quotas.errors import BudgetSpent, LimitExceeded, NeverFits, QuotaRefused, SessionSpent, refusals
from quotas.policy.limit import QUARTER_MICROSECONDS, Budget, Limit, PerSession, Rate
from quotas.reservation import Ask, LimitState, Usage

MICROSECONDS_PER_SECOND = 10**6


@dataclass(frozen=True, slots=True)
class Level:
    """The used part of one limit, in fractions of a unit of which the limit's rate refills whole numbers."""

    used: int = 0
    at: int = 0  # microsecond of a rate's last refill; first day of a budget's period
    part: int = 0  # refill beyond `used`, in millionths of a fraction


@dataclass(slots=True, eq=False)
class Charge:
    """The amounts that one request was charged, from `Limiter.reserve` to `Limiter.settle`."""

    tenant: str
    limits: tuple[Limit, ...]
    ask: Ask  # extensions included
    first: int  # quarter of an hour of the charge, counted from the Unix epoch
    last: int  # of the newest extension in a later quarter; else as `first`
    last_output: int = 0  # tokens added in a later `last`
    is_settled: bool = field(default=False, init=False)


class Limiter:
    """All levels of one gateway. Every call carries its time in Unix seconds, in ascending order."""

    def __init__(self) -> None:
        self._levels: dict[tuple[str, str], Level] = {}  # by tenant, '' for a team's, and name of the limit

    def reserve(self, tenant: str, limits: tuple[Limit, ...], ask: Ask, now: float) -> Charge:
        """Charge `ask` to every limit, the tenant's own and its key's, or charge nothing and raise the `QuotaRefused`
        with the longest wait.
        """
        self._charge(tenant, limits, ask, now)
        quarter = _micros(now) // QUARTER_MICROSECONDS
        return Charge(tenant, limits, ask, quarter, quarter)

    def extend(self, charge: Charge, output_tokens: int, now: float) -> None:
        """Charge more output to every limit, or charge nothing and raise `QuotaRefused`."""
        more, quarter = Ask(0, 0, output_tokens), _micros(now) // QUARTER_MICROSECONDS
        self._charge(charge.tenant, charge.limits, more, now)
        if quarter != charge.first:
            charge.last_output = (charge.last_output if quarter == charge.last else 0) + output_tokens
            charge.last = quarter
        ask = charge.ask
        charge.ask = Ask(ask.requests, ask.input_tokens, ask.output_tokens + output_tokens)

    def settle(self, charge: Charge, used: Usage) -> None:
        """Return the unused part of spent resources, and all of held ones. Idempotent."""
        if charge.is_settled:
            return
        charge.is_settled = True
        ask = charge.ask
        kept = Usage(
            input_tokens=(computed := min(used.input_tokens, ask.input_tokens)),
            output_tokens=(generated := min(used.output_tokens, ask.output_tokens)),
            reasoning_tokens=min(used.reasoning_tokens, generated),
            cached_tokens=min(used.cached_tokens, computed),
            requests=min(used.requests, ask.requests),
        )
        for limit in charge.limits:
            back = ask.of(limit) - (kept.of(limit) if limit.window else 0)
            level = self._levels.get(_place(charge.tenant, limit))
            if back > 0 and level is not None:
                refund = _refundable(charge, limit, level, back) * _scale(limit)
                self._levels[_place(charge.tenant, limit)] = Level(max(level.used - refund, 0), level.at, level.part)

    def states(self, tenant: str, limits: tuple[Limit, ...], now: float) -> tuple[LimitState, ...]:
        """Return the state of each limit at `now`."""
        return tuple(_state(limit, self._refilled(tenant, limit, now), now) for limit in limits)

    def _charge(self, tenant: str, limits: tuple[Limit, ...], ask: Ask, now: float) -> None:
        for limit in limits:
            if (asked := ask.of(limit)) > limit.capacity and not limit.is_soft:
                raise NeverFits(limit, asked)
        levels = [self._refilled(tenant, limit, now) for limit in limits]
        costs = [ask.of(limit) * _scale(limit) for limit in limits]
        rows = list(zip(limits, levels, costs, strict=True))
        if any(
            cost and not limit.is_soft and level.used + cost > limit.capacity * _scale(limit)
            for limit, level, cost in rows
        ):
            raise _refusal([_state(limit, level, now) for limit, level, _ in rows], ask, now)
        for limit, level, cost in rows:
            self._levels[_place(tenant, limit)] = Level(level.used + cost, level.at, level.part)

    def _refilled(self, tenant: str, limit: Limit, now: float) -> Level:
        level = self._levels.get(_place(tenant, limit), Level())
        micros = _micros(now)
        match limit.window:
            case None | PerSession():
                return level
            case Budget() as budget:
                first = budget.first_day(micros // QUARTER_MICROSECONDS)
                return Level(level.used if level.at >= first else 0, first)
        seconds, rest = divmod(max(micros - level.at, 0), MICROSECONDS_PER_SECOND)
        part = level.part + rest * limit.amount
        used = level.used - seconds * limit.amount - part // MICROSECONDS_PER_SECOND
        at = max(micros, level.at)
        return Level(used, at, part % MICROSECONDS_PER_SECOND) if used > 0 else Level(0, at)


def _place(tenant: str, limit: Limit) -> tuple[str, str]:
    return "" if limit.team else tenant, f"{limit.name} {limit.session or ''}"


def _refundable(charge: Charge, limit: Limit, level: Level, back: int) -> int:
    """The part of `back` that returns to the limit.

    A budget gets back the charges of its present period: all, or the output added last.
    """
    if not isinstance(limit.window, Budget) or limit.window.first_day(charge.first) >= level.at:
        return back
    is_late = limit.window.first_day(charge.last) >= level.at
    return min(back, Ask(0, 0, charge.last_output).of(limit)) if is_late else 0


def _state(limit: Limit, level: Level, now: float) -> LimitState:
    scale = _scale(limit)
    return LimitState(limit, max(limit.capacity * scale - level.used, 0) // scale, _reset(limit, level, now))


def _reset(limit: Limit, level: Level, now: float) -> float:
    match limit.window:
        case Rate():
            return level.used / limit.amount
        case Budget() as budget if level.used:
            return budget.end(_micros(now)) - now
    return 0.0


def _refusal(states: list[LimitState], ask: Ask, now: float) -> QuotaRefused:
    return max(refusals(states, ask, now), key=lambda refusal: _wait(refusal, now))


def _wait(refusal: QuotaRefused, now: float) -> float:
    match refusal:
        case LimitExceeded(retry_after=wait):
            return wait or 0.0
        case BudgetSpent(resets_at=moment):
            return moment - now
        case SessionSpent():
            return math.inf
    return 0.0


def _scale(limit: Limit) -> int:
    return limit.window.seconds if isinstance(limit.window, Rate) else 1


def _micros(now: float) -> int:
    return round(now * MICROSECONDS_PER_SECOND)
