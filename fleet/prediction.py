"""Predicts when a request's first token would come from a replica, by the state that the replica tells.

    first token = step in flight + max(prompts ahead, seat) + its own uncached prompt        seconds from now
    prompts ahead = prompts that are being computed + those of the work ahead
    seat          = 0 while one is left for it, else until one ends + whole requests of the work ahead

Ahead of a request are its tenant's whole backlog there, and of every other tenant's backlog the part that its share, by
weight, serves while the own tenant is served up to and with the request. So a tenant that has flooded a replica waits
there for itself, and others do not wait for it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gateway.replica.state import ReplicaState, WaitingWork

NOTHING = WaitingWork(0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The properties of a request that decide its replica."""

    tenant: str
    num_bytes: int  # of its prompt
    digests: tuple[bytes, ...] = ()  # of the beginnings of its prompt, the shortest first

    @property
    def locality(self) -> bytes | None:
        """A key shared by requests with the same beginning; None for one too short to be cached."""
        return self.digests[0] if self.digests else None


def add_work(waiting: Mapping[str, WaitingWork], more: Iterable[tuple[str, WaitingWork]]) -> dict[str, WaitingWork]:
    """Each tenant's queued work, with `more` of it added."""
    total = dict(waiting)
    for tenant, work in more:
        before = total.get(tenant, NOTHING)
        total[tenant] = WaitingWork(
            before.requests + work.requests,
            before.prefill_seconds + work.prefill_seconds,
            before.seconds + work.seconds,
        )
    return total


def ahead_of(
    tenant: str, own: float, waiting: Mapping[str, WaitingWork], weight: Callable[[str], float]
) -> tuple[float, float, float]:
    """Requests, prompt seconds and total seconds that shares serve before a new request of the tenant, whose own work
    is `own` seconds.
    """
    mine = waiting.get(tenant, NOTHING)
    requests, prefill, seconds = float(mine.requests), mine.prefill_seconds, mine.seconds
    turn = (mine.seconds + own) / weight(tenant)  # the service of a tenant of weight 1, by its end
    for name, work in waiting.items():
        if name != tenant and work.requests:
            share = min(1.0, turn * weight(name) / work.seconds) if work.seconds > 0 else 1.0
            requests += share * work.requests
            prefill += share * work.prefill_seconds
            seconds += share * work.seconds
    return requests, prefill, seconds


def first_token_seconds(
    request: RoutedRequest,
    state: ReplicaState,
    waiting: Mapping[str, WaitingWork],
    cached: float,
    weight: Callable[[str], float],
) -> float:
    """Seconds until the first token; `waiting` is the state's, plus requests on their way, and `cached` the prompt's
    cached share.
    """
    own = own_prefill(request, state, cached)
    requests, prefill, seconds = ahead_of(request.tenant, own, waiting, weight)
    has_seat = state.running + requests < state.seats
    seat = 0.0 if has_seat else state.seat_seconds + seconds
    return state.step_seconds + max(state.prefill_seconds + prefill, seat) + own


def own_prefill(request: RoutedRequest, state: ReplicaState, cached: float) -> float:
    """Seconds to compute the uncached part of the prompt; its last token always is computed."""
    whole = request.num_bytes / max(state.bytes_per_token, 0.1)
    tokens = max(1.0, whole * (1 - cached))
    pairs = tokens * max(0.0, whole - tokens / 2)  # each attends to all before it
    return tokens * state.token_seconds + pairs * state.step.pair_seconds
