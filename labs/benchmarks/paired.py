"""Statistics of paired measurements: Wilcoxon's signed-rank test, Hodges and Lehmann's median difference, and their
power.

All of it for dozens of pairs and more, where the rank sum is normal (Hollander, Wolfe and Chicken, Nonparametric
Statistical Methods, 3.1 to 3.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import floor, sqrt
from random import Random
from statistics import NormalDist

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the confidence interval around it."""

    estimate: float
    low: float
    high: float

    @property
    def farthest(self) -> float:
        """The largest magnitude in the interval."""
        return max(abs(self.low), abs(self.high))


def signed_rank_p(differences: Sequence[float]) -> float:
    """Returns the two-sided p-value of Wilcoxon's signed-rank test that differences are symmetrical about 0.

    Differences of exactly 0 are left out, and equal ones share their ranks.
    """
    ordered = sorted((difference for difference in differences if difference), key=abs)
    n, rank, rank_sum, ties = len(ordered), 0, 0.0, 0
    if n == 0:
        return 1.0
    for _, group in groupby(ordered, key=abs):
        alike = list(group)
        rank_sum += (rank + (len(alike) + 1) / 2) * sum(difference > 0 for difference in alike)
        rank += len(alike)
        ties += len(alike) ** 3 - len(alike)
    deviation = sqrt(n * (n + 1) * (2 * n + 1) / 24 - ties / 48)
    distance = max(0.0, abs(rank_sum - n * (n + 1) / 4) - 0.5)  # 0.5 for continuity
    return 2 * (1 - _NORMAL.cdf(distance / deviation))


def median_difference(differences: Sequence[float], confidence: float) -> Interval:
    """Returns the median of the means of all pairs of differences, with the interval that belongs to the test."""
    n = len(differences)
    means = sorted([(differences[i] + differences[j]) / 2 for i in range(n) for j in range(i, n)])
    deviation = sqrt(n * (n + 1) * (2 * n + 1) / 24)
    outside = floor(len(means) / 2 - _NORMAL.inv_cdf((1 + confidence) / 2) * deviation)
    cut = min(max(outside, 0), (len(means) - 1) // 2)
    middle = (means[(len(means) - 1) // 2] + means[len(means) // 2]) / 2
    return Interval(middle, means[cut], means[-1 - cut])


def power(differences: Sequence[float], shift: float, level: float, resamples: int = 1000, seed: int = 0) -> float:
    """Returns how often the test at this level rejects where pairs, scattered as these are, differ by `shift`.

    Pairs are drawn with replacement from the measured ones, which are centred first.
    """
    random, centre = Random(seed), median_difference(differences, 0.5).estimate
    shifted = [difference - centre + shift for difference in differences]
    drawn = (random.choices(shifted, k=len(shifted)) for _ in range(resamples))
    return sum(signed_rank_p(sample) < level for sample in drawn) / resamples
