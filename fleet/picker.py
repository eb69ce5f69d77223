"""Picks the replica for a request, among those that are available. Pure but for the dice that it is given: a router
asks it, and so may whatever else speaks for a gateway, such as an endpoint picker of Kubernetes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from fleet import rendezvous
from fleet.prediction import RoutedRequest, first_token_seconds, own_prefill
from fleet.prefix_map import PrefixMap
from fleet.view import ReplicaView

TIE_SECONDS, TIE_SHARE = 0.005, 0.1  # predictions closer than either tell nothing apart
WEIGHTS = (3.0, 2.0, 2.0)  # of the cached share, the queue and the memory, in `WeightedSum`
MATCHED = 0.3  # the cached share from which `CacheAware` goes by it
UNBALANCED, TIMES = 64, 1.5  # requests, and times the least, by which the largest load has `CacheAware` go by load


class Routing(StrEnum):
    """The ways to pick; all but the first are there to be measured against."""

    PREDICTED = "predicted"
    ROUND_ROBIN = "round_robin"
    LEAST_LOAD = "least_load"
    WEIGHTED = "weighted"
    CACHE_AWARE = "cache_aware"


@dataclass(frozen=True, slots=True)
class Knowledge:
    """The knowledge that a pick goes by, besides the replicas themselves."""

    prefixes: PrefixMap
    weight: Callable[[str], float]  # of a tenant

    def cached_share(self, request: RoutedRequest, view: ReplicaView, now: float) -> float:
        """Return the share of the prompt that the replica has cached, as far as is known."""
        known = self.prefixes.num_cached(view.name, request.digests, now)
        return known / (len(request.digests) + 1) if known else 0.0  # what follows the last whole block is never known

    def first_token(self, request: RoutedRequest, view: ReplicaView, now: float) -> float:
        """Return the predicted seconds until the first token from this replica."""
        assert view.state is not None, "only replicas that have told their state are picked from"
        cached = self.cached_share(request, view, now)
        return first_token_seconds(request, view.state, view.waiting, cached, self.weight)

    def cost(self, request: RoutedRequest, view: ReplicaView, now: float, delayed: int) -> float:
        """Return the predicted seconds until the first token from this replica, and those that its prompt takes there
        of so many others.
        """
        assert view.state is not None, "only replicas that have told their state are picked from"
        own = own_prefill(request, view.state, self.cached_share(request, view, now))
        return self.first_token(request, view, now) + own * delayed


class Picker:
    """Picks one of several replicas."""

    def pick(self, request: RoutedRequest, views: Sequence[ReplicaView], now: float) -> ReplicaView:
        """Return one of the views, of which there is at least one."""
        raise NotImplementedError


class RoundRobin(Picker):
    def __init__(self) -> None:
        self._next = 0

    def pick(self, request: RoutedRequest, views: Sequence[ReplicaView], now: float) -> ReplicaView:
        self._next += 1
        return views[self._next % len(views)]


class LeastLoad(Picker):
    """The one with the fewest requests; of several, any."""

    def __init__(self, dice: Random) -> None:
        self._dice = dice

    def pick(self, request: RoutedRequest, views: Sequence[ReplicaView], now: float) -> ReplicaView:
        least = min(view.load for view in views)
        return self._dice.choice([view for view in views if view.load == least])


class WeightedSum(Picker):
    """The highest sum of weighted scores between 0 and 1, as llm-d's scheduler has them: the cached share of the
    prompt, the emptiest queue and the most free memory.
    """

    def __init__(self, knowledge: Knowledge, dice: Random) -> None:
        self._knowledge, self._dice = knowledge, dice

    def pick(self, request: RoutedRequest, views: Sequence[ReplicaView], now: float) -> ReplicaView:
        longest = max(view.load for view in views)

        def score(view: ReplicaView) -> float:
            state = view.state
            free = (state.kv.free + state.kv.cached) / max(state.kv.total, 1) if state else 0.0
            queue = 1 - view.load / longest if longest else 1.0
            parts = self._knowledge.cached_share(request, view, now), queue, free
            return sum(weight * part for weight, part in zip(WEIGHTS, parts, strict=True))

        scores = [score(view) for view in views]
        best = max(scores)
        return self._dice.choice([view for view, one in zip(views, scores, strict=True) if one == best])


class CacheAware(Picker):
    """Where most of the prompt is cached if that is enough of it, else where most memory is free; by load alone while
    loads are far apart: the rule of SGLang's router.
    """

    def __init__(self, knowledge: Knowledge, dice: Random) -> None:
        self._knowledge, self._least_load = knowledge, LeastLoad(dice)

    def pick(self, request: RoutedRequest, views: Sequence[ReplicaView], now: float) -> ReplicaView:
        loads = [view.load for view in views]
        if max(loads) - min(loads) > UNBALANCED and max(loads) > TIMES * min(loads):
            return self._least_load.pick(request, views, now)
        shares = [self._knowledge.cached_share(request, view, now) for view in views]
        if max(shares) > MATCHED:
            return views[shares.index(max(shares))]
        return max(views, key=lambda view: view.state.kv.free if view.state else 0)


class LeastPredicted(Picker):
    """The earliest predicted first token, counted with the time that its own prompt takes of others: of the next that
    comes, and of as many as wait even where the fewest do. For while one replica has nothing waiting, work can move to
    it; once all have, what is computed twice delays them all, and who waits longest no longer matters as much.

    Of predictions that are nearly the same, a prompt that may be asked for again goes where its beginning hashes to,
    so that the next one finds it there, and any other to the less loaded of two at random.
    """

    def __init__(self, knowledge: Knowledge, dice: Random) -> None:
        self._knowledge, self._dice = knowledge, dice

    def pick(self, request: RoutedRequest, views: Sequence[ReplicaView], now: float) -> ReplicaView:
        if len(views) == 1:
            return views[0]
        delayed = 1 + min(view.num_waiting for view in views)
        predicted = [self._knowledge.cost(request, view, now, delayed) for view in views]
        least = min(predicted)
        limit = max(least + TIE_SECONDS, least * (1 + TIE_SHARE))
        tied = [view for view, seconds in zip(views, predicted, strict=True) if seconds <= limit]
        if len(tied) == 1:
            return tied[0]
        if request.locality is not None:
            cached = max(tied, key=lambda view: self._knowledge.cached_share(request, view, now))
            if self._knowledge.cached_share(request, cached, now):
                return cached
            by_name = {view.name: view for view in tied}
            return by_name[rendezvous.choose(request.locality, {name: view.load for name, view in by_name.items()})]
        return min(self._dice.sample(tied, 2), key=lambda view: view.load)


def make_picker(routing: Routing, knowledge: Knowledge, dice: Random) -> Picker:
    match routing:
        case Routing.ROUND_ROBIN:
            return RoundRobin()
        case Routing.LEAST_LOAD:
            return LeastLoad(dice)
        case Routing.WEIGHTED:
            return WeightedSum(knowledge, dice)
        case Routing.CACHE_AWARE:
            return CacheAware(knowledge, dice)
    return LeastPredicted(knowledge, dice)
