"""How far estimates are off, and hence by how much to widen one so that it holds as often as it says.

Split conformal prediction (Vovk et al., 2005): of the last n residuals the ceil((n + 1)(1 - a))-th smallest, added to
an estimate, is exceeded with probability a if residuals are exchangeable. Under drift they are not, so a follows what
has been missed: a += rate (target - miss) (Gibbs and Candes, Adaptive Conformal Inference Under Distribution Shift,
2021). Where long estimates are further off than short ones, residuals are taken as multiples of them (locally weighted
conformal prediction: Papadopoulos et al., 2002; Lei et al., 2018).
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from math import ceil

WINDOW = 300  # residuals remembered
ENOUGH = 20  # residuals before they are believed
COLD_MARGIN = 0.25  # of the estimate: the margin before that
ADAPTATION_RATE = 0.01


class Conformal:
    """Upper bounds that hold with probability `confidence`, learned from estimates and what was measured then."""

    def __init__(self, confidence: float, rate: float = ADAPTATION_RATE, relative_from: float | None = None) -> None:
        """`rate`: by how much of a miss the miss rate adapts; small where residuals come in long after their bounds.
        `relative_from`: the shortest estimate of which residuals are multiples; None: they are differences.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
        self._target = self._miss_rate = 1 - confidence
        self._rate = rate
        self._relative_from = relative_from
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def bound(self, estimate: float) -> float:
        """At least 0, and monotone in the estimate."""
        count = len(self._sorted)
        if count < ENOUGH:
            return estimate * (1 + COLD_MARGIN)
        rank = min(count, ceil((count + 1) * (1 - self._miss_rate)))
        return max(0.0, estimate + self._unit(estimate) * self._sorted[max(rank, 1) - 1])

    def beyond(self, estimate: float, least: float) -> float:
        """What stands for a measurement of which only the least is known: the median of those whose residual was larger
        (Efron's redistribution to the right, 1967, in one piece).
        """
        first = bisect_right(self._sorted, self._residual(estimate, least))
        larger = len(self._sorted) - first
        return estimate + self._unit(estimate) * self._sorted[first + larger // 2] if larger else least

    def observe(self, estimate: float, measured: float, missed: bool) -> None:
        """`missed`: the truth was above the bound that was given."""
        residual = self._residual(estimate, measured)
        if len(self._recent) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(residual)
        insort(self._sorted, residual)
        moved = self._miss_rate + self._rate * (self._target - missed)
        self._miss_rate = min(max(moved, self._target / 10), 1 - (1 - self._target) / 10)

    def _residual(self, estimate: float, measured: float) -> float:
        return (measured - estimate) / self._unit(estimate)

    def _unit(self, estimate: float) -> float:
        return 1.0 if self._relative_from is None else max(estimate, self._relative_from)
