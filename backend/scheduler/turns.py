"""Whose turn a step is, of several models that share a device: start-time fair queuing (Goyal, Vin and Cheng, 1996).

The virtual time of a model grows by the seconds of its steps, divided by its weight: the sum over tenants of their
weights, each divided over the tenant's rows. So a tenant has its share of the device whichever models its requests are
for, and a model with rows waits no longer than one step of each other model, and its own last step times the others'
weights over its own.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from backend.scheduler.sequence import Sequence

FIRST_STEP_S = 0.01  # of a model, before one was measured


class Turns:
    """Orders models by their virtual times. A step counts as long as its model's last, until it is measured."""

    def __init__(self, weight: Callable[[str], float | None]) -> None:
        self._weight = weight
        self._ends: dict[int, float] = {}  # by model, the virtual time at which its last step ends
        self._begun = 0.0  # the virtual time at which the step planned last begins
        self._number = 0
        self._last: dict[int, tuple[int, float]] = {}  # by model, the number and the seconds of its last step
        self._weights: dict[int, float] = {}
        self._in_flight: dict[int, tuple[float, float]] = {}  # by step, the seconds that were counted, and the weight

    def order(self, running: Iterable[Sequence], head: Sequence | None) -> list[int]:
        """Return the models of these sequences in the order of their turns: the spare class has a turn only where no
        other has a row.
        """
        asking = [*running] if head is None else [*running, head]
        asking = [one for one in asking if not one.is_spare] or asking
        rows = Counter([one.tenant for one in asking])
        self._weights = {}
        for one in asking:
            part = (self._weight(one.tenant) or 1.0) / rows[one.tenant]
            model = one.request.model
            self._weights[model] = self._weights.get(model, 0.0) + part
        return sorted(self._weights, key=lambda model: (self._begin(model), self._last.get(model, (0,))[0], model))

    def _begin(self, model: int) -> float:
        return max(self._begun, self._ends.get(model, 0.0))

    def planned(self, model: int, step: int) -> None:
        """Count a step of the model, which `order` has returned."""
        self._begun = self._begin(model)
        self._number += 1
        _, seconds = self._last.get(model, (0, FIRST_STEP_S))
        self._last[model] = self._number, seconds
        self._ends[model] = self._begun + seconds / self._weights[model]
        self._in_flight[step] = seconds, self._weights[model]

    def completed(self, model: int, step: int, elapsed: float) -> None:
        """Correct the count of a step by the seconds that it took."""
        if (counted := self._in_flight.pop(step, None)) is not None:  # else it came before the second model
            self._ends[model] += (elapsed - counted[0]) / counted[1]
            self._last[model] = self._last[model][0], elapsed

    def lost(self) -> None:
        """Forget the steps in flight; their models have had their turns all the same."""
        self._in_flight.clear()
