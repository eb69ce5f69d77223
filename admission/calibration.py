"""Turns estimates of first and last tokens into bounds that hold as often as they say.

Each estimate of a waiting sequence is compared with what is measured once the token comes; the errors of the past, by
class, are what the next bounds are made of (conformal prediction).
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from math import ceil
from typing import NamedTuple

from admission.estimate import Estimate
from backend.scheduler.sequence import Sequence

WINDOW = 300  # residuals remembered
ENOUGH = 20  # residuals before they are believed
COLD_MARGIN = 0.25  # of the estimate: the margin before that
ADAPTATION_RATE = 0.01


class ConformalBound:
    """Upper bounds that hold with probability `confidence`, learned from estimates and what was measured then."""

    def __init__(self, confidence: float, rate: float = ADAPTATION_RATE, relative_from: float | None = None) -> None:
        """`rate`: by how much of a miss the miss rate adapts; small where residuals come in long after their bounds.
        `relative_from`: the shortest estimate of which residuals are multiples; None: they are differences.
        """
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
        self._target = self._miss_rate = 1 - confidence
        self._rate = rate
        self._relative_from = relative_from
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._margin: float | None = None  # the residual that bounds allow for; None: to be found

    def bound(self, estimate: float) -> float:
        """Returns the bound, which is at least 0 and monotone in the estimate."""
        if self._margin is None:
            count = len(self._sorted)
            if count < ENOUGH:
                return estimate * (1 + COLD_MARGIN)
            rank = min(count, ceil((count + 1) * (1 - self._miss_rate)))
            self._margin = self._sorted[max(rank, 1) - 1]
        bound = estimate + self._unit(estimate) * self._margin
        return bound if bound > 0 else 0.0

    def beyond(self, estimate: float, least: float) -> float:
        """Returns a value in place of a measurement of which only the least is known: the median of those with a larger
        residual (Efron's redistribution to the right, 1967, in one piece).
        """
        unit = self._unit(estimate)
        first = bisect_right(self._sorted, (least - estimate) / unit)
        larger = len(self._sorted) - first
        return estimate + unit * self._sorted[first + larger // 2] if larger else least

    def observe(self, estimate: float, measured: float, missed: bool) -> None:
        """Learns from one measurement; `missed` says that it was above the bound that was given."""
        residual = (measured - estimate) / self._unit(estimate)
        if len(self._recent) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(residual)
        insort(self._sorted, residual)
        moved = self._miss_rate + self._rate * (self._target - missed)
        self._miss_rate = min(max(moved, self._target / 10), 1 - (1 - self._target) / 10)
        self._margin = None

    def _unit(self, estimate: float) -> float:
        return 1.0 if self._relative_from is None else max(estimate, self._relative_from)


CONFIDENCE = 0.9  # of the bounds that are reported to clients
DONE_CONFIDENCE = 0.5  # that one admitted is done by its deadline: an answer that is cut short was computed in vain
LAST_RATE = 0.003  # of adaptation; a third of what first tokens have
FIRST_RELATIVE_FROM, LAST_RELATIVE_FROM = 0.5, 1e-3  # seconds; no error is taken relative to a shorter estimate


class LatencyBounds(NamedTuple):
    """Bounds on when a token comes, in seconds from the arrival.

    `reported` goes to the client; `likely`, which holds less often, is what its admission was decided by.
    """

    estimate: float
    reported: float
    likely: float


AT_ONCE = LatencyBounds(0.0, 0.0, 0.0)


class CalibratedEstimate(NamedTuple):
    """A sequence's estimate with bounds from past errors of its class. Times are in seconds."""

    arrival: float  # on the engine's clock
    prefill: float  # the part of the estimate that its own prompt takes
    first_token: LatencyBounds
    last_token: LatencyBounds


class TokenCalibration:
    """Learns the bounds of first tokens, or of last tokens, of one class.

    Errors grow with what is estimated. Only a first token's deadline is held against errors in seconds: in proportion
    they would be held against long prompts, whose estimates are long. Last tokens come in late, so that what adapts to
    them has to be slow.
    """

    def __init__(self, reported: ConformalBound, likely: ConformalBound) -> None:
        self._reported, self._likely = reported, likely
        self.kept = 0
        self.broken = 0

    @classmethod
    def of_first_tokens(cls, confidence: float) -> "TokenCalibration":
        return cls(ConformalBound(CONFIDENCE, relative_from=FIRST_RELATIVE_FROM), ConformalBound(confidence))

    @classmethod
    def of_last_tokens(cls) -> "TokenCalibration":
        reported, likely = (ConformalBound(c, LAST_RATE, LAST_RELATIVE_FROM) for c in (CONFIDENCE, DONE_CONFIDENCE))
        return cls(reported, likely)

    def bounds(self, estimate: float, least: LatencyBounds = AT_ONCE) -> LatencyBounds:
        """Returns the bounds for an estimate; `least` are those of a token that comes before, or with it."""
        likely = max(self._likely.bound(estimate), least.likely)
        return LatencyBounds(estimate, max(self._reported.bound(estimate), likely, least.reported), likely)

    def came(self, given: LatencyBounds, seconds: float) -> None:
        """Learns that the token came after so many seconds."""
        late = seconds > given.reported
        self.broken += late
        self.kept += not late
        self._learn(given, seconds)

    def would_have_come(self, given: LatencyBounds, seconds: float) -> None:
        """Learns that the token would have come after so many seconds at the least, later than any bound."""
        self.broken += 1
        self._learn(given, seconds, is_miss=True)

    def gave_up(self, given: LatencyBounds, seconds: float) -> None:
        """Learns that nobody waited any more after so many seconds; whether the bound would have held may be open."""
        self.broken += seconds > given.reported
        self._learn(given, self._reported.beyond(given.estimate, seconds))

    def _learn(self, given: LatencyBounds, seconds: float, *, is_miss: bool = False) -> None:
        self._reported.observe(given.estimate, seconds, is_miss or seconds > given.reported)
        self._likely.observe(given.estimate, seconds, is_miss or seconds > given.likely)


class EstimateCalibration:
    """Calibrates the estimates of first and of last tokens, each class by its own. Sequences not tracked are ignored.

    A sequence that expires before its first token counts as a miss of that bound: the token would have come later
    still, by the time of its own prefill.
    """

    def __init__(self, decisive: float) -> None:
        """`decisive` is the confidence with which a first token is held against its deadline."""
        self._first = defaultdict[int, TokenCalibration](lambda: TokenCalibration.of_first_tokens(decisive))
        self._last = defaultdict[int, TokenCalibration](TokenCalibration.of_last_tokens)
        self._open: dict[Sequence, CalibratedEstimate] = {}

    def calibrate(self, priority_class: int, estimate: Estimate, now: float) -> CalibratedEstimate:
        """Returns the estimate with the bounds that its class has at present."""
        first = self._first[priority_class].bounds(estimate.first_token)
        last = self._last[priority_class].bounds(estimate.last_token, first)
        return CalibratedEstimate(now, estimate.prefill, first, last)

    def track(self, sequence: Sequence, calibrated: CalibratedEstimate) -> None:
        """Hold the sequence's tokens against these bounds when they come."""
        self._open[sequence] = calibrated

    def first_token(self, sequence: Sequence, now: float) -> None:
        if (calibrated := self._open.get(sequence)) is not None:
            self._first[sequence.priority_class].came(calibrated.first_token, now - calibrated.arrival)

    def last_token(self, sequence: Sequence, now: float) -> None:
        if (calibrated := self._open.pop(sequence, None)) is not None:
            self._last[sequence.priority_class].came(calibrated.last_token, now - calibrated.arrival)

    def expired(self, sequence: Sequence, now: float) -> None:
        if (calibrated := self._open.pop(sequence, None)) is None:
            return
        waited = now - calibrated.arrival
        if not sequence.output:
            least = max(waited, calibrated.first_token.reported) + calibrated.prefill
            self._first[sequence.priority_class].would_have_come(calibrated.first_token, least)
        self._last[sequence.priority_class].gave_up(calibrated.last_token, waited)

    def forget(self, sequence: Sequence) -> None:
        """Stop tracking a sequence that was cancelled: when its tokens would have come stays unknown."""
        self._open.pop(sequence, None)

    @property
    def coverage(self) -> float:
        """The share of the bounds on first tokens that held."""
        return _coverage(self._first)

    @property
    def completion_coverage(self) -> float:
        """The share of the bounds on last tokens that held, of those of which it is known."""
        return _coverage(self._last)


def _coverage(calibrations: dict[int, TokenCalibration]) -> float:
    kept = sum(each.kept for each in calibrations.values())
    broken = sum(each.broken for each in calibrations.values())
    return kept / max(1, kept + broken)
