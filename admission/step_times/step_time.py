"""Predicts how long a step takes, learned from the steps that were measured.

    t = a + b·P + c·D + d·C + e·X + f·A + g·max(0, P + D - knee)            seconds

P prefill tokens, D decode tokens, C the decodes' context (sum over sequences), X the contexts of the prefilling
sequences, A prefill tokens times the context each sees. The form is that of Sarathi-Serve's profiles (Agrawal et
al., 2024), with a hinge where a device turns from memory-bound to compute-bound. All coefficients are >= 0 and the
hinge is continuous, so more work never predicts less time.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import isfinite, sqrt
from operator import add
from typing import Any

from admission.step_times.least_squares import NUM_COEFFICIENTS, Evidence, non_negative_least_squares
from admission.step_times.step_calibration import Amounts, CalibratedFit, StepCalibration, typical_features

FAR_OFF = 2.0  # a prediction further off than this factor, as the first are, says little about a step's weight
RECENT = 64  # steps whose errors are remembered
UNMEASURED = 0.2  # the relative error that is expected before any step was measured
DRIFT = 0.15  # the relative error that most recent steps have in common, from which the machine counts as changed
CHANCE = 5.0  # medians of the errors' spread, over the root of their number: what they may have in common by chance
ENOUGH = 16  # steps, until what was expected of errors gives way to what was measured
FURTHEST = 100.0  # times as long as predicted, that a step may have taken in one look
TOGETHER = 16  # steps that are learned from together, which takes half of what it takes one by one
STALL, BEYOND = 0.1, 4.0  # a relative error, and medians of them, that a larger one counts as at most


def plain_sum(values: Iterable[float]) -> float:
    """Returns the sum, added up from the first value to the last and rounded each time.

    From Python 3.12 on `sum` compensates for the rounding: what one version recorded another would not decide again.
    """
    return reduce(add, values, 0.0)


@dataclass(slots=True)  # one is made for each step and each chunk; frozen, making it takes three times as long
class StepWork:
    """The work of a step, as counts of tokens. Nobody changes one."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_context: int = 0  # sum over the decodes of the tokens each attends to
    prefill_context: int = 0  # sum over the prefilling sequences of the tokens computed before this step
    prefill_pairs: int = 0  # sum over the prefill tokens of the tokens each attends to

    def __add__(self, other: "StepWork") -> "StepWork":
        return StepWork(
            self.prefill_tokens + other.prefill_tokens,
            self.decode_tokens + other.decode_tokens,
            self.decode_context + other.decode_context,
            self.prefill_context + other.prefill_context,
            self.prefill_pairs + other.prefill_pairs,
        )

    @property
    def amounts(self) -> Amounts:
        """The counts, in the order of the fields."""
        decodes = self.decode_tokens, self.decode_context
        return self.prefill_tokens, *decodes, self.prefill_context, self.prefill_pairs

    def with_prefill(self, start: int, length: int) -> "StepWork":
        """Returns this and the work of a chunk of `length` tokens behind `start` computed ones."""
        return StepWork(
            self.prefill_tokens + length,
            self.decode_tokens,
            self.decode_context,
            self.prefill_context + start,
            self.prefill_pairs + prefill_pairs(start, length),
        )


def prefill_work(start: int, length: int) -> StepWork:
    """Returns the work of a chunk of `length` tokens behind `start` computed ones."""
    return StepWork(prefill_tokens=length, prefill_context=start, prefill_pairs=prefill_pairs(start, length))


def prefill_pairs(start: int, length: int) -> int:
    """Returns the number of pairs of a token of the chunk and one that it attends to, itself included."""
    return length * start + length * (length + 1) // 2


Coefficients = tuple[float, float, float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One set of coefficients, in seconds a unit; all are >= 0. Raises `ValueError`."""

    coefficients: Coefficients
    knee: int = 512  # tokens in the step

    def __post_init__(self) -> None:
        if len(self.coefficients) != NUM_COEFFICIENTS or not all(isfinite(c) and c >= 0 for c in self.coefficients):
            raise ValueError(f"{NUM_COEFFICIENTS} finite coefficients >= 0 are needed, got {self.coefficients}")
        if self.knee < 1:
            raise ValueError(f"the knee must be at least 1 token, got {self.knee}")

    def __reduce__(self) -> tuple[type["StepTime"], tuple[Coefficients, int]]:
        """Pickle it as it is made, because whatever else sets fields cannot set those of one that is compiled."""
        return StepTime, (self.coefficients, self.knee)

    def seconds(self, work: StepWork) -> float:
        """Returns the seconds of the whole step."""
        return self.coefficients[0] + self.marginal(work)

    def of_prefill(self, start: int, length: int) -> float:
        """Returns the `marginal` seconds of a chunk of `length` tokens behind `start` computed ones."""
        _, prefill, _, _, prefill_context, pairs, beyond = self.coefficients
        above_knee = length - self.knee
        return (
            prefill * length
            + prefill_context * start
            + pairs * prefill_pairs(start, length)
            + (beyond * above_knee if above_knee > 0 else 0.0)
        )

    def marginal(self, work: StepWork) -> float:
        """Returns the seconds of the step without its fixed part."""
        _, prefill, decode, decode_context, prefill_context, pairs, beyond = self.coefficients
        above_knee = work.prefill_tokens + work.decode_tokens - self.knee
        if above_knee <= 0 and not (work.prefill_tokens or work.prefill_context):  # most steps: the other terms are 0
            return decode * work.decode_tokens + decode_context * work.decode_context
        return (
            prefill * work.prefill_tokens
            + decode * work.decode_tokens
            + decode_context * work.decode_context
            + prefill_context * work.prefill_context
            + pairs * work.prefill_pairs
            + (beyond * above_knee if above_knee > 0 else 0.0)
        )


class _ErrorSizes:
    """Magnitudes of the relative errors of recent steps, by a running mean that no stall moves by much: what is beyond
    several times the median of the last `RECENT` counts as that (winsorised), and is forgotten as fast as it came.
    """

    def __init__(self, expected: float) -> None:
        self.mean = expected
        self._recent = deque([expected] * ENOUGH, maxlen=RECENT)
        self._to_replace = ENOUGH  # of what is remembered, what was expected and not measured

    def add(self, size: float) -> None:
        if self._to_replace:
            self._to_replace -= 1
            self._recent.popleft()
        self._recent.append(size)
        if size > STALL:
            size = min(size, max(STALL, BEYOND * _median(self._recent)))
        self.mean += 0.02 * (size - self.mean)


class StepTimeModel:
    """Fits a `StepTime` to measured steps as they come: weighted least squares with forgetting, kept non-negative.

    A step weighs 1 / predicted², so that errors are relative (1 / measured² would favour the fast of two equal steps,
    and predict 8 % too little where they vary by 20 %), and less the further it is off (Huber, 1964), so that a stalled
    step does not bend the fit. The prior counts as `prior_weight` steps and fades with the rest. Arithmetic is plain
    floats in a fixed order, so that a replay on another machine fits the same numbers.

    A machine that is shared gets faster and slower as a whole. Where a fit to all leaves most recent steps off in the
    same direction by more than `DRIFT`, what was learned before them is taken at their speed: its proportions stay, and
    they do not have to outweigh thousands of steps.
    """

    def __init__(self, prior: StepTime, prior_weight: float = 8.0, memory: int = 2000) -> None:
        """`memory` is the number of steps after which a step's weight has fallen to 1/e."""
        self.fitted = prior
        self.prior_weight = prior_weight
        self.num_steps = 0
        self.observed: Callable[[StepWork, float], object] | None = None  # told of every step first
        self._keep = 1 - 1 / memory
        self._scale = typical_features(prior.knee)
        self._evidence, self._newer = Evidence(), Evidence()  # before and since the last fit
        self._steps: list[tuple[StepWork, float]] = []  # since the last fit
        self._weights: list[float] = []  # of the first of them, as far as they were asked for
        self._had_prefill = self._was_beyond = False  # whether any of them had prefill, or tokens beyond the knee
        self._sizes = _ErrorSizes(UNMEASURED)
        self._calibration = StepCalibration(prior.coefficients)
        self._calibrated: CalibratedFit | None = None
        self._take_prior(prior, prior_weight)

    @property
    def is_calibrated(self) -> bool:
        """True once steps of chosen shapes have told the coefficients apart."""
        return self._calibrated is not None

    @property
    def relative_error(self) -> float:
        """The mean of |measured - predicted| / predicted of recent steps, each predicted before it was measured; stalls
        are cut.
        """
        self._weigh()
        return self._sizes.mean

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from one step that took `seconds` > 0."""
        if self.observed is not None:
            self.observed(work, seconds)
        if not (isfinite(seconds) and seconds > 0):
            return
        self._steps.append((work, seconds))
        self.num_steps += 1
        if self.num_steps % TOGETHER == 0:
            self._learn(self._steps[-TOGETHER:])
            if self.num_steps % (TOGETHER if self.num_steps < 512 else 64) == 0:
                self._refit()

    def calibrate(self, steps: Iterable[tuple[StepWork, float]]) -> None:
        """Learn from steps whose shapes were chosen to tell the coefficients apart, and what they took in seconds.

        What they say does not fade: live steps decide what they can tell, and these the rest.
        """
        self._weigh()
        calibration = self._calibration
        for work, seconds in steps:
            calibration.add(work.amounts, seconds)
        if not len(calibration):
            return
        knee = self.fitted.knee
        if self._calibrated is None and not self.num_steps:
            self._evidence, knee = Evidence(), calibration.knee(knee)
            self._scale = typical_features(knee)
        self._calibrated = calibration.fit(knee)
        self.fitted = self._solved(self._calibrated.and_live(self._evidence), knee)

    def to_json(self) -> dict[str, Any]:
        """Returns the state that a later start needs to begin where this one ended."""
        return {"coefficients": list(self.fitted.coefficients), "knee": self.fitted.knee, "steps": self.num_steps}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "StepTimeModel":
        """Returns a model from what `to_json` gave. Raises `ValueError`, `KeyError` or `TypeError` for anything
        else.
        """
        coefficients = tuple(float(value) for value in saved["coefficients"])
        prior = StepTime(coefficients, int(saved["knee"]))  # type: ignore[arg-type]  # StepTime checks the length
        steps = float(saved["steps"])
        if not steps >= 0:
            raise ValueError(f"steps must be at least 0, got {steps}")
        return cls(prior, prior_weight=min(steps, 200.0) + 8.0)

    def _weigh(self) -> None:
        """Work out the errors and the weights of the newest steps, which has time until somebody asks."""
        sizes, predict = self._sizes, self.fitted.seconds
        for work, seconds in self._steps[len(self._weights) :]:
            predicted = expected = predict(work)
            if not seconds / FAR_OFF <= predicted <= seconds * FAR_OFF:
                expected = min(max(predicted, seconds / FAR_OFF), seconds * FAR_OFF)
            error = abs(seconds - predicted) / expected
            sizes.add(error)
            tolerance = 3 * max(sizes.mean, 0.01)
            weight = tolerance / error if error > tolerance else 1.0
            self._weights.append(weight / expected**2)

    def _learn(self, steps: list[tuple[StepWork, float]]) -> None:
        """Add the newest steps to the evidence, by the features that any step had since the last fit. Most steps only
        decode, and have three of the seven: the sums of the others are 0.
        """
        self._weigh()
        works, knee = [work for work, _ in steps], self.fitted.knee
        tokens = [work.prefill_tokens + work.decode_tokens for work in works]
        self._had_prefill = self._had_prefill or any(work.prefill_tokens for work in works)
        self._was_beyond = self._was_beyond or max(tokens) > knee
        amounts: dict[int, list[float]] = {
            0: [1.0] * len(works),
            2: [work.decode_tokens for work in works],
            3: [work.decode_context for work in works],
        }
        if self._had_prefill:
            amounts[1] = [work.prefill_tokens for work in works]
            amounts[4] = [work.prefill_context for work in works]
            amounts[5] = [work.prefill_pairs for work in works]
        if self._was_beyond:
            amounts[6] = [max(0, count - knee) for count in tokens]
        features = {place: [amount / self._scale[place] for amount in each] for place, each in amounts.items()}
        self._newer.add(features, [seconds for _, seconds in steps], self._weights[-len(steps) :], self._keep)

    def _take_prior(self, prior: StepTime, weight: float) -> None:
        """Take each coefficient of the prior as if `weight` typical steps had shown it."""
        for index, (coefficient, scale) in enumerate(zip(prior.coefficients, self._scale, strict=True)):
            share = max(coefficient * scale, 1e-9)
            self._evidence.gram[index][index] += weight * 1e-2 / share**2
            self._evidence.moment[index] += weight * 1e-2 / share

    def _refit(self) -> None:
        """Fit all steps; where that cannot explain the newest, scale the older ones to their speed."""
        fitted, evidence = self._fit(1.0)
        if self._has_drifted(fitted):
            factor = max(1 + _median(self._errors(self.fitted)), 1 / FURTHEST)
            fitted, evidence = self._fit(factor)
            self._sizes = _ErrorSizes(_median([abs(error) for error in self._errors(fitted)]))
        self.fitted, self._evidence = fitted, evidence
        self._newer, self._steps, self._weights = Evidence(), [], []
        self._had_prefill = self._was_beyond = False

    def _fit(self, factor: float) -> tuple[StepTime, Evidence]:
        """Returns a fit in which each step before the last fit counts as `factor` times as long, and its evidence."""
        evidence = self._evidence.and_newer(self._newer, self._keep ** len(self._steps), factor)
        if self._calibrated is not None:
            solution = self._calibrated.and_live(evidence)
            return self._solved(solution, self.fitted.knee), evidence
        start = [factor * c * s for c, s in zip(self.fitted.coefficients, self._scale, strict=True)]
        solution = non_negative_least_squares(evidence.gram, evidence.moment, start)
        return self._solved(solution, self.fitted.knee), evidence

    def _solved(self, solution: Sequence[float], knee: int) -> StepTime:
        a, b, c, d, e, f, g = (value / scale for value, scale in zip(solution, self._scale, strict=True))
        return StepTime((a, b, c, d, e, f, g), knee)

    def _has_drifted(self, fitted: StepTime) -> bool:
        """Returns whether the newest steps are off in common by more than chance might explain."""
        errors = self._errors(fitted)
        common = _median(errors)
        spread = _median([abs(error - common) for error in errors])
        return abs(common) > max(DRIFT, CHANCE * spread / sqrt(len(errors)))

    def _errors(self, fitted: StepTime) -> list[float]:
        """Returns the errors of the newest steps relative to their predictions; above 0 where a step took longer."""
        errors = []
        for work, seconds in self._steps:
            predicted, least = fitted.seconds(work), seconds / FURTHEST
            errors.append((seconds - predicted) / (predicted if predicted > least else least))  # noqa: FURB136 - as often
        return errors


def _median(values: Collection[float]) -> float:
    return sorted(values)[len(values) // 2]


_FORGET = 1 / 64  # share of the mean step that each replaces


class Pipeline:
    """The steps in flight, which run one after another; the oldest since the one before it ended or it was planned.

    `typical` is the running mean of what steps were predicted to take, in seconds; 0 before the first.
    """

    def __init__(self) -> None:
        self._predicted: deque[float] = deque()
        self._started = 0.0
        self.typical = 0.0
        self.stalled = 0.0  # seconds in all by which steps took longer than `FAR_OFF` times their predictions

    def planned(self, seconds: float, now: float) -> None:
        """Add a step that is predicted to take so many seconds."""
        if not self._predicted:
            self._started = now
        self._predicted.append(seconds)
        self.typical += (_FORGET if self.typical else 1.0) * (seconds - self.typical)

    def completed(self, now: float) -> None:
        predicted = self._predicted.popleft()
        self.stalled += max(0.0, now - self._started - FAR_OFF * predicted)
        self._started = now

    def lost(self) -> None:
        """Forget all steps in flight, none of which took place."""
        self._predicted.clear()

    def remaining(self, now: float) -> float:
        """Returns the predicted seconds until the newest is done."""
        return max(0.0, plain_sum(self._predicted) - (now - self._started)) if self._predicted else 0.0
