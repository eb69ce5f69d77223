"""Upper bounds that hold as often as they say, learned from estimates and what was measured then (conformal
prediction), for groups of which enough is known by their own.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from math import ceil, inf

WINDOW = 300  # residuals remembered of all together; of each group a third
ENOUGH = 20  # residuals before they are believed; of a group, half of those remembered
MOST_GROUPS = 512  # of which residuals are kept; beyond them those go that had none for longest
COLD_MARGIN = 0.25  # of the estimate: the margin before enough is known
ADAPTATION_RATE = 0.01

Groups = tuple[Hashable, ...]
"""The groups that one estimate falls in, the finest first. All estimates are in the one of all, which is not named."""


class Residuals:
    """The newest residuals, in the order in which they came and sorted."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, residual: float) -> None:
        if len(self._recent) == self._most:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(residual)
        insort(self._sorted, residual)

    def margin(self, miss_rate: float, target: float) -> float:
        """Returns what all but this share of the next residuals stay within (split conformal). With a rate below 0,
        which says that the largest was not enough lately, it is as much further from the largest as that is from the
        median, where the rate is `-target`; and less in proportion.
        """
        known, count = self._sorted, len(self._sorted)
        rank = ceil((count + 1) * (1 - miss_rate))
        if rank <= count:
            return known[rank - 1 if rank > 1 else 0]
        return known[-1] + max(0.0, -miss_rate / target) * (known[-1] - known[count // 2])

    def beyond(self, least: float) -> float | None:
        """Returns the median of those above `least`; None where there is none."""
        first = bisect_right(self._sorted, least)
        larger = len(self._sorted) - first
        return self._sorted[first + larger // 2] if larger else None


@dataclass(slots=True)
class BoundLine:
    """Bounds as they are at one moment, for many estimates."""

    margin: float  # beyond the estimate, in its unit
    relative_from: float  # the shortest estimate that is the unit itself; inf: the unit is a second

    def at(self, estimate: float) -> float:
        """Returns what `ConformalBound.bound` does."""
        unit = 1.0 if self.relative_from == inf else max(estimate, self.relative_from)
        bound = estimate + unit * self.margin
        return bound if bound > 0 else 0.0


class ConformalBound:
    """Upper bounds that hold with probability `confidence`.

    Each is made of the residuals of the finest group of which enough are known, else of all. What adapts to misses
    is one share for all of them: load changes for everyone at once.
    """

    def __init__(
        self,
        confidence: float,
        rate: float = ADAPTATION_RATE,
        relative_from: float | None = None,
        extrapolates: bool = False,
        window: int = WINDOW,
    ) -> None:
        """`rate`: by how much of a miss the miss rate adapts (Gibbs and Candes, 2021); small where it is known long
        after its bound was given. `relative_from`: the shortest estimate of which residuals are multiples; None: they
        are differences. `extrapolates`: whether misses that go on take bounds beyond the largest residual. Not where
        a bound decides what is measured: what refuses everything learns nothing any more. `window`:
        the residuals remembered.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
        self._target = self._miss_rate = 1 - confidence
        self._rate = rate
        self._relative_from = relative_from
        self._least_miss_rate = -self._target if extrapolates else self._target / 10
        self._all, self._group_window = Residuals(window), window // 3
        self._groups: dict[Hashable, Residuals] = {}  # the one that had none for longest comes first

    def bound(self, estimate: float, groups: Groups = ()) -> float:
        """Returns the bound, which is at least 0 and, for the same groups, monotone in the estimate."""
        return self.line(groups).at(estimate)

    def line(self, groups: Groups = ()) -> BoundLine:
        """Returns the bounds of all estimates for the same groups, until something is learned."""
        residuals = self._all
        for group in groups:
            own = self._groups.get(group)
            if own is not None and len(own) >= self._group_window // 2:
                residuals = own
                break
        if len(residuals) < ENOUGH:
            return BoundLine(COLD_MARGIN, 0.0)
        relative_from = inf if self._relative_from is None else self._relative_from
        return BoundLine(residuals.margin(self._miss_rate, self._target), relative_from)

    def beyond(self, estimate: float, least: float) -> float:
        """Returns a value in place of a measurement of which only the least is known: the median of those with a larger
        residual (Efron's redistribution to the right, 1967, in one piece).
        """
        unit = self._unit(estimate)
        residual = self._all.beyond((least - estimate) / unit)
        return least if residual is None else estimate + unit * residual

    def observe(self, estimate: float, measured: float, groups: Groups = ()) -> None:
        """Learns from one measurement of what these groups were told."""
        residual = (measured - estimate) / self._unit(estimate)
        self._all.add(residual)
        for group in groups:
            own = self._groups.pop(group, None)
            if own is None:
                own = Residuals(self._group_window)
                if len(self._groups) == MOST_GROUPS:
                    del self._groups[next(iter(self._groups))]
            self._groups[group] = own
            own.add(residual)

    def adapt(self, missed: bool) -> None:
        """Learns that a bound which was given held, or did not."""
        moved = self._miss_rate + self._rate * (self._target - missed)
        self._miss_rate = min(max(moved, self._least_miss_rate), 1 - (1 - self._target) / 10)

    def _unit(self, estimate: float) -> float:
        return 1.0 if self._relative_from is None else max(estimate, self._relative_from)
