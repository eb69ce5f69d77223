"""Turns of several models that share a device: start-time fair queuing (Goyal, Vin and Cheng, 1996).

The virtual time of a model grows by the seconds of its steps, divided by its weight: the sum over tenants of their
weights, each divided over the tenant's rows. So a tenant has its share of the device whichever models its requests are
for, and a model with rows waits no longer than one step of each other model, and its own last step times the others'
weights over its own.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from math import inf

from backend.config import EngineConfig
from backend.scheduler.sequence import Sequence

FIRST_STEP_S = 0.01  # of a model, before one was measured
SERVICE_PER_WAKE = 4.0
"""The engine time between two wakings, in times of a waking, where models that are awake have work: wakings take a
fifth of the device's time at most.
"""


class Turns:
    """Orders models by their virtual times. A step counts as long as its model's last, until it is measured.

    It also says which models sleep: where memory holds the weights of some alone, the models without a turn for
    longest.
    """

    def __init__(self, config: EngineConfig, weight: Callable[[str], float | None]) -> None:
        self._config, self._weight = config, weight
        self._awake: list[int] = []  # if some sleep: the one that had the last turn behind all others
        self._since_waking = inf  # engine seconds since the last waking began
        self._ends: dict[int, float] = {}  # by model, the virtual time at which its last step ends
        self._begun = 0.0  # the virtual time at which the step planned last begins
        self._number = 0
        self._last: dict[int, tuple[int, float]] = {}  # by model, the number and the seconds of its last step
        self._weights: dict[int, float] = {}
        self._in_flight: dict[int, tuple[float, float]] = {}  # by step, the seconds that were counted, and the weight

    def next(
        self, running: Iterable[Sequence], head: Sequence | None, tried: Collection[int] = frozenset()
    ) -> int | None:
        """Return the model of these sequences whose turn it is, of those not `tried` for this step, which have no row;
        None: there is none. The spare class has a turn only where no other has a row.
        """
        asking = [*running] if head is None else [*running, head]
        asking = [one for one in asking if one.request.model not in tried]
        asking = [one for one in asking if not one.is_spare] or asking
        rows = Counter([one.tenant for one in asking])
        self._weights = {}
        for one in asking:
            part = (self._weight(one.tenant) or 1.0) / rows[one.tenant]
            model = one.request.model
            self._weights[model] = self._weights.get(model, 0.0) + part
        return min(self._weights, key=self._rank, default=None)

    def _rank(self, model: int) -> tuple[float, int, int]:
        wait = max(0.0, (1 + SERVICE_PER_WAKE) * self.wake_seconds(model) - self._since_waking)
        return self._begin(model) + wait / self._weights[model], self._last.get(model, (0,))[0], model

    def wake_seconds(self, model: int) -> float:
        """Return the seconds until the model's weights are in memory."""
        return self._config.wake_seconds[model] if self._config.awake_bytes and model not in self._awake else 0.0

    def _begin(self, model: int) -> float:
        return max(self._begun, self._ends.get(model, 0.0))

    def planned(self, model: int, step: int) -> tuple[int, ...]:
        """Count a step of the model, which `next` has returned; returns the models that sleep from then on."""
        self._begun = self._begin(model)
        self._number += 1
        _, seconds = self._last.get(model, (0, FIRST_STEP_S))
        self._last[model] = self._number, seconds
        self._ends[model] = self._begun + seconds / self._weights[model]
        self._in_flight[step] = seconds, self._weights[model]
        return self._make_room(model) if self._config.awake_bytes else ()

    def _make_room(self, model: int) -> tuple[int, ...]:
        if model not in self._awake:
            self._since_waking = 0.0
        sizes, awake = self._config.weight_bytes, [one for one in self._awake if one != model]
        awake.sort(key=lambda one: one in self._weights)  # models without a row go to sleep first
        while awake and sum(sizes[one] for one in awake) + sizes[model] > self._config.awake_bytes:
            awake.pop(0)
        self._awake = [*(one for one in self._awake if one in awake), model]
        return tuple(one for one in range(len(sizes)) if one not in self._awake)

    def completed(self, model: int, step: int, elapsed: float) -> None:
        """Correct the count of a step by the seconds that it took."""
        if (counted := self._in_flight.pop(step, None)) is not None:  # else it came before the second model
            self._ends[model] += (elapsed - counted[0]) / counted[1]
            self._since_waking += elapsed
            self._last[model] = self._last[model][0], elapsed

    def lost(self) -> None:
        """Forget the steps in flight; their models have had their turns all the same."""
        self._in_flight.clear()
