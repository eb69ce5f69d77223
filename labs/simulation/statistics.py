"""Statistics of a run: service gaps between tenants, quantiles of durations, and values over time."""

from collections.abc import Sequence
from itertools import combinations
from math import ceil, log

MAX_GAP_TENANTS = 8  # all pairs are followed


class ServiceGap:
    """The gap in service: `largest` is the greatest |ΔW_i/w_i - ΔW_j/w_j| over all intervals in which both tenants were
    backlogged throughout.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self._ranges: dict[tuple[int, int], tuple[float, float]] = {}  # of the difference while both are backlogged

    @property
    def watching(self) -> bool:
        return bool(self._ranges)

    def observe(self, service: Sequence[float], backlogged: Sequence[bool]) -> None:
        """Record each tenant's service so far, by weight, with True if it was backlogged since the last call."""
        current: dict[tuple[int, int], tuple[float, float]] = {}
        waiting = [tenant for tenant, waits in enumerate(backlogged) if waits]
        for i, j in combinations(waiting, 2):
            difference = service[i] - service[j]
            low, high = self._ranges.get((i, j), (difference, difference))
            low, high = current[i, j] = min(low, difference), max(high, difference)
            self.largest = max(self.largest, high - low)
        self._ranges = current


_BASE = log(1.02)
_SMALLEST = 1e-5


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value at or above `share` of the sorted values; None for none."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else None


class QuantileHistogram:
    """A histogram of durations in seconds, by logarithm: quantiles are within 1 % of the exact ones."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0

    def add(self, seconds: float, count: int = 1) -> None:
        bucket = int(log(seconds / _SMALLEST) / _BASE) if seconds > _SMALLEST else 0
        self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.total += count

    def quantiles(self, shares: Sequence[float]) -> list[float | None]:
        """Returns one quantile for each of the ascending shares."""
        buckets = iter(sorted(self._counts.items()))
        found: list[float | None] = []
        bucket, seen = 0, 0
        for share in shares:
            wanted = max(1, ceil(share * self.total))
            while seen < min(wanted, self.total):
                bucket, count = next(buckets)
                seen += count
            found.append(_SMALLEST * 1.02 ** (bucket + 0.5) if self.total else None)
        return found


MOST_INTERVALS = 240


class Timeline:
    """The course of a value, given at times that never go back: `values[i]` is the largest in the i-th `interval`
    seconds.
    """

    def __init__(self, interval: float = 0.125) -> None:
        self.interval = interval
        self.values: list[float] = []

    def add(self, time: float, value: float) -> None:
        index = int(time / self.interval)
        if index >= len(self.values):
            while index >= MOST_INTERVALS:
                self._halve()
                index = int(time / self.interval)
            self.values += [0.0] * (index + 1 - len(self.values))
        self.values[index] = max(self.values[index], value)

    def _halve(self) -> None:
        self.interval *= 2
        self.values = [max(self.values[n : n + 2]) for n in range(0, len(self.values), 2)]
