"""The calibration of estimates: bounds on first and last tokens that hold with a stated confidence.

Admission tracks each promise, the controller reports its tokens. Each estimate of a waiting sequence is compared with
the measured time of its token; the next bounds are made of past errors, grouped by class, tenant, prompt length and
deadline. A bound counts as missed when its time passes without the token, not when the token comes, so that a burst of
arrivals is not given bounds that no longer hold.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from math import frexp
from typing import NamedTuple

from admission.conformal import BoundLine, ConformalBound, Groups
from admission.forecast import Forecast
from admission.step_times.step_time import Pipeline
from backend.scheduler.sequence import Sequence

REPORTED_CONFIDENCE = 0.9  # of the bounds reported to clients
# that an admitted request is done by its deadline: an answer that is cut short was computed in vain
DONE_BY_CONFIDENCE = 0.5
# the adaptation rate of reported bounds: some 20 promises, as many as are open at a time, move the miss rate by its
# target
FIRST_TOKEN_ADAPTATION_RATE = 0.05
LAST_TOKEN_ADAPTATION_RATE = 0.003  # the adaptation rate of decisive bounds, low because last tokens are known late
LAST_TOKEN_RESIDUALS = 150  # the residuals of reported last-token bounds, which forget instead of adapting
FIRST_TOKEN_RELATIVE_FROM_S, LAST_TOKEN_RELATIVE_FROM_S = 0.1, 1e-3  # errors of shorter estimates are absolute
DECISIVE_RELATIVE_FROM_S = 0.5  # the same threshold for decisive bounds of first tokens


class LatencyBounds(NamedTuple):
    """Bounds on a token's time, in seconds from the arrival.

    `reported` goes to the client; `likely` decides its admission.
    """

    estimate: float
    reported: float
    likely: float

    @property
    def most(self) -> float:
        """The later bound, which a refusal quotes."""
        return max(self.reported, self.likely)


ZERO_BOUNDS = LatencyBounds(0.0, 0.0, 0.0)


Kind = tuple[int, bool, bool]
"""The class, whether a deadline presses, and if not whether the tenant is in debt: other requests wait for their
tenant's share, however far off that is, and for their errors requests with deadlines would be refused while nothing
waits.
"""


class CalibratedEstimate(NamedTuple):
    """A sequence's estimate with bounds from past errors of its class. Times are in seconds."""

    arrival: float  # on the engine's clock
    kind: Kind
    prefill: float  # the part of the estimate spent on its own prefill
    first_token: LatencyBounds
    last_token: LatencyBounds


class TokenCalibration:
    """Learns the bounds of first tokens, or of last tokens, of one class.

    Errors grow with the estimate. The decisive (`likely`) bound of a request holds while no later request is admitted
    ahead of it and no step stalls: an admission leaves earlier requests in time, and one stall says nothing of the next
    steps. It is the bound of the whole class, because grouping by length would hold errors against long prompts. The
    reported bound includes both effects. The reported bound of last tokens does not adapt to misses: they are known
    hundreds of promises too late, and adapting to them makes the bound oscillate.
    """

    def __init__(self, reported: ConformalBound, likely: ConformalBound) -> None:
        self._reported, self.likely = reported, likely
        self.kept = 0
        self.broken = 0

    @classmethod
    def of_first_tokens(cls, confidence: float) -> "TokenCalibration":
        reported = ConformalBound(
            REPORTED_CONFIDENCE, FIRST_TOKEN_RELATIVE_FROM_S, FIRST_TOKEN_ADAPTATION_RATE, extrapolates=True
        )
        return cls(reported, ConformalBound(confidence, DECISIVE_RELATIVE_FROM_S))

    @classmethod
    def of_last_tokens(cls) -> "TokenCalibration":
        reported = ConformalBound(
            REPORTED_CONFIDENCE, LAST_TOKEN_RELATIVE_FROM_S, rate=0.0, window=LAST_TOKEN_RESIDUALS
        )
        return cls(reported, ConformalBound(DONE_BY_CONFIDENCE, LAST_TOKEN_RELATIVE_FROM_S, LAST_TOKEN_ADAPTATION_RATE))

    def bounds(self, estimate: float, groups: Groups, least: LatencyBounds = ZERO_BOUNDS) -> LatencyBounds:
        """Return the bounds for an estimate; `least` holds the bounds of an earlier token."""
        likely = max(self.likely.line().at(estimate), least.likely)
        return LatencyBounds(estimate, max(self._reported.line(groups).at(estimate), least.reported), likely)

    def count(self, is_late: bool) -> None:
        """Count a reported bound: it held, or has passed without its token."""
        self.broken += is_late
        self.kept += not is_late
        self._reported.adapt(is_late)

    def came(self, given: LatencyBounds, groups: Groups, seconds: float, unforeseen: float = 0.0) -> None:
        """Record the residual of a token that came after `seconds`; `unforeseen` of them are added to the estimate of
        the decisive bound.
        """
        self._reported.observe(given.estimate, seconds, groups)
        self._decided(given.estimate + unforeseen, seconds)

    def never_came(self, given: LatencyBounds, groups: Groups, least: float, unforeseen: float) -> None:
        """Record the residuals of a token of an expired sequence, due after `least` seconds at the earliest."""
        self._reported.observe(given.estimate, self._reported.beyond(given.estimate, least), groups)
        if least > given.estimate + unforeseen:
            self._decided(given.estimate + unforeseen, least)

    def gave_up(self, given: LatencyBounds, groups: Groups, least: float) -> None:
        """Record a sequence given up after `least` seconds; whether its bound would have held may be unknown."""
        measured = self._reported.beyond(given.estimate, least)
        self._reported.observe(given.estimate, measured, groups)
        self.likely.observe(given.estimate, measured)
        self.likely.adapt(measured > given.likely)

    def _decided(self, estimate: float, seconds: float) -> None:
        """Record one residual of the decisive bound: predicted against measured seconds."""
        missed = seconds > self.likely.line().at(estimate)
        self.likely.observe(estimate, seconds)
        self.likely.adapt(missed)


@dataclass(slots=True)
class _Tracked:
    """The bounds a sequence was given, and which of its tokens are known."""

    given: CalibratedEstimate
    unforeseen: float  # seconds of sequences admitted ahead of it since; less the stalls at that time
    knows_length: bool
    has_first: bool = False  # its first token has come
    first_passed: bool = False  # the reported bound of its first token passed before the token came
    last_passed: bool = False


class EstimateCalibration:
    """Calibrates the estimates of first tokens, by kind, and those of last tokens, by class. Untracked sequences
    are ignored.

    A sequence that expires before its first token counts as a miss of that bound: the token would have come later
    still, by the time of its own prefill. O(log open) for each event; the groups kept are bounded.
    """

    def __init__(
        self,
        decisive: float,
        pipeline: Pipeline | None = None,
        owes: Callable[[Sequence], bool] = lambda sequence: False,
    ) -> None:
        """`decisive` is the confidence with which a first token must meet its deadline; `pipeline` counts the seconds
        that steps have stalled; `owes` tells if a sequence's tenant is in debt.
        """
        self._owes = owes
        self._pipeline = pipeline or Pipeline()
        self._first = defaultdict[Kind, TokenCalibration](lambda: TokenCalibration.of_first_tokens(decisive))
        self._last = defaultdict[int, TokenCalibration](TokenCalibration.of_last_tokens)
        self._open: dict[Sequence, _Tracked] = {}
        # heap of both bounds; entries of known tokens leave it lazily
        self._due: list[tuple[float, int, bool, Sequence]] = []
        self._numbers = count()
        self._tolerated = 64  # entries, before the entries of known tokens are cleared out

    def calibrate(self, sequence: Sequence, estimate: Forecast, now: float) -> CalibratedEstimate:
        """Return the estimate with the present bounds of its class."""
        self._pass(now)
        kind = self.kind(sequence)
        first = self._first[kind].bounds(estimate.first_token, _first_groups(sequence))
        last = self._last[sequence.request.priority_class].bounds(estimate.last_token, _last_groups(sequence), first)
        return CalibratedEstimate(now, kind, estimate.prefill, first, last)

    def track(self, sequence: Sequence, given: CalibratedEstimate, knows_length: bool = True) -> None:
        """Compare the sequence's tokens with these bounds when they come. Without `knows_length` its last token was
        estimated from its declared length, and its error says nothing of estimates made of measured answers.
        """
        self._open[sequence] = _Tracked(given, -self._pipeline.stalled, knows_length)
        for is_first, bounds in ((True, given.first_token), (False, given.last_token)):
            heappush(self._due, (given.arrival + bounds.reported, next(self._numbers), is_first, sequence))
        if len(self._due) > self._tolerated:
            self._due = [entry for entry in self._due if self._is_open(entry[3], entry[2])]
            heapify(self._due)
            self._tolerated = 2 * len(self._due) + 64

    def kind(self, sequence: Sequence) -> Kind:
        """Return the kind by whose errors a sequence's first token is judged: fixed once it is tracked."""
        level = sequence.request.priority_class
        if sequence.is_pressing:
            return level, True, False
        promise = self._open.get(sequence)
        return (level, False, self._owes(sequence)) if promise is None else promise.given.kind

    def likely(self, kind: Kind) -> BoundLine:
        """Return the decisive bounds of first tokens of a kind."""
        return self._first[kind].likely.line()

    def overtaken(self, sequences: list[Sequence], seconds: float) -> None:
        """Note that a sequence predicted to take `seconds` was admitted ahead of these."""
        promises = self._open
        for sequence in sequences:
            if (promise := promises.get(sequence)) is not None:
                promise.unforeseen += seconds

    def first_token(self, sequence: Sequence, now: float) -> None:
        self._pass(now)
        if (promise := self._open.get(sequence)) is not None:
            promise.has_first = True
            given, calibration = promise.given, self._first[promise.given.kind]
            seconds, unforeseen = now - given.arrival, promise.unforeseen + self._pipeline.stalled
            if not promise.first_passed:
                calibration.count(seconds > given.first_token.reported)
            calibration.came(given.first_token, _first_groups(sequence), seconds, unforeseen)

    def last_token(self, sequence: Sequence, now: float) -> None:
        self._pass(now)
        if (promise := self._open.pop(sequence, None)) is not None:
            given, calibration = promise.given.last_token, self._last[sequence.request.priority_class]
            seconds = now - promise.given.arrival
            if not promise.last_passed:
                calibration.count(seconds > given.reported)
            if promise.knows_length:
                calibration.came(given, _last_groups(sequence), seconds)

    def expired(self, sequence: Sequence, now: float) -> None:
        self._pass(now)
        if (promise := self._open.pop(sequence, None)) is None:
            return
        given, groups = promise.given, _first_groups(sequence)
        waited = now - given.arrival
        if not sequence.output:
            first = self._first[promise.given.kind]
            least, unforeseen = waited + given.prefill, promise.unforeseen + self._pipeline.stalled
            if not promise.first_passed:
                first.count(True)
            first.never_came(given.first_token, groups, least, unforeseen)
        if promise.knows_length:
            self._last[sequence.request.priority_class].gave_up(given.last_token, _last_groups(sequence), waited)

    def forget(self, sequence: Sequence, now: float) -> None:
        """Stop tracking a cancelled sequence: when its tokens would have come stays unknown."""
        if sequence in self._open:
            self._pass(now)
            del self._open[sequence]

    @property
    def coverage(self) -> float:
        """The share of the bounds on first tokens that held."""
        return _coverage(list(self._first.values()))

    @property
    def completion_coverage(self) -> float:
        """The share of the bounds on last tokens that held, of those of which it is known."""
        return _coverage(list(self._last.values()))

    def _pass(self, now: float) -> None:
        """Record a miss for every bound that has passed without its token."""
        while self._due and self._due[0][0] < now:
            _, _, is_first, sequence = heappop(self._due)
            if not self._is_open(sequence, is_first):
                continue
            if is_first:
                self._open[sequence].first_passed = True
                self._first[self._open[sequence].given.kind].count(True)
            else:
                self._open[sequence].last_passed = True
                self._last[sequence.request.priority_class].count(True)

    def _is_open(self, sequence: Sequence, is_first: bool) -> bool:
        promise = self._open.get(sequence)
        return promise is not None and not (is_first and promise.has_first)


def _alike(sequence: Sequence) -> Hashable:
    """Return the group key of similar sequences: the power of four next above the prompt length, and the power of two
    next above the deadline, because requests with later deadlines are overtaken by later arrivals.
    """
    by, length_class = sequence.request.first_token_by, (len(sequence.request.prompt).bit_length() + 1) // 2
    return length_class, None if by is None else frexp(by - sequence.arrival)[1]


def _first_groups(sequence: Sequence) -> Groups:
    alike = _alike(sequence)
    return (sequence.tenant, alike), alike


def _last_groups(sequence: Sequence) -> Groups:
    """No tenant is in the groups: `OutputLengths` distinguishes tenants already."""
    return (_alike(sequence),)


def _coverage(calibrations: list[TokenCalibration]) -> float:
    kept = sum(each.kept for each in calibrations)
    broken = sum(each.broken for each in calibrations)
    return kept / max(1, kept + broken)
