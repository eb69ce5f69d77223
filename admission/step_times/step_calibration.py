"""The fit of step times to calibration steps of known shapes, and its combination with the evidence of live steps.

Errors are relative. Each shape counts by a low quantile of its times, so that stalled steps change nothing, and
outlying shapes weigh less (Huber, 1964).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import isfinite

from admission.step_times.least_squares import NUM_COEFFICIENTS, Evidence, dot_product, solve_non_negative

TIMES_PER_SHAPE = 5  # times remembered of each shape
TOLERATED_RELATIVE_ERROR = 0.01  # without a lower weight for the shape
KNEE_COST_SHARE = 0.75  # of the squared errors with the usual knee: another knee must cost less than this share
REWEIGHTING_ROUNDS = 3  # in which shapes are weighed by their errors
GUESS_WEIGHT = 1e-6  # of the initial coefficients, which decide only where no shape does
LIVE_STEPS_PER_SHAPE = 16.0  # the weight of one shape
MAX_SLOWDOWN_FACTOR = 100.0  # of calibration steps against live steps

Amounts = tuple[int, int, int, int, int]
"""A step's work: prefill tokens, decode tokens, decode context, prefill context, prefill pairs."""


class StepCalibration:
    """The times of calibration steps, by the amounts of their work."""

    def __init__(self, guess: Sequence[float], read_share: Callable[[int], float]) -> None:
        """`guess`: coefficients in seconds a unit, kept where no shape has evidence of one. `read_share`: of the
        weights, by a step's tokens.
        """
        self._guess = guess
        self._read_share = read_share
        self._times: dict[Amounts, deque[float]] = {}

    def add(self, amounts: Amounts, seconds: float) -> None:
        """Record a step's time."""
        if isfinite(seconds) and seconds > 0:
            self._times.setdefault(amounts, deque(maxlen=TIMES_PER_SHAPE)).append(seconds)

    def __len__(self) -> int:
        return len(self._times)

    def knee(self, usual: int) -> int:
        """Return the number of tokens at which a hinge fits the steps best, unless the usual one is nearly as good."""
        best, least = usual, KNEE_COST_SHARE * self.fit(usual).cost - GUESS_WEIGHT * len(self._times)
        for knee in [32 << power for power in range(8)]:
            if (cost := self.fit(knee).cost) < least:
                least, best = cost, knee
        for apart in (2**0.5, 2**0.25, 2**0.125):
            for knee in (round(best / apart), round(best * apart)):
                if (cost := self.fit(knee).cost) < least:
                    least, best = cost, knee
        return best

    def fit(self, knee: int) -> "CalibratedFit":
        """Returns the coefficients of scaled features (`scaled_features`) that fit the steps best."""
        rows = []
        for amounts, times in self._times.items():
            seconds = _quartile(times)
            read = self._read_share(amounts[0] + amounts[1])
            rows.append([value / seconds for value in scaled_features(amounts, knee, read)])
        weights = [1.0] * len(rows)
        for _ in range(REWEIGHTING_ROUNDS):
            solution = self._solve(rows, weights, knee)[0]
            errors = [abs(1.0 - dot_product(row, solution)) for row in rows]
            tolerance = max(TOLERATED_RELATIVE_ERROR, 3.0 * _median(errors))
            weights = [min(1.0, tolerance / error) if error > 0 else 1.0 for error in errors]
        solution, evidence = self._solve(rows, weights, knee)
        cost = 0.0
        for row in rows:
            error = abs(1.0 - dot_product(row, solution))
            cost += min(error, tolerance) * error
        return CalibratedFit(solution, evidence, cost)

    def _solve(self, rows: list[list[float]], weights: list[float], knee: int) -> tuple[list[float], Evidence]:
        evidence = Evidence()
        columns = [[row[place] for row in rows] for place in range(NUM_COEFFICIENTS)]
        evidence.add(columns, [1.0] * len(rows), weights, 1.0)
        evidence.add_guess(self._guess, typical_features(knee), GUESS_WEIGHT)
        return solve_non_negative(evidence.gram, evidence.moment), evidence


class CalibratedFit:
    """Coefficients of scaled features that fit the calibration steps best, with the evidence for them."""

    def __init__(self, solution: list[float], evidence: Evidence, cost: float) -> None:
        self._solution, self._evidence = solution, evidence
        self.cost = cost  # the sum of squared errors, outliers weighed less

    def and_live(self, live: Evidence) -> list[float]:
        """Return the coefficients by calibration and live steps.

        Live steps decide the coefficients that they can tell apart, for there they are many; calibration decides the
        rest. A serving machine is faster or slower as a whole than during calibration: only the proportions count.
        """
        scale = max(self._scale_of(live), 1 / MAX_SLOWDOWN_FACTOR)
        both = self._evidence.and_newer(live, LIVE_STEPS_PER_SHAPE, scale)
        return solve_non_negative(both.gram, both.moment)

    def _scale_of(self, live: Evidence) -> float:
        """Return the factor by which live steps last longer than these coefficients predict."""
        square = dot_product([dot_product(row, self._solution) for row in live.gram], self._solution)
        return dot_product(live.moment, self._solution) / square if square > 0 else 1.0


def scaled_features(amounts: Amounts, knee: int, read_share: float) -> list[float]:
    """Return the factors of the coefficients for a step, each divided by its typical value."""
    beyond = max(0, amounts[0] + amounts[1] - knee)
    return [value / scale for value, scale in zip((read_share, *amounts, beyond), typical_features(knee), strict=True)]


def typical_features(knee: int) -> tuple[float, float, float, float, float, float, float]:
    """Returns scales that bring all features near 1, for the conditioning of the fit."""
    return (1.0, knee / 2, knee / 16, 64.0 * knee, 4.0 * knee, 256.0 * knee, float(knee))


def _quartile(values: Iterable[float]) -> float:
    """Return the lower quartile: other work on the machine makes a step longer, never shorter."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


def _median(values: Iterable[float]) -> float:
    """Return the median, the lower of two: an erroneous time is too long."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
