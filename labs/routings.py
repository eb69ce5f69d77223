"""Adds published ways to pick a replica to `fleet.picker.PICKERS` once it is imported."""

from collections.abc import Sequence
from random import Random

from fleet.picker import PICKERS, Knowledge, Picker, Routing
from fleet.prediction import RoutedRequest
from fleet.view import ReplicaView

SCORE_WEIGHTS = (3.0, 2.0, 2.0)  # of the cached share, the queue and the memory, in `WeightedSum`
MIN_CACHED_SHARE = 0.3  # the cached share from which `CacheAware` goes by it
UNBALANCED_REQUESTS, UNBALANCED_RATIO = 64, 1.5  # largest load over the least, from which `CacheAware` goes by load


class RoundRobin(Picker):
    def __init__(self) -> None:
        self._next = 0

    def pick(self, request: RoutedRequest, views: Sequence[ReplicaView], now: float) -> ReplicaView:
        return views[self._next % len(views)]

    def sent(self, request: RoutedRequest, view: ReplicaView, prefill: float, now: float) -> None:
        self._next += 1


class LeastLoad(Picker):
    """The replica with the fewest requests; of several, any."""

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
            return sum(weight * part for weight, part in zip(SCORE_WEIGHTS, parts, strict=True))

        scores = [score(view) for view in views]
        best = max(scores)
        return self._dice.choice([view for view, one in zip(views, scores, strict=True) if one == best])


class CacheAware(Picker):
    """The replica that has most of the prompt cached, if that is enough of it, else the one with the most free memory;
    by load alone while loads are far apart: the rule of SGLang's router.
    """

    def __init__(self, knowledge: Knowledge, dice: Random) -> None:
        self._knowledge, self._least_load = knowledge, LeastLoad(dice)

    def pick(self, request: RoutedRequest, views: Sequence[ReplicaView], now: float) -> ReplicaView:
        loads = [view.load for view in views]
        if max(loads) - min(loads) > UNBALANCED_REQUESTS and max(loads) > UNBALANCED_RATIO * min(loads):
            return self._least_load.pick(request, views, now)
        shares = [self._knowledge.cached_share(request, view, now) for view in views]
        if max(shares) > MIN_CACHED_SHARE:
            return views[shares.index(max(shares))]
        return max(views, key=lambda view: view.state.kv.free if view.state else 0)


PICKERS |= {
    Routing.ROUND_ROBIN: lambda knowledge, dice: RoundRobin(),
    Routing.LEAST_LOAD: lambda knowledge, dice: LeastLoad(dice),
    Routing.WEIGHTED: WeightedSum,
    Routing.CACHE_AWARE: CacheAware,
}
