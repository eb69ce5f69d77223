"""Quantiles, exact and by histogram."""

from collections.abc import Sequence
from math import ceil, log

_BASE = log(1.02)
_SMALLEST = 1e-5


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that `share` of the sorted values do not exceed; None of nothing."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else None


class Histogram:
    """Durations in seconds, by logarithm: quantiles are within 1 % of the exact ones."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0

    def add(self, seconds: float, count: int = 1) -> None:
        bucket = int(log(seconds / _SMALLEST) / _BASE) if seconds > _SMALLEST else 0
        self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.total += count

    def quantiles(self, shares: Sequence[float]) -> list[float | None]:
        """One for each of the ascending shares."""
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
