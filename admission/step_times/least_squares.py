"""Least squares over sums of products, with coefficients that are at least 0.

Arithmetic is plain floats in a fixed order, so that a replay on another machine solves for the same numbers.
"""

from collections.abc import Sequence
from operator import mul

NUM_COEFFICIENTS = 7


class Evidence:
    """The sums that a least-squares fit is solved from."""

    def __init__(self) -> None:
        self.gram = [[0.0] * NUM_COEFFICIENTS for _ in range(NUM_COEFFICIENTS)]
        self.moment = [0.0] * NUM_COEFFICIENTS

    def add(
        self, columns: Sequence[Sequence[float]], seconds: Sequence[float], weights: Sequence[float], keep: float
    ) -> None:
        """Add steps, the oldest first: the values of each feature, the measured times, and the weights. Each added step
        multiplies the weight of the earlier sums by `keep`. Most steps only decode: sums that stay 0 are left out.
        """
        used = [(i, values) for i, values in enumerate(columns) if self.gram[i][i] > 0.0 or any(values)]
        for i, values in used:
            row, weighted = self.gram[i], [weight * x for weight, x in zip(weights, values, strict=True)]
            for j, others in used:
                row[j] = _faded_sum(row[j], weighted, others, keep)
            self.moment[i] = _faded_sum(self.moment[i], weighted, seconds, keep)

    def add_guess(self, coefficients: Sequence[float], scale: Sequence[float], weight: float) -> None:
        """Add each coefficient, of features divided by `scale`, as if typical steps of this weight had told it."""
        for place, (coefficient, unit) in enumerate(zip(coefficients, scale, strict=True)):
            share = max(coefficient * unit, 1e-9)
            self.gram[place][place] += weight / share**2
            self.moment[place] += weight / share

    def and_newer(self, newer: "Evidence", keep: float, factor: float) -> "Evidence":
        """Return the sum of both: this one has `keep` times its weight, as if each of its steps had taken `factor`
        times as long.
        """
        both = Evidence()
        share, squared = keep / factor, keep / factor**2
        for row, older, added in zip(both.gram, self.gram, newer.gram, strict=True):
            row[:] = [squared * old + new for old, new in zip(older, added, strict=True)]
        both.moment = [share * old + new for old, new in zip(self.moment, newer.moment, strict=True)]
        return both


def _faded_sum(total: float, xs: Sequence[float], ys: Sequence[float], keep: float) -> float:
    """Return the total and the products added to it, before each of which the sum so far is multiplied by `keep`."""
    for product in map(mul, xs, ys):
        total = keep * total + product
    return total


def non_negative_least_squares(
    gram: Sequence[Sequence[float]], moment: Sequence[float], start: Sequence[float], sweeps: int = 20
) -> list[float]:
    """Minimises x·G·x / 2 - m·x over x >= 0 by coordinate descent from `start` (Franc, Hlaváč and Navara, 2005)."""
    x = list(start)
    for _ in range(sweeps):
        has_moved = False
        for i, row in enumerate(gram):
            if row[i] <= 0.0:
                continue
            slope = moment[i] - dot_product(row, x)
            before = x[i]
            value = before + slope / row[i]
            x[i] = value = value if value > 0 else 0.0
            if abs(value - before) >= 1e-12:
                has_moved = True
        if not has_moved:
            break
    return x


def dot_product(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the sum of the products, in their order. It is written out because a fit takes 140 of them."""
    a0, a1, a2, a3, a4, a5, a6 = a
    b0, b1, b2, b3, b4, b5, b6 = b
    return a0 * b0 + a1 * b1 + a2 * b2 + a3 * b3 + a4 * b4 + a5 * b5 + a6 * b6


def solve_non_negative(gram: Sequence[Sequence[float]], moment: Sequence[float]) -> list[float]:
    """Minimises x·G·x / 2 - m·x over x >= 0 to the last digit, by active sets (Lawson and Hanson, 1974, chapter 23)."""
    sizes = [row[place] ** 0.5 for place, row in enumerate(gram)]
    x = [0.0] * NUM_COEFFICIENTS
    free: list[int] = []
    for _ in range(3 * NUM_COEFFICIENTS):
        best, steepest = -1, 1e-10
        for place, size in enumerate(sizes):
            if size > 0 and place not in free:
                slope = (moment[place] - dot_product(gram[place], x)) / size
                if slope > steepest:
                    best, steepest = place, slope
        if best < 0:
            break
        free.append(best)
        while free:
            solution = _solve(gram, moment, free)
            if min(solution) > 0:
                x = [0.0] * NUM_COEFFICIENTS
                for place, value in zip(free, solution, strict=True):
                    x[place] = value
                break
            _step_to_boundary(x, free, solution)
    return x


def _step_to_boundary(x: list[float], free: list[int], solution: list[float]) -> None:
    """Move towards the solution as far as every coefficient stays >= 0, and fix the coefficients that reached 0."""
    share = 1.0
    for place, value in zip(free, solution, strict=True):
        if value <= 0:
            share = min(share, x[place] / (x[place] - value) if x[place] > value else 0.0)
    for place, value in zip(free, solution, strict=True):
        x[place] += share * (value - x[place])
    held = [place for place, value in zip(free, solution, strict=True) if value <= 0 and x[place] <= 1e-15]
    for place in held or [free[-1]]:
        x[place] = 0.0
        free.remove(place)


def _solve(gram: Sequence[Sequence[float]], moment: Sequence[float], free: Sequence[int]) -> list[float]:
    """Returns the unconstrained minimum over these coefficients alone, by Cholesky's factors."""
    sizes = [gram[place][place] ** 0.5 for place in free]
    count = len(free)
    lower: list[list[float]] = []
    right: list[float] = []
    for i, place in enumerate(free):
        row = [gram[place][free[j]] / (sizes[i] * sizes[j]) for j in range(i + 1)]
        value = moment[place] / sizes[i]
        for j in range(i):
            above = lower[j]
            for k in range(j):
                row[j] -= row[k] * above[k]
            row[j] /= above[j]
            row[i] -= row[j] * row[j]
            value -= row[j] * right[j]
        row[i] = max(row[i], 1e-14) ** 0.5
        lower.append(row)
        right.append(value / row[i])
    for i in range(count - 1, -1, -1):
        for j in range(i + 1, count):
            right[i] -= lower[j][i] * right[j]
        right[i] /= lower[i][i]
    return [value / size for value, size in zip(right, sizes, strict=True)]
