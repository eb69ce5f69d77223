"""The errors of refused quotas and of stores that cannot answer.

QuotaError
├── QuotaRefused         the policy says no; nothing was charged
│   ├── NeverFits        the request is larger than the limit
│   ├── LimitExceeded    a rate is spent for now, or a concurrency limit is reached
│   ├── BudgetSpent      the budget of this period is spent
│   └── SessionSpent     the session has spent what it may
├── StoreUnavailable     no answer in time, or none at all
│   ├── NotSent          there was no connection to send the call on
│   └── ConnectionLost   it broke while the call was under way
├── StoreUnsuitable      the server must not keep quotas as it is; the message names the remedy
└── StoreFault           an answer that no working store gives
"""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from quotas.policy.limit import Budget, Limit, PerSession, Rate
from quotas.policy.units import show_amount, show_wait
from quotas.reservation import Ask, LimitState


class QuotaError(Exception):
    pass


class QuotaRefused(QuotaError):
    """A limit has less left than was asked for.

    `asked` and `left` are in the units of the limit's resource; `left` is never negative. `measure` returns the state
    of each limit that the request would have been charged to, if the store reported it.
    """

    def __init__(self, limit: Limit, asked: int, left: int, when: str) -> None:
        shown = [show_amount(limit, amount) for amount in (limit.amount, asked, left)]
        super().__init__("{} is {}: asked {}, left {}; {}".format(limit.name, *shown, when))
        self.limit = limit
        self.asked = asked
        self.left = left
        self.measure: Callable[[], tuple[LimitState, ...]] = tuple


class NeverFits(QuotaRefused):
    def __init__(self, limit: Limit, asked: int) -> None:
        super().__init__(limit, asked, limit.capacity, f"it never holds more than {show_amount(limit, limit.capacity)}")


class LimitExceeded(QuotaRefused):
    """A rate or a concurrency limit is used up. `retry_after` is the seconds until the refill suffices, and None where
    it is unknown, as for concurrency.
    """

    def __init__(self, limit: Limit, asked: int, left: int, retry_after: float | None) -> None:
        when = "when others end" if retry_after is None else f"in {show_wait(retry_after)}"
        super().__init__(limit, asked, left, f"it suffices {when}")
        self.retry_after = retry_after


class BudgetSpent(QuotaRefused):
    """A budget is used up. `resets_at` is the Unix time at which the next period begins."""

    def __init__(self, limit: Limit, asked: int, left: int, resets_at: float) -> None:
        when = datetime.fromtimestamp(resets_at, UTC).isoformat(timespec="seconds")
        super().__init__(limit, asked, left, f"it resets at {when}")
        self.resets_at = resets_at


class SessionSpent(QuotaRefused):
    """The limit of a session is used up, for as long as the session goes on."""

    def __init__(self, limit: Limit, asked: int, left: int) -> None:
        super().__init__(limit, asked, left, "another session begins with all of it")


class StoreUnavailable(QuotaError):
    pass


class NotSent(StoreUnavailable):
    pass


class ConnectionLost(StoreUnavailable):
    pass


class StoreUnsuitable(QuotaError):
    pass


class StoreFault(QuotaError):
    pass


def refusals(states: Iterable[LimitState], ask: Ask, now: float) -> list[QuotaRefused]:
    """Return one refusal for each limit that has less left than is asked; `now` is the Unix time of the states."""
    found = (_forecast_refusal(state, ask.of(state.limit), now) for state in states)
    return [refusal for refusal in found if refusal is not None]


def _forecast_refusal(state: LimitState, asked: int, now: float) -> QuotaRefused | None:
    limit, left = state.limit, state.remaining
    if asked > limit.capacity and not limit.is_soft:
        return NeverFits(limit, asked)
    if asked <= left or limit.is_soft:
        return None
    match limit.window:
        case Rate(seconds=seconds):
            since_then = (limit.capacity - asked) * seconds / limit.amount  # from when it suffices until it is full
            return LimitExceeded(limit, asked, left, max(state.reset - since_then, 0.0))
        case Budget():
            return BudgetSpent(limit, asked, left, round(now + state.reset))
        case PerSession():
            return SessionSpent(limit, asked, left)
    return LimitExceeded(limit, asked, left, None)
