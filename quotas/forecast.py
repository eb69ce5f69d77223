"""What would refuse a request, as the states of its limits are. Pure."""

from collections.abc import Iterable

from quotas.errors import BudgetSpent, LimitExceeded, NeverFits, Refused
from quotas.limit import Budget, Rate
from quotas.reservation import Ask, LimitState


def refusals(states: Iterable[LimitState], ask: Ask, now: float) -> list[Refused]:
    """One for each limit that has not as much left as is asked; `now` is the Unix time of the states."""
    told = (_refusal(state, ask.of(state.limit.resource), now) for state in states)
    return [refusal for refusal in told if refusal is not None]


def _refusal(state: LimitState, asked: int, now: float) -> Refused | None:
    limit, left = state.limit, state.remaining
    if asked > limit.capacity:
        return NeverFits(limit, asked)
    if asked <= left:
        return None
    match limit.window:
        case Rate(seconds=seconds):
            since_then = (limit.capacity - asked) * seconds / limit.amount  # from when it suffices until it is full
            return LimitExceeded(limit, asked, left, max(state.reset - since_then, 0.0))
        case Budget():
            return BudgetSpent(limit, asked, left, round(now + state.reset))
    return LimitExceeded(limit, asked, left, None)
