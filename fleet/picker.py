"""Picks an available replica for a request.

Pure except for the random numbers that it is given: for a router, and for a Kubernetes endpoint picker.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, inf
from random import Random

from fleet.prediction import RoutedRequest, first_token_seconds, own_prefill
from fleet.prefix_map import PrefixMap
from fleet.view import ReplicaView

TIE_SECONDS, TIE_SHARE = 0.005, 0.1  # predictions closer than either are equal
RECENT_SECONDS = 20.0
MAX_BUSY_SHARE = 0.95  # of the time: beyond capacity a queue never empties
MAX_PLACED_BEGINNINGS = 256  # remembered places of prompts before a replica reports them cached


class Routing(StrEnum):
    """The routing policies; all but the first are baselines of `labs`."""

    PREDICTED = "predicted"
    ROUND_ROBIN = "round_robin"
    LEAST_LOAD = "least_load"
    WEIGHTED = "weighted"
    CACHE_AWARE = "cache_aware"


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Knowledge of a pick besides the replicas' views."""

    prefixes: PrefixMap
    weight: Callable[[str], float]  # of a tenant

    def cached_share(self, request: RoutedRequest, view: ReplicaView, now: float) -> float:
        """The known cached share of the prompt at the replica."""
        known = self.prefixes.cached_bytes(view.name, request.digests, now)
        return min(1.0, known / max(request.num_bytes, 1))

    def first_token(self, request: RoutedRequest, view: ReplicaView, now: float) -> float:
        """The predicted seconds until the first token from this replica."""
        return self.cost(request, view, now, 0.0)

    def cost(self, request: RoutedRequest, view: ReplicaView, now: float, delayed: float) -> float:
        """The predicted seconds until this replica's first token, plus the prefill seconds there as a delay of each of
        `delayed` other requests.
        """
        assert view.state is not None, "only replicas that have told their state are picked from"
        cached = self.cached_share(request, view, now)
        first = first_token_seconds(request, view.state, view.backlog, cached, view.work_on_way)
        return first + own_prefill(request, view.state, cached) * delayed


class Picker:
    """Picks one of several replicas. `pick` changes random state alone; `sent` records the result."""

    def pick(self, request: RoutedRequest, views: Sequence[ReplicaView], now: float) -> ReplicaView:
        """Pick one of the views, at least one."""
        raise NotImplementedError

    def sent(self, request: RoutedRequest, view: ReplicaView, prefill: float, now: float) -> None:
        """Record that a request is sent to a replica, where it takes `prefill` seconds of prefill."""


class RecentRequests:
    """Rates of requests and of their prefill seconds over the last `RECENT_SECONDS`, exponentially weighted."""

    def __init__(self) -> None:
        self.requests = self.prefill = 0.0  # a second
        self._at = -inf

    def add(self, prefill: float, now: float) -> None:
        """Record a request sent now with `prefill` seconds of prefill."""
        kept = exp((self._at - now) / RECENT_SECONDS)
        self.requests = self.requests * kept + 1 / RECENT_SECONDS
        self.prefill = self.prefill * kept + prefill / RECENT_SECONDS
        self._at = now


class PlacedBeginnings:
    """The last destinations of prompts, by their beginnings."""

    def __init__(self) -> None:
        self.num_at: Counter[str] = Counter()  # by replica
        self._names: OrderedDict[bytes, str] = OrderedDict()

    def of(self, locality: bytes) -> str | None:
        return self._names.get(locality)

    def put(self, locality: bytes, name: str) -> None:
        """Record the destination of prompts with this beginning."""
        before = self._names.pop(locality, None)
        if before is None and len(self._names) >= MAX_PLACED_BEGINNINGS:
            _, before = self._names.popitem(last=False)
        if before is not None:
            self.num_at[before] -= 1
        self._names[locality] = name
        self.num_at[name] += 1


class LeastPredicted(Picker):
    """The earliest predicted first token, plus the delay that the prompt causes to other requests.

    Each second of additional work delays by as much all requests that arrive before the queue is empty. At an arrival
    rate r and utilisation u a backlog of V seconds is worked off in V / (1 - u), so that r V / (1 - u) requests are
    delayed (delay busy periods: Conway, Maxwell and Miller 1967; externalities: Haviv and Ritov 1998). Work can move to
    the least loaded replica, so that V is the smallest backlog, and r and u are means over the fleet. While a replica
    is idle, hardly any request is delayed, and a prompt goes where it is served first; the busier all are, the more
    weight has avoiding recomputation.

    Among nearly equal predictions, a prompt that may be repeated goes where its beginning is cached, or was sent last,
    else to the replica with the fewest requests and beginnings; any other prompt to the less loaded of two at random.
    """

    def __init__(self, knowledge: Knowledge, dice: Random) -> None:
        self._knowledge, self._dice = knowledge, dice
        self._recent, self._placed = RecentRequests(), PlacedBeginnings()

    def pick(self, request: RoutedRequest, views: Sequence[ReplicaView], now: float) -> ReplicaView:
        return self._pick(request, views, now) if len(views) > 1 else views[0]

    def sent(self, request: RoutedRequest, view: ReplicaView, prefill: float, now: float) -> None:
        self._recent.add(prefill, now)
        if request.locality is not None:
            self._placed.put(request.locality, view.name)

    def num_delayed(self, views: Sequence[ReplicaView]) -> float:
        """The number of requests delayed by a second more of prefill: the next one, and arrivals before the queue is
        empty.
        """
        busy = min(MAX_BUSY_SHARE, self._recent.prefill / len(views))
        backlog = min(view.prefill_seconds for view in views)
        return 1 + self._recent.requests / len(views) * backlog / (1 - busy)

    def _pick(self, request: RoutedRequest, views: Sequence[ReplicaView], now: float) -> ReplicaView:
        delayed = self.num_delayed(views)
        predicted = [self._knowledge.cost(request, view, now, delayed) for view in views]
        least = min(predicted)
        limit = max(least + TIE_SECONDS, least * (1 + TIE_SHARE))
        tied = [view for view, seconds in zip(views, predicted, strict=True) if seconds <= limit]
        if len(tied) == 1:
            return tied[0]
        if request.locality is not None:
            shares = [self._knowledge.cached_share(request, view, now) for view in tied]
            if max(shares):
                return tied[shares.index(max(shares))]
            placed = self._placed.of(request.locality)
            return next((view for view in tied if view.name == placed), None) or self._emptiest(tied)
        return min(self._dice.sample(tied, 2), key=lambda view: view.load)

    def _emptiest(self, views: list[ReplicaView]) -> ReplicaView:
        """A replica with the fewest requests and remembered beginnings, ties at random."""
        loads = [view.load + self._placed.num_at[view.name] for view in views]
        least = min(loads)
        return self._dice.choice([view for view, load in zip(views, loads, strict=True) if load == least])


PICKERS: dict[Routing, Callable[[Knowledge, Random], Picker]] = {Routing.PREDICTED: LeastPredicted}
"""The ways to pick that can be chosen; other packages add theirs (`backend.extensions`)."""
