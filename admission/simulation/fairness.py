"""How unequally tenants were served: the gap between two, which a fairness bound speaks of, and an index over all."""

from collections.abc import Iterable, Sequence
from itertools import combinations

MOST_TENANTS = 8  # all pairs are followed


class ServiceGap:
    """`largest` is the greatest |ΔW_i/w_i - ΔW_j/w_j| over all intervals in which both were backlogged throughout."""

    def __init__(self) -> None:
        self.largest = 0.0
        self._ranges: dict[tuple[int, int], tuple[float, float]] = {}  # of the difference, while both are backlogged

    @property
    def watching(self) -> bool:
        return bool(self._ranges)

    def observe(self, service: Sequence[float], backlogged: Sequence[bool]) -> None:
        """Service of each tenant so far, by weight, and whether it has had work waiting since the last call."""
        current: dict[tuple[int, int], tuple[float, float]] = {}
        waiting = [tenant for tenant, waits in enumerate(backlogged) if waits]
        for i, j in combinations(waiting, 2):
            difference = service[i] - service[j]
            low, high = self._ranges.get((i, j), (difference, difference))
            low, high = current[i, j] = min(low, difference), max(high, difference)
            self.largest = max(self.largest, high - low)
        self._ranges = current


def jain_index(shares: Iterable[float]) -> float | None:
    """1 when all are equal, 1/n when one has everything (Jain, Chiu and Hawe, 1984); None of nothing."""
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None
