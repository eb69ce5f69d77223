"""Fits a step's time to steps of known shapes, and keeps what they say beside what the steps of live traffic say.

Errors are relative. Each shape counts by a low one of its times, so that steps which stalled change nothing, and by
less the further it is off the others (Huber, 1964).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from math import isfinite

from admission.step_times.least_squares import NUM_COEFFICIENTS, Evidence, solve_non_negative

REPEATS = 5  # times of one shape that are remembered
EXACT = 0.01  # a relative error that is held against no shape
HINGED = 0.75  # of the squared errors with the usual knee: what another has to have less than
ROUNDS = 3  # in which shapes are weighed by their errors
FAINT = 1e-6  # the weight of a first guess, which decides what no shape shows
WORTH = 16.0  # live steps that one shape counts as
SLOWEST = 100.0  # times as long as live steps, that calibration steps may have taken

Amounts = tuple[int, int, int, int, int]
"""A step's work: prefill tokens, decode tokens, decode context, prefill context, prefill pairs."""


class StepCalibration:
    """The times of calibration steps, by the amounts of their work."""

    def __init__(self, guess: Sequence[float]) -> None:
        """`guess`: coefficients in seconds a unit, which stay where no shape says anything of one."""
        self._guess = guess
        self._times: dict[Amounts, deque[float]] = {}

    def add(self, amounts: Amounts, seconds: float) -> None:
        """Note what a step took."""
        if isfinite(seconds) and seconds > 0:
            self._times.setdefault(amounts, deque(maxlen=REPEATS)).append(seconds)

    def __len__(self) -> int:
        return len(self._times)

    def knee(self, usual: int) -> int:
        """Returns the number of tokens at which a hinge fits the steps best, unless the usual one does nearly as
        well.
        """
        best, least = usual, HINGED * self.fit(usual).cost - FAINT * len(self._times)
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
            rows.append([value / seconds for value in scaled_features(amounts, knee)])
        weights = [1.0] * len(rows)
        for _ in range(ROUNDS):
            solution = self._solve(rows, weights, knee)[0]
            errors = [abs(1.0 - _dot(row, solution)) for row in rows]
            tolerance = max(EXACT, 3.0 * _median(errors))
            weights = [min(1.0, tolerance / error) if error > 0 else 1.0 for error in errors]
        solution, evidence = self._solve(rows, weights, knee)
        cost = 0.0
        for row in rows:
            error = abs(1.0 - _dot(row, solution))
            cost += min(error, tolerance) * error
        return CalibratedFit(solution, evidence, cost)

    def _solve(self, rows: list[list[float]], weights: list[float], knee: int) -> tuple[list[float], Evidence]:
        evidence = Evidence()
        columns = {place: [row[place] for row in rows] for place in range(NUM_COEFFICIENTS)}
        evidence.add(columns, [1.0] * len(rows), weights, 1.0)
        for place, (guess, scale) in enumerate(zip(self._guess, typical_features(knee), strict=True)):
            share = max(guess * scale, 1e-9)
            evidence.gram[place][place] += FAINT / share**2
            evidence.moment[place] += FAINT / share
        return solve_non_negative(evidence.gram, evidence.moment), evidence


class CalibratedFit:
    """Coefficients of scaled features that fit the calibration steps best, with the evidence for them."""

    def __init__(self, solution: list[float], evidence: Evidence, cost: float) -> None:
        self._solution, self._evidence = solution, evidence
        self.cost = cost  # the sum of errors squared, with less of those that are far off

    def and_live(self, live: Evidence) -> list[float]:
        """Returns the coefficients by this and by live steps.

        Live steps decide what they can tell apart, for there they are many, and this decides the rest. A machine is
        faster or slower as a whole while it serves than it was when it was calibrated: only the proportions count.
        """
        scale = max(self._scale_of(live), 1 / SLOWEST)
        both, share, squared = Evidence(), WORTH / scale, WORTH / scale**2
        for row, known, added in zip(both.gram, self._evidence.gram, live.gram, strict=True):
            row[:] = [squared * one + other for one, other in zip(known, added, strict=True)]
        moments = zip(self._evidence.moment, live.moment, strict=True)
        both.moment = [share * one + other for one, other in moments]
        return solve_non_negative(both.gram, both.moment)

    def _scale_of(self, live: Evidence) -> float:
        """Returns how many times as long as by these coefficients live steps last."""
        square = _dot([_dot(row, self._solution) for row in live.gram], self._solution)
        return _dot(live.moment, self._solution) / square if square > 0 else 1.0


def scaled_features(amounts: Amounts, knee: int) -> list[float]:
    """Returns the factors of the coefficients for a step, each divided by what is typical of it."""
    beyond = max(0, amounts[0] + amounts[1] - knee)
    return [value / scale for value, scale in zip((1, *amounts, beyond), typical_features(knee), strict=True)]


def typical_features(knee: int) -> tuple[float, float, float, float, float, float, float]:
    """Returns scales that bring all features near 1, for the conditioning of the fit."""
    return (1.0, knee / 2, knee / 16, 64.0 * knee, 4.0 * knee, 256.0 * knee, float(knee))


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    total = 0.0
    for x, y in zip(a, b, strict=True):
        total += x * y
    return total


def _quartile(values: Iterable[float]) -> float:
    """Returns a low value: a machine that does other work too makes a step longer, never shorter."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


def _median(values: Iterable[float]) -> float:
    """Returns the middle value, the lower of two: what may be wrong of a time is that it is too long."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
