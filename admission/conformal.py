"""Upper bounds that hold with a stated confidence, learned from pairs of estimate and measurement (conformal
prediction), by group where a group has enough residuals.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from math import ceil

RESIDUALS_REMEMBERED = 300  # over all groups; a single group remembers a third
MIN_RESIDUALS = 20  # residuals before a bound is made of them; a group needs half of its window
MAX_RESIDUAL_GROUPS = 512  # groups with residuals; beyond them the group without a residual for longest is dropped
COLD_MARGIN_SHARE = 0.25  # the margin as a share of the estimate, before there are enough residuals
MISS_ADAPTATION_RATE = 0.01

Groups = tuple[Hashable, ...]
"""The groups of one estimate, the finest first. The group of all estimates is implied, not named."""


class Residuals:
    """The newest residuals, in order of arrival and sorted."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._recent: deque[float] = deque()
        self.ascending: list[float] = []

    def add(self, residual: float) -> None:
        if len(self._recent) == self._most:
            del self.ascending[bisect_left(self.ascending, self._recent.popleft())]
        self._recent.append(residual)
        insort(self.ascending, residual)

    def margin(self, miss_rate: float, target: float) -> float:
        """Return the margin that all but `miss_rate` of the next residuals stay within (split conformal). A negative
        rate says that the largest residual was too small lately: at `-target` the margin exceeds the largest residual
        by its distance from the median, and proportionally less above.
        """
        known, count = self.ascending, len(self.ascending)
        rank = ceil((count + 1) * (1 - miss_rate))
        if rank <= count:
            return known[rank - 1 if rank > 1 else 0]
        return known[-1] + max(0.0, -miss_rate / target) * (known[-1] - known[count // 2])

    def beyond(self, least: float) -> float | None:
        """Return the median of residuals above `least`; None without any."""
        first = bisect_right(self.ascending, least)
        larger = len(self.ascending) - first
        return self.ascending[first + larger // 2] if larger else None


@dataclass(slots=True)
class BoundLine:
    """The bounds of one moment, for many estimates."""

    margin: float  # above the estimate, as a multiple of it, or of `relative_from` if that is longer
    relative_from: float

    def at(self, estimate: float) -> float:
        bound = estimate + max(estimate, self.relative_from) * self.margin
        return bound if bound > 0 else 0.0


class ConformalBound:
    """Upper bounds that hold with probability `confidence`.

    Each is made of the residuals of the finest group with enough of them, else of all residuals. The miss rate, which
    adapts, is one for all groups: load changes for all at once.
    """

    def __init__(
        self,
        confidence: float,
        relative_from: float,
        rate: float = MISS_ADAPTATION_RATE,
        extrapolates: bool = False,
        window: int = RESIDUALS_REMEMBERED,
    ) -> None:
        """`relative_from`: residuals of estimates from this one on are ratios; errors of shorter estimates are ratios
        to it. `rate`: the share of a miss by which the miss rate adapts (Gibbs and Candes, 2021); small where a miss is
        known long after its bound was given. `extrapolates`: repeated misses take bounds beyond the largest residual;
        not for a bound that decides admission, because refusing every request measures nothing any more. `window`: the
        residuals remembered.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
        self._target = self._miss_rate = 1 - confidence
        self._rate = rate
        self._relative_from = relative_from
        self._least_miss_rate = -self._target if extrapolates else self._target / 10
        self._all, self._group_window = Residuals(window), window // 3
        # by last use: the group without a residual for longest comes first
        self._groups: dict[Hashable, Residuals] = {}

    def line(self, groups: Groups = ()) -> BoundLine:
        """Return the bounds of all estimates for the same groups, valid until the next observation. A bound is at least
        0, and monotone in the estimate.
        """
        residuals = self._all
        for group in groups:
            own = self._groups.get(group)
            if own is not None and len(own.ascending) >= self._group_window // 2:
                residuals = own
                break
        if len(residuals.ascending) < MIN_RESIDUALS:
            return BoundLine(COLD_MARGIN_SHARE, 0.0)
        return BoundLine(residuals.margin(self._miss_rate, self._target), self._relative_from)

    def beyond(self, estimate: float, least: float) -> float:
        """Return a stand-in for a censored measurement, known to be at least `least`: the median of the measurements
        with a larger residual (Efron's redistribution to the right, 1967, in one piece).
        """
        unit = max(estimate, self._relative_from)
        residual = self._all.beyond((least - estimate) / unit)
        return least if residual is None else estimate + unit * residual

    def observe(self, estimate: float, measured: float, groups: Groups = ()) -> None:
        """Record one residual for these groups and for all."""
        residual = (measured - estimate) / max(estimate, self._relative_from)
        self._all.add(residual)
        for group in groups:
            own = self._groups.pop(group, None)
            if own is None:
                own = Residuals(self._group_window)
                if len(self._groups) == MAX_RESIDUAL_GROUPS:
                    del self._groups[next(iter(self._groups))]
            self._groups[group] = own
            own.add(residual)

    def adapt(self, missed: bool) -> None:
        """Adapt the miss rate to a bound that held, or was missed."""
        moved = self._miss_rate + self._rate * (self._target - missed)
        self._miss_rate = min(max(moved, self._least_miss_rate), 1 - (1 - self._target) / 10)
