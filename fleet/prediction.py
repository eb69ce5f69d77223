"""Predicts when a request's first token would come from a replica, by the state that the replica tells.

    first token = step in flight + max(prompts ahead, seat) + its own uncached prompt        seconds from now
    prompts ahead = prompts that are being computed + those of the work ahead
    seat          = 0 while one is left for it, else until one ends + whole requests of the work ahead

Ahead of a request are its tenant's whole backlog there, and of every other tenant's backlog the part that its share, by
weight, serves while the own tenant is served up to and with the request. So a tenant that has flooded a replica waits
there for itself, and others do not wait for it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from operator import attrgetter

from gateway.replica.state import ReplicaState, WaitingWork

NOTHING = WaitingWork(0, 0.0, 0.0)
MIN_TURN_S = 1e-9  # a shorter turn is none: a rate by it would have no bound


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


def _sums(turns: list[float], amounts: list[float]) -> tuple[list[float], list[float]]:
    """By number of tenants: the amounts of as many first ones, and those of the others for each second of a turn."""
    rates = [amount / (turn or inf) for turn, amount in zip(turns, amounts, strict=True)]
    return [*accumulate(amounts, initial=0.0)], [*accumulate(reversed(rates), initial=0.0)][::-1]


def _turn(seconds: float) -> float:
    return seconds if seconds > MIN_TURN_S else 0.0


_FIELDS = (attrgetter("requests"), attrgetter("prefill_seconds"), attrgetter("seconds"))


class ReplicaBacklog:
    """The queued work that a replica has told, summed in the order in which shares would have served all of a tenant's:
    a request is sent with no look at each tenant, of whom there may be a thousand on each of many replicas.
    """

    def __init__(self, waiting: Mapping[str, WaitingWork], weight: Callable[[str], float]) -> None:
        """`weight` is a tenant's."""
        self._waiting, self._weight = waiting, weight
        turns = {name: _turn(one.seconds / weight(name)) for name, one in waiting.items() if one.requests}
        ranked = sorted(turns, key=turns.__getitem__)
        self._turns = [turns[name] for name in ranked]  # service of a tenant of weight 1 until all of each is served
        works = [waiting[name] for name in ranked]
        self._sums = [_sums(self._turns, [field(one) for one in works]) for field in _FIELDS]
        self.requests: int = sum([one.requests for one in waiting.values()])
        self.prefill_seconds = sum([one.prefill_seconds for one in waiting.values()])

    def ahead(
        self, tenant: str, own: float, more: Iterable[tuple[str, WaitingWork]] = ()
    ) -> tuple[float, float, float]:
        """Requests, prompt seconds and total seconds that shares serve before a new request of the tenant, whose own
        work is `own` seconds, and with `more` work queued. O(log(tenants) + more).
        """
        told = queued = {tenant: self._waiting.get(tenant, NOTHING)}
        if more := list(more):
            told |= {name: self._waiting.get(name, NOTHING) for name, _ in more}
            queued = add_work(told, more)
        turn = (queued[tenant].seconds + own) / self._weight(tenant)
        place = bisect_right(self._turns, turn)
        parts = [(-self._share(name, one, turn), one) for name, one in told.items()]  # of the sums, which have them
        parts += [(1.0 if name == tenant else self._share(name, one, turn), one) for name, one in queued.items()]
        requests, prefill, seconds = [
            whole[place] + turn * rest[place] + sum([share * field(one) for share, one in parts])
            for (whole, rest), field in zip(self._sums, _FIELDS, strict=True)
        ]
        return requests, prefill, seconds

    def _share(self, name: str, work: WaitingWork, turn: float) -> float:
        """The share of a tenant's work that is served in a turn."""
        if not work.requests:
            return 0.0
        whole = _turn(work.seconds / self._weight(name))
        return min(1.0, turn / whole) if whole else 1.0


NO_REPLICA_BACKLOG = ReplicaBacklog({}, lambda _: 1.0)


def first_token_seconds(
    request: RoutedRequest,
    state: ReplicaState,
    backlog: ReplicaBacklog,
    cached: float,
    on_way: Iterable[tuple[str, WaitingWork]] = (),
) -> float:
    """Seconds until the first token; `backlog` is the state's, `on_way` what was sent since, and `cached` the prompt's
    cached share.
    """
    own = own_prefill(request, state, cached)
    requests, prefill, seconds = backlog.ahead(request.tenant, own, on_way)
    has_seat = state.running + requests < state.seats
    seat = 0.0 if has_seat else state.seat_seconds + seconds
    return state.step_seconds + max(state.prefill_seconds + prefill, seat) + own


def own_prefill(request: RoutedRequest, state: ReplicaState, cached: float) -> float:
    """Seconds to compute the uncached part of the prompt; its last token always is computed."""
    whole = request.num_bytes / max(state.bytes_per_token, 0.1)
    tokens = max(1.0, whole * (1 - cached))
    pairs = tokens * max(0.0, whole - tokens / 2)  # each attends to all before it
    return tokens * state.token_seconds + pairs * state.step.pair_seconds
