"""The step-time model predicts the seconds of a step, learned from measured steps. The ledger reports them.

    t = a·R + b·P + c·D + d·C + e·X + f·A + g·max(0, P + D - knee)          seconds

R the share of all weights that the step reads (1, unless the model has experts), P prefill tokens, D decode tokens, C
the decodes' context (sum over sequences), X the contexts of the prefilling sequences, A prefill tokens times the
context each sees. The form is that of Sarathi-Serve's profiles (Agrawal et al., 2024), with a hinge where a device
turns from memory-bound to compute-bound. All coefficients are >= 0 and the hinge is continuous, so more work never
predicts less time.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import isfinite, sqrt
from operator import add
from typing import Any

from admission.step_times.least_squares import NUM_COEFFICIENTS, Evidence, non_negative_least_squares
from admission.step_times.step_calibration import (
    Amounts,
    CalibratedFit,
    StepCalibration,
    scaled_features,
    typical_features,
)
from backend.config import EngineConfig

FAR_OFF_FACTOR = 2.0  # a prediction off by more than this factor, as the first are, says little about a weight
ERRORS_REMEMBERED = 64  # relative errors of the newest steps
PRIOR_RELATIVE_ERROR = 0.2  # before any step is measured
DRIFT_RELATIVE_ERROR = 0.15  # the common error of recent steps from which the machine counts as changed
UNSEEN_RELATIVE_ERROR = 0.02  # the common error of the newest steps from which they are fitted before the next refit
CHANCE_MEDIANS = 5.0  # medians of the errors' spread, over the root of their number: a common error within is chance
PRIOR_ERROR_STEPS = 16  # for which the expected error counts among the measured ones
MAX_SLOWDOWN_FACTOR = 100.0  # of a measured step against its prediction, in one look
STEPS_PER_UPDATE = 8  # learning from them together takes two thirds of the time of one by one
MIN_STALL_ERROR, MAX_ERROR_MEDIANS = 0.1, 4.0  # a relative error, and medians of them: a larger error is cut


def plain_sum(values: Iterable[float]) -> float:
    """Returns the sum, added up from the first value to the last and rounded each time.

    From Python 3.12 on `sum` compensates for the rounding: another version would not reproduce a recorded decision.
    """
    return reduce(add, values, 0.0)


@dataclass(slots=True)  # one is made for each step and each chunk; frozen, making it takes three times as long
class StepWork:
    """The work of a step, as counts of tokens. Treat it as immutable."""

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


def prefill_pairs(start: int, length: int) -> int:
    """Returns the number of pairs of a token of the chunk and a token that it attends to, itself included."""
    return length * start + length * (length + 1) // 2


Coefficients = tuple[float, float, float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One set of coefficients, in seconds a unit; all are >= 0. Raises `ValueError`."""

    coefficients: Coefficients
    knee: int = 512  # tokens in the step
    expert_reads: tuple[float, float] = (0.0, 0.0)  # as `Footprint.expert_reads`

    def __post_init__(self) -> None:
        if not all(0 <= share <= 1 for share in self.expert_reads):
            raise ValueError(f"shares of the weights are from 0 to 1, got {self.expert_reads}")
        if len(self.coefficients) != NUM_COEFFICIENTS or not all(isfinite(c) and c >= 0 for c in self.coefficients):
            raise ValueError(f"{NUM_COEFFICIENTS} finite coefficients >= 0 are needed, got {self.coefficients}")
        if self.knee < 1:
            raise ValueError(f"the knee must be at least 1 token, got {self.knee}")

    def __reduce__(self) -> tuple[type["StepTime"], tuple[Coefficients, int, tuple[float, float]]]:
        """Pickle by the constructor: other ways of setting fields fail for a compiled class."""
        return StepTime, (self.coefficients, self.knee, self.expert_reads)

    def read_share(self, tokens: int) -> float:
        """Returns the share of all weights that a step of `tokens` reads: an expert that none of them uses is not."""
        in_experts, unused = self.expert_reads
        return 1.0 - in_experts * unused**tokens if in_experts else 1.0

    def seconds(self, work: StepWork) -> float:
        """Returns the seconds of the whole step."""
        fixed, prefill, decode, decode_context, prefill_context, pairs, beyond = self.coefficients
        tokens = work.prefill_tokens + work.decode_tokens
        above_knee = tokens - self.knee
        return fixed * self.read_share(tokens) + (
            prefill * work.prefill_tokens
            + decode * work.decode_tokens
            + decode_context * work.decode_context
            + prefill_context * work.prefill_context
            + pairs * work.prefill_pairs
            + (beyond * above_knee if above_knee > 0 else 0.0)
        )

    def of_prefill(self, start: int, length: int) -> float:
        """Returns the seconds that a step takes longer for a chunk of `length` tokens behind `start` computed ones."""
        _, prefill, _, _, prefill_context, pairs, beyond = self.coefficients
        above_knee = length - self.knee
        return (
            prefill * length
            + prefill_context * start
            + pairs * prefill_pairs(start, length)
            + (beyond * above_knee if above_knee > 0 else 0.0)
        )


class _ErrorSizes:
    """Magnitudes of recent relative errors, as a running mean robust to stalls: an error beyond several times the
    median of the last `ERRORS_REMEMBERED` counts as that bound (winsorised), and is forgotten as fast as it came.
    """

    def __init__(self) -> None:
        self.mean = PRIOR_RELATIVE_ERROR
        self._recent = deque([PRIOR_RELATIVE_ERROR] * PRIOR_ERROR_STEPS, maxlen=ERRORS_REMEMBERED)
        self._to_replace = PRIOR_ERROR_STEPS  # expected errors still among the remembered ones

    def add(self, size: float) -> None:
        if self._to_replace:
            self._to_replace -= 1
            self._recent.popleft()
        self._recent.append(size)
        if size > MIN_STALL_ERROR:
            size = min(size, max(MIN_STALL_ERROR, MAX_ERROR_MEDIANS * _median(self._recent)))
        self.mean += 0.02 * (size - self.mean)


class StepTimeModel:
    """Fits a `StepTime` to measured steps as they come: weighted least squares with forgetting, kept non-negative.

    A step weighs 1 / predicted², so that errors are relative (1 / measured² would favour the fast of two equal steps,
    and predict 8 % too little where they vary by 20 %), and outliers weigh less (Huber, 1964), so that a stalled step
    does not bend the fit. The prior counts as `prior_weight` steps and fades with the rest. Arithmetic is plain floats
    in a fixed order, so that a replay on another machine fits the same numbers.

    A shared machine gets faster and slower as a whole. Where a fit to all steps leaves most recent steps off in the
    same direction by more than `DRIFT_RELATIVE_ERROR`, the earlier evidence is scaled to their speed: its proportions
    stay, and the recent steps do not have to outweigh thousands.
    """

    def __init__(
        self,
        prior: StepTime,
        prior_weight: float = 8.0,
        memory: int = 2000,
        observed: Callable[[StepWork, float], object] | None = None,
    ) -> None:
        """`memory` is the number of steps after which a step's weight has fallen to 1/e. `observed` is called first
        with every step's work and seconds.
        """
        self.fitted = prior
        self.prior_weight = prior_weight
        self.num_steps = 0
        self._observed = observed
        self._keep = 1 - 1 / memory
        self._scale = typical_features(prior.knee)
        self._evidence, self._newer = Evidence(), Evidence()  # before and since the last fit
        self._steps: list[tuple[StepWork, float]] = []  # since the last fit
        self._weights: list[float] = []  # of the first steps, weighed on demand
        self._sizes = _ErrorSizes()
        self._calibration = StepCalibration(prior.coefficients, prior.read_share)
        self._calibrated: CalibratedFit | None = None
        self.is_calibrated = False  # True once calibration steps have told the coefficients apart
        self._evidence.add_guess(prior.coefficients, self._scale, 1e-2 * prior_weight)

    @property
    def relative_error(self) -> float:
        """The mean of |measured - predicted| / predicted of recent steps, each predicted before it was measured; stalls
        are cut.
        """
        self._weigh()
        return self._sizes.mean

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from one step that took `seconds` > 0."""
        if self._observed is not None:
            self._observed(work, seconds)
        if not (isfinite(seconds) and seconds > 0):
            return
        self._steps.append((work, seconds))
        self.num_steps += 1
        if self.num_steps % STEPS_PER_UPDATE == 0:
            newest = self._steps[-STEPS_PER_UPDATE:]
            self._learn(newest)
            if self.num_steps % (STEPS_PER_UPDATE if self.num_steps < 512 else 64) == 0:
                self._refit()
            elif UNSEEN_RELATIVE_ERROR < abs(_common(self._errors(self.fitted, newest))) <= DRIFT_RELATIVE_ERROR:
                self.fitted, _ = self._fit(1.0)  # the first chunks of a context that none had may all be late

    def calibrate(self, steps: Iterable[tuple[StepWork, float]]) -> None:
        """Learn from calibration steps and their times in seconds.

        Their evidence does not fade: live steps decide the coefficients that they can tell apart, and calibration the
        rest.
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
        self._calibrated, self.is_calibrated = calibration.fit(knee), True
        self.fitted = self._solved(self._calibrated.and_live(self._evidence), knee)

    def to_json(self) -> dict[str, Any]:
        """Return the state from which a later start continues."""
        return {"coefficients": list(self.fitted.coefficients), "knee": self.fitted.knee, "steps": self.num_steps}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], expert_reads: tuple[float, float] = (0.0, 0.0)) -> "StepTimeModel":
        """Return a model from `to_json`'s state. Raises `ValueError`, `KeyError` or `TypeError` for anything else."""
        coefficients = tuple(float(value) for value in saved["coefficients"])
        prior = StepTime(coefficients, int(saved["knee"]), expert_reads)  # type: ignore[arg-type]  # it checks the length
        steps = float(saved["steps"])
        if not steps >= 0:
            raise ValueError(f"steps must be at least 0, got {steps}")
        return cls(prior, prior_weight=min(steps, 200.0) + 8.0)

    def _weigh(self) -> None:
        """Compute the errors and weights of the newest steps, deferred until needed."""
        sizes, predict = self._sizes, self.fitted.seconds
        for work, seconds in self._steps[len(self._weights) :]:
            predicted = expected = predict(work)
            if not seconds / FAR_OFF_FACTOR <= predicted <= seconds * FAR_OFF_FACTOR:
                expected = min(max(predicted, seconds / FAR_OFF_FACTOR), seconds * FAR_OFF_FACTOR)
            error = abs(seconds - predicted) / expected
            sizes.add(error)
            tolerance = 3 * max(sizes.mean, 0.01)
            weight = tolerance / error if error > tolerance else 1.0
            self._weights.append(weight / expected**2)

    def _learn(self, steps: list[tuple[StepWork, float]]) -> None:
        """Add the newest steps to the evidence."""
        self._weigh()
        knee, read_share = self.fitted.knee, self.fitted.read_share
        reads = [read_share(work.prefill_tokens + work.decode_tokens) for work, _ in steps]
        rows = [scaled_features(work.amounts, knee, read) for (work, _), read in zip(steps, reads, strict=True)]
        columns = [[row[place] for row in rows] for place in range(NUM_COEFFICIENTS)]
        self._newer.add(columns, [seconds for _, seconds in steps], self._weights[-len(steps) :], self._keep)

    def _refit(self) -> None:
        """Fit all steps; where that cannot explain the newest, scale the older ones to their speed."""
        fitted, evidence = self._fit(1.0)
        if abs(_common(self._errors(fitted, self._steps))) > DRIFT_RELATIVE_ERROR:
            factor = max(1 + _median(self._errors(self.fitted, self._steps)), 1 / MAX_SLOWDOWN_FACTOR)
            fitted, evidence = self._fit(factor)
            self._sizes.mean = min(self._sizes.mean, PRIOR_RELATIVE_ERROR)  # capped, not reset: it may drift again
        self.fitted, self._evidence = fitted, evidence
        self._newer, self._steps, self._weights = Evidence(), [], []

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
        return StepTime((a, b, c, d, e, f, g), knee, self.fitted.expert_reads)

    def _errors(self, fitted: StepTime, steps: list[tuple[StepWork, float]]) -> list[float]:
        """Return the errors of these steps relative to their predictions; above 0 where a step took longer."""
        errors = []
        for work, seconds in steps:
            predicted, least = fitted.seconds(work), seconds / MAX_SLOWDOWN_FACTOR
            errors.append((seconds - predicted) / (predicted if predicted > least else least))  # noqa: FURB136 - as often
        return errors


def _common(errors: list[float]) -> float:
    """Return the median of the errors, if it is larger than chance explains, else 0."""
    common = _median(errors)
    spread = _median([abs(error - common) for error in errors])
    return common if abs(common) > CHANCE_MEDIANS * spread / sqrt(len(errors)) else 0.0


def _median(values: Collection[float]) -> float:
    return sorted(values)[len(values) // 2]


_MEAN_STEP_WEIGHT = 1 / 64  # of each step in the running mean of predicted seconds


class Pipeline:
    """The steps in flight, which run one after another; the oldest since the end of its predecessor, or since it was
    planned.

    `typical` is the running mean of predicted step seconds; 0 before the first.
    """

    def __init__(self) -> None:
        self._predicted: deque[float] = deque()
        self._started = 0.0
        self.typical = 0.0
        self.stalled = 0.0  # total seconds by which steps exceeded `FAR_OFF_FACTOR` times their predictions

    def planned(self, seconds: float, now: float) -> None:
        """Add a step predicted to take `seconds`."""
        if not self._predicted:
            self._started = now
        self._predicted.append(seconds)
        self.typical += (_MEAN_STEP_WEIGHT if self.typical else 1.0) * (seconds - self.typical)

    def completed(self, now: float) -> None:
        predicted = self._predicted.popleft()
        self.stalled += max(0.0, now - self._started - FAR_OFF_FACTOR * predicted)
        self._started = now

    def lost(self) -> None:
        """Forget all steps in flight, none of which took place."""
        self._predicted.clear()

    def remaining(self, now: float) -> float:
        """Return the predicted seconds until the newest step is done."""
        return max(0.0, plain_sum(self._predicted) - (now - self._started)) if self._predicted else 0.0


class CopyTime:
    """The seconds that copies of KV blocks add to a step.

    Copies that run ahead begin when their step is planned, behind the copies of earlier steps, and the step waits
    for their rest when the earlier steps are done. Copies that do not run ahead are part of the step.
    """

    def __init__(self, config: EngineConfig, pipeline: Pipeline) -> None:
        self._each = config.block_copy_seconds
        self._runs_ahead = config.copies_run_ahead
        self._pipeline = pipeline
        self._now = self._done_at = 0.0  # the time of this plan, and the end of earlier plans' copies
        self._ahead = 0.0  # seconds of this plan's copies that overlap with steps in flight

    def set_time(self, now: float) -> None:
        if self._runs_ahead:
            self._now = now
            self._ahead = self._pipeline.remaining(now) - max(0.0, self._done_at - now)

    def seconds(self, copies: float) -> float:
        """Return the seconds that `copies` copies add to the step being planned."""
        return max(0.0, copies * self._each - self._ahead) if copies else 0.0

    def planned(self, copies: int) -> float:
        """Account for the copies of the planned step; returns the seconds that they add."""
        added = self.seconds(copies)
        if copies and self._runs_ahead:
            self._done_at = max(self._now, self._done_at) + copies * self._each
        return added

    def lost(self) -> None:
        """Forget the copies of all steps in flight."""
        self._done_at = 0.0
