"""The headers that tell a client what is left of its limits.

`x-ratelimit-*` are OpenAI's: of requests and of tokens, the limit that leaves the smallest share. `RateLimit-Policy`
and `RateLimit` name every limit with a window (draft-ietf-httpapi-ratelimit-headers-10).
"""

from collections.abc import Sequence

from quotas.policy.limit import Budget, BudgetPeriod, Rate, Resource
from quotas.reservation import LimitState

GROUPS = {
    "requests": frozenset({Resource.REQUESTS}),
    "tokens": frozenset({Resource.TOKENS, Resource.INPUT_TOKENS, Resource.OUTPUT_TOKENS}),
}
DAYS = {BudgetPeriod.DAY: 1, BudgetPeriod.WEEK: 7, BudgetPeriod.MONTH: 30}


def rate_headers(states: Sequence[LimitState]) -> dict[str, str]:
    """Returns the headers for these limits; none if no limit has a window of time."""
    windowed = [state for state in states if state.limit.window is not None]
    if not windowed:
        return {}
    headers = {
        "ratelimit-policy": ", ".join(f'"{s.limit.name}";q={s.limit.capacity};w={_window(s)}' for s in windowed),
        "ratelimit": ", ".join(f'"{s.limit.name}";r={s.remaining};t={round(s.reset)}' for s in windowed),
    }
    for group, resources in GROUPS.items():
        tightest = min((s for s in windowed if s.limit.resource in resources), key=_share_left, default=None)
        if tightest is not None:
            headers[f"x-ratelimit-limit-{group}"] = str(tightest.limit.capacity)
            headers[f"x-ratelimit-remaining-{group}"] = str(tightest.remaining)
            headers[f"x-ratelimit-reset-{group}"] = go_duration(tightest.reset)
    return headers


def go_duration(seconds: float) -> str:
    """Returns a duration as Go and OpenAI's headers write it: 12ms, 1.5s, 6m0s, 26h3m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


def _share_left(state: LimitState) -> float:
    return state.remaining / state.limit.capacity


def _window(state: LimitState) -> int:
    """Returns the seconds in which an empty limit fills."""
    window, limit = state.limit.window, state.limit
    if isinstance(window, Rate):
        return max(1, round(window.seconds * window.burst / limit.amount))
    assert isinstance(window, Budget)
    return DAYS[window.period] * 86_400
