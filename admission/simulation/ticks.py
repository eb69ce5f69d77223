"""Round numbers for an axis."""

from collections.abc import Iterator
from math import ceil, floor, log10


def linear_ticks(high: float, most: int = 5) -> list[float]:
    """From 0 to at least `high`, `most` steps at most, each 1, 2 or 5 times a power of ten."""
    if high <= 0:
        return [0.0, 1.0]
    power = 10.0 ** floor(log10(high / most))
    step = next(power * unit for unit in (1, 2, 5, 10, 20) if power * unit * most >= high)
    return [step * n for n in range(ceil(round(high / step, 9)) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high]; 1, 2 and 5 times them when those are few. At least one is returned."""
    decades = [10.0**n for n in range(floor(log10(low)), ceil(log10(high)) + 1)]
    whole = [tick for tick in decades if low <= tick <= high]
    if len(whole) >= 3:
        return whole
    return [tick for decade in decades for tick in _within(decade, low, high)] or [low]


def _within(decade: float, low: float, high: float) -> Iterator[float]:
    return (decade * unit for unit in (1, 2, 5) if low <= decade * unit <= high)
