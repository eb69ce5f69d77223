"""Turns estimates of first and last tokens into bounds that hold as often as they say.

Each estimate of a waiting sequence is compared with what is measured once the token comes; the errors of the past, by
class, tenant, length of the prompt and deadline, are what the next bounds are made of. A bound that passes without its
token is known to be missed then, and not when the token comes: until then a burst is told what no longer holds.
"""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from math import frexp
from typing import NamedTuple

from admission.conformal import BoundLine, ConformalBound, Groups
from admission.forecast import Forecast
from admission.step_times.step_time import Pipeline
from backend.scheduler.sequence import Sequence

CONFIDENCE = 0.9  # of the bounds that are reported to clients
DONE_CONFIDENCE = 0.5  # that one admitted is done by its deadline: an answer that is cut short was computed in vain
FIRST_RATE = 0.05  # of adaptation: some 20 promises, as many as are open at a time, move the miss rate by its target
LAST_RATE = 0.003  # of what an admission is decided by: last tokens are known late
LAST_WINDOW = 150  # residuals of what is reported of last tokens, which forgets instead of adapting
FIRST_RELATIVE_FROM, LAST_RELATIVE_FROM = 0.1, 1e-3  # seconds; no error is taken relative to a shorter estimate
DECISIVE_RELATIVE_FROM = 0.5  # seconds; the same of what admissions are decided by


class LatencyBounds(NamedTuple):
    """Bounds on when a token comes, in seconds from the arrival.

    `reported` goes to the client; `likely` is what its admission was decided by.
    """

    estimate: float
    reported: float
    likely: float

    @property
    def most(self) -> float:
        """The later of the two: what a refusal is explained by."""
        return max(self.reported, self.likely)


AT_ONCE = LatencyBounds(0.0, 0.0, 0.0)


class CalibratedEstimate(NamedTuple):
    """A sequence's estimate with bounds from past errors of its class. Times are in seconds."""

    arrival: float  # on the engine's clock
    prefill: float  # the part of the estimate that its own prompt takes
    first_token: LatencyBounds
    last_token: LatencyBounds


class TokenCalibration:
    """Learns the bounds of first tokens, or of last tokens, of one class.

    Errors grow with what is estimated. An admission is decided by the bound that a request has while nobody is let in
    before it and no step stalls: whoever is let in leaves it in time, and what stalled once says nothing of the next
    steps. It is that of the whole class: by length, errors would be held against long prompts. What is reported counts
    both. What is reported of last tokens does not adapt to misses, which are known too late for that: hundreds of
    promises later, adapting to them sways.
    """

    def __init__(self, reported: ConformalBound, likely: ConformalBound) -> None:
        self._reported, self._likely = reported, likely
        self.kept = 0
        self.broken = 0

    @classmethod
    def of_first_tokens(cls, confidence: float) -> "TokenCalibration":
        reported = ConformalBound(CONFIDENCE, FIRST_RATE, FIRST_RELATIVE_FROM, extrapolates=True)
        return cls(reported, ConformalBound(confidence, relative_from=DECISIVE_RELATIVE_FROM))

    @classmethod
    def of_last_tokens(cls) -> "TokenCalibration":
        reported = ConformalBound(CONFIDENCE, 0.0, LAST_RELATIVE_FROM, window=LAST_WINDOW)
        return cls(reported, ConformalBound(DONE_CONFIDENCE, LAST_RATE, LAST_RELATIVE_FROM))

    def bounds(self, estimate: float, groups: Groups, least: LatencyBounds = AT_ONCE) -> LatencyBounds:
        """Returns the bounds for an estimate; `least` are those of a token that comes before, or with it."""
        likely = max(self._likely.bound(estimate), least.likely)
        return LatencyBounds(estimate, max(self._reported.bound(estimate, groups), least.reported), likely)

    def passed(self) -> None:
        """Learns that a token which was reported to have come by now has not."""
        self._is_known(True)

    @property
    def likely(self) -> BoundLine:
        """The bounds by which it is decided whether a token that is expected then is in time."""
        return self._likely.line()

    def came(
        self, given: LatencyBounds, groups: Groups, seconds: float, has_passed: bool, unforeseen: float = 0.0
    ) -> None:
        """Learns that the token came after so many seconds, `unforeseen` of which no admission is decided by;
        `has_passed` says that its bound is known as missed.
        """
        self.was_kept(given, seconds, has_passed)
        self._reported.observe(given.estimate, seconds, groups)
        self._decided(given.estimate + unforeseen, seconds)

    def was_kept(self, given: LatencyBounds, seconds: float, has_passed: bool) -> None:
        """Learns no more than whether the bound held, as of a token that came after so many seconds."""
        if not has_passed:
            self._is_known(seconds > given.reported)

    def never_came(
        self, given: LatencyBounds, groups: Groups, least: float, has_passed: bool, unforeseen: float = 0.0
    ) -> None:
        """Learns that the token was given up, which would have come after so many seconds at the least: a miss of any
        bound.
        """
        if not has_passed:
            self._is_known(True)
        self._reported.observe(given.estimate, self._reported.beyond(given.estimate, least), groups)
        if least > given.estimate + unforeseen:
            self._decided(given.estimate + unforeseen, least)

    def gave_up(self, given: LatencyBounds, groups: Groups, least: float) -> None:
        """Learns that nobody waited any more after so many seconds; whether the bound would have held may be open."""
        measured = self._reported.beyond(given.estimate, least)
        self._learn(given, groups, measured, measured > given.likely)

    def _decided(self, estimate: float, seconds: float) -> None:
        """Learns that a token came after so many seconds for which so many were to be expected."""
        missed = seconds > self._likely.bound(estimate)
        self._likely.observe(estimate, seconds)
        self._likely.adapt(missed)

    def _is_known(self, late: bool) -> None:
        self.broken += late
        self.kept += not late
        self._reported.adapt(late)

    def _learn(self, given: LatencyBounds, groups: Groups, seconds: float, is_unlikely: bool) -> None:
        self._reported.observe(given.estimate, seconds, groups)
        self._likely.observe(given.estimate, seconds)
        self._likely.adapt(is_unlikely)


@dataclass(slots=True)
class _Promise:
    """What a sequence was told, and which of it is known by now."""

    given: CalibratedEstimate
    unforeseen: float  # seconds of those let in before it since; less those for which steps had stalled when it came
    knows_length: bool
    has_first: bool = False  # whether its first token has come
    first_passed: bool = False  # whether what was reported of it has passed before
    last_passed: bool = False


class EstimateCalibration:
    """Calibrates the estimates of first and of last tokens, each class by its own. Sequences not tracked are ignored.

    A sequence that expires before its first token counts as a miss of that bound: the token would have come later
    still, by the time of its own prefill. O(log open) for each event, and what is kept of groups is bounded.
    """

    def __init__(self, decisive: float, pipeline: Pipeline | None = None) -> None:
        """`decisive` is the confidence with which a first token is held against its deadline; the `pipeline` knows for
        how long steps have stalled.
        """
        self._pipeline = pipeline or Pipeline()
        self._first = defaultdict[int, TokenCalibration](lambda: TokenCalibration.of_first_tokens(decisive))
        self._last = defaultdict[int, TokenCalibration](TokenCalibration.of_last_tokens)
        self._open: dict[Sequence, _Promise] = {}
        self._due: list[tuple[float, int, bool, Sequence]] = []  # heap of both bounds; what is known leaves it lazily
        self._numbers = count()
        self._tolerated = 64  # entries, before those that are known are cleared out

    def calibrate(self, sequence: Sequence, estimate: Forecast, now: float) -> CalibratedEstimate:
        """Returns the estimate with the bounds that its class has at present."""
        self._pass(now)
        first = self._first[sequence.priority_class].bounds(estimate.first_token, _first_groups(sequence))
        last = self._last[sequence.priority_class].bounds(estimate.last_token, _last_groups(sequence), first)
        return CalibratedEstimate(now, estimate.prefill, first, last)

    def track(self, sequence: Sequence, given: CalibratedEstimate, knows_length: bool = True) -> None:
        """Hold the sequence's tokens against these bounds when they come. Without `knows_length`, its last token was
        estimated by what it declares, and how far that is off says nothing of estimates that are made of answers.
        """
        self._open[sequence] = _Promise(given, -self._pipeline.stalled, knows_length)
        for is_first, bounds in ((True, given.first_token), (False, given.last_token)):
            heappush(self._due, (given.arrival + bounds.reported, next(self._numbers), is_first, sequence))
        if len(self._due) > self._tolerated:
            self._due = [entry for entry in self._due if self._is_open(entry[3], entry[2])]
            heapify(self._due)
            self._tolerated = 2 * len(self._due) + 64

    def likely(self, priority_class: int) -> BoundLine:
        """Returns `TokenCalibration.likely` of first tokens of the class."""
        return self._first[priority_class].likely

    def overtaken(self, sequences: list[Sequence], seconds: float) -> None:
        """Note that one was let in before these sequences that is expected to take these seconds."""
        promises = self._open
        for sequence in sequences:
            if (promise := promises.get(sequence)) is not None:
                promise.unforeseen += seconds

    def first_token(self, sequence: Sequence, now: float) -> None:
        self._pass(now)
        if (promise := self._open.get(sequence)) is not None:
            promise.has_first = True
            given, calibration = promise.given, self._first[sequence.priority_class]
            seconds, unforeseen = now - given.arrival, promise.unforeseen + self._pipeline.stalled
            calibration.came(given.first_token, _first_groups(sequence), seconds, promise.first_passed, unforeseen)

    def last_token(self, sequence: Sequence, now: float) -> None:
        self._pass(now)
        if (promise := self._open.pop(sequence, None)) is not None:
            given, calibration = promise.given.last_token, self._last[sequence.priority_class]
            seconds = now - promise.given.arrival
            if promise.knows_length:
                calibration.came(given, _last_groups(sequence), seconds, promise.last_passed)
            else:
                calibration.was_kept(given, seconds, promise.last_passed)

    def expired(self, sequence: Sequence, now: float) -> None:
        self._pass(now)
        if (promise := self._open.pop(sequence, None)) is None:
            return
        given, groups = promise.given, _first_groups(sequence)
        waited = now - given.arrival
        if not sequence.output:
            first = self._first[sequence.priority_class]
            least, unforeseen = waited + given.prefill, promise.unforeseen + self._pipeline.stalled
            first.never_came(given.first_token, groups, least, promise.first_passed, unforeseen)
        if promise.knows_length:
            self._last[sequence.priority_class].gave_up(given.last_token, _last_groups(sequence), waited)

    def forget(self, sequence: Sequence, now: float) -> None:
        """Stop tracking a sequence that was cancelled: when its tokens would have come stays unknown."""
        if sequence in self._open:
            self._pass(now)
            del self._open[sequence]

    @property
    def coverage(self) -> float:
        """The share of the bounds on first tokens that held."""
        return _coverage(self._first)

    @property
    def completion_coverage(self) -> float:
        """The share of the bounds on last tokens that held, of those of which it is known."""
        return _coverage(self._last)

    def _pass(self, now: float) -> None:
        """Learn from the bounds that have passed without their tokens."""
        while self._due and self._due[0][0] < now:
            _, _, is_first, sequence = heappop(self._due)
            if not self._is_open(sequence, is_first):
                continue
            if is_first:
                self._open[sequence].first_passed = True
                self._first[sequence.priority_class].passed()
            else:
                self._open[sequence].last_passed = True
                self._last[sequence.priority_class].passed()

    def _is_open(self, sequence: Sequence, is_first: bool) -> bool:
        promise = self._open.get(sequence)
        return promise is not None and not (is_first and promise.has_first)


def _length_class(sequence: Sequence) -> int:
    """Returns the power of four that is next above the length of the prompt."""
    return (len(sequence.prompt).bit_length() + 1) // 2


def _alike(sequence: Sequence) -> Hashable:
    """Returns what such sequences have in common: the length of the prompt, and the power of two that is next above the
    deadline, for whoever has time is overtaken by those that come after it.
    """
    by = sequence.first_token_by
    return _length_class(sequence), None if by is None else frexp(by - sequence.arrival)[1]


def _first_groups(sequence: Sequence) -> Groups:
    alike = _alike(sequence)
    return (sequence.tenant, alike), alike


def _last_groups(sequence: Sequence) -> Groups:
    """By the tenant, answers are told apart already (`OutputLengths`)."""
    return (_alike(sequence),)


def _coverage(calibrations: dict[int, TokenCalibration]) -> float:
    kept = sum(each.kept for each in calibrations.values())
    broken = sum(each.broken for each in calibrations.values())
    return kept / max(1, kept + broken)
