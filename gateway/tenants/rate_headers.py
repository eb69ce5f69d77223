"""The headers with the rest of a client's limits.

`x-ratelimit-*` are OpenAI's: of requests and of tokens, the limit with the smallest share left. `RateLimit-Policy` and
`RateLimit` name every limit with a window (draft-ietf-httpapi-ratelimit-headers-10).
"""

from collections.abc import Sequence

from quotas.policy.limit import Budget, BudgetPeriod, Limit, Rate, Resource
from quotas.reservation import LimitState

GROUPS = {
    "requests": frozenset({Resource.REQUESTS}),
    "tokens": frozenset({Resource.TOKENS, Resource.INPUT_TOKENS, Resource.OUTPUT_TOKENS}),
}
DAYS = {BudgetPeriod.DAY: 1, BudgetPeriod.WEEK: 7, BudgetPeriod.MONTH: 30}


class RateHeaders:
    """Writes the headers of these limits; their constant part is made once."""

    def __init__(self, limits: Sequence[Limit]) -> None:
        windowed = [
            (index, limit)
            for index, limit in enumerate(limits)
            # These headers hold whole numbers, of what bounds a client.
            if limit.window is not None and limit.resource is not Resource.COST and not limit.is_soft
        ]
        self._policy = ", ".join(f'"{limit.name}";q={limit.capacity};w={_window(limit)}' for _, limit in windowed)
        self._names = [(index, f'"{limit.name}"') for index, limit in windowed]
        self._groups: list[tuple[str, list[tuple[int, int]]]] = []  # each with the place and capacity of its limits
        for group, resources in GROUPS.items():
            if members := [(index, limit.capacity) for index, limit in windowed if limit.resource in resources]:
                self._groups.append((group, members))

    def of(self, states: Sequence[LimitState]) -> dict[str, str]:
        """The headers for these states of the limits; none without a limit with a window, or without a state."""
        if not self._names or not states:
            return {}
        now = [f"{name};r={states[index].remaining};t={round(states[index].reset)}" for index, name in self._names]
        headers = {"ratelimit-policy": self._policy, "ratelimit": ", ".join(now)}
        for group, members in self._groups:
            _, index, capacity = min(
                (states[index].remaining / capacity, index, capacity) for index, capacity in members
            )
            headers[f"x-ratelimit-limit-{group}"] = str(capacity)
            headers[f"x-ratelimit-remaining-{group}"] = str(states[index].remaining)
            headers[f"x-ratelimit-reset-{group}"] = go_duration(states[index].reset)
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


def _window(limit: Limit) -> int:
    """Returns the seconds in which an empty limit fills."""
    window = limit.window
    if isinstance(window, Rate):
        return max(1, round(window.seconds * window.burst / limit.amount))
    assert isinstance(window, Budget)
    return DAYS[window.period] * 86_400
