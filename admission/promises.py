"""What was estimated of those that wait for their first or their last token, held against what comes."""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass
from math import ceil

from admission.estimate import Estimate
from backend.scheduler.sequence import Sequence

WINDOW = 300  # residuals remembered
ENOUGH = 20  # residuals before they are believed
COLD_MARGIN = 0.25  # of the estimate: the margin before that
ADAPTATION_RATE = 0.01


class Conformal:
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

    def bound(self, estimate: float) -> float:
        """At least 0, and monotone in the estimate."""
        count = len(self._sorted)
        if count < ENOUGH:
            return estimate * (1 + COLD_MARGIN)
        rank = min(count, ceil((count + 1) * (1 - self._miss_rate)))
        return max(0.0, estimate + self._unit(estimate) * self._sorted[max(rank, 1) - 1])

    def beyond(self, estimate: float, least: float) -> float:
        """What stands for a measurement of which only the least is known: the median of those whose residual was larger
        (Efron's redistribution to the right, 1967, in one piece).
        """
        first = bisect_right(self._sorted, self._residual(estimate, least))
        larger = len(self._sorted) - first
        return estimate + self._unit(estimate) * self._sorted[first + larger // 2] if larger else least

    def observe(self, estimate: float, measured: float, missed: bool) -> None:
        """`missed`: the truth was above the bound that was given."""
        residual = self._residual(estimate, measured)
        if len(self._recent) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(residual)
        insort(self._sorted, residual)
        moved = self._miss_rate + self._rate * (self._target - missed)
        self._miss_rate = min(max(moved, self._target / 10), 1 - (1 - self._target) / 10)

    def _residual(self, estimate: float, measured: float) -> float:
        return (measured - estimate) / self._unit(estimate)

    def _unit(self, estimate: float) -> float:
        return 1.0 if self._relative_from is None else max(estimate, self._relative_from)


CONFIDENCE = 0.9  # of the bounds that clients are told
DONE_CONFIDENCE = 0.5  # that one admitted is done by its deadline: an answer that is cut short was computed in vain
LAST_RATE = 0.003  # of adaptation; a third of what first tokens have
FIRST_RELATIVE_FROM, LAST_RELATIVE_FROM = 0.5, 1e-3  # seconds; no error is taken relative to a shorter estimate


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a token comes, in seconds from the arrival. `told` is what the client is told; `likely` is what its
    admission was decided by.
    """

    estimate: float
    told: float
    likely: float

    def not_before(self, first: "Bounds") -> "Bounds":
        """A last token comes with the first, or later."""
        return Bounds(self.estimate, max(self.told, first.told), max(self.likely, first.likely))


@dataclass(frozen=True, slots=True)
class Promise:
    """`arrival` on the engine's clock; `prefill`: the seconds of the estimate that its own prompt takes."""

    arrival: float
    prefill: float
    first: Bounds
    last: Bounds


class Calibration:
    """Bounds on first or on last tokens of one class.

    Errors grow with what is estimated. Only a first token's deadline is held against errors in seconds: in proportion
    they would be held against long prompts, whose estimates are long. Last tokens come in late, so that what adapts to
    them has to be slow.
    """

    def __init__(self, told: Conformal, likely: Conformal) -> None:
        self._told, self._likely = told, likely
        self.kept = 0
        self.broken = 0

    @classmethod
    def of_first_tokens(cls, confidence: float) -> "Calibration":
        return cls(Conformal(CONFIDENCE, relative_from=FIRST_RELATIVE_FROM), Conformal(confidence))

    @classmethod
    def of_last_tokens(cls) -> "Calibration":
        told, likely = (Conformal(c, LAST_RATE, LAST_RELATIVE_FROM) for c in (CONFIDENCE, DONE_CONFIDENCE))
        return cls(told, likely)

    def bounds(self, estimate: float) -> Bounds:
        likely = self._likely.bound(estimate)
        return Bounds(estimate, max(self._told.bound(estimate), likely), likely)

    def came(self, given: Bounds, seconds: float) -> None:
        """The token, after so many seconds."""
        late = seconds > given.told
        self.broken += late
        self.kept += not late
        self._learn(given, seconds)

    def would_have_come(self, given: Bounds, seconds: float) -> None:
        """After so many seconds at the least, and later than any bound."""
        self.broken += 1
        self._learn(given, seconds, is_miss=True)

    def gave_up(self, given: Bounds, seconds: float) -> None:
        """After so many seconds nobody waits any more; whether the bound would have held is not always known."""
        self.broken += seconds > given.told
        self._learn(given, self._told.beyond(given.estimate, seconds))

    def _learn(self, given: Bounds, seconds: float, *, is_miss: bool = False) -> None:
        self._told.observe(given.estimate, seconds, is_miss or seconds > given.told)
        self._likely.observe(given.estimate, seconds, is_miss or seconds > given.likely)


class Promises:
    """A calibration for the first and one for the last tokens of each class. A sequence without a promise is ignored.

    Whoever expires before its first token counts as a miss of that: it would have come later still, by the time of its
    own prefill.
    """

    def __init__(self, decisive: float) -> None:
        """`decisive` is the confidence with which a first token is held against its deadline."""
        self._decisive = decisive
        self._first: dict[int, Calibration] = {}
        self._last: dict[int, Calibration] = {}
        self._open: dict[Sequence, Promise] = {}

    def promise(self, priority_class: int, estimate: Estimate, now: float) -> Promise:
        first = self._first_of(priority_class).bounds(estimate.first_token)
        last = self._last_of(priority_class).bounds(estimate.last_token)
        return Promise(now, estimate.prefill, first, last.not_before(first))

    def give(self, sequence: Sequence, promise: Promise) -> None:
        self._open[sequence] = promise

    def first_token(self, sequence: Sequence, now: float) -> None:
        if (promise := self._open.get(sequence)) is not None:
            self._first_of(sequence.priority_class).came(promise.first, now - promise.arrival)

    def last_token(self, sequence: Sequence, now: float) -> None:
        if (promise := self._open.pop(sequence, None)) is not None:
            self._last_of(sequence.priority_class).came(promise.last, now - promise.arrival)

    def expired(self, sequence: Sequence, now: float) -> None:
        if (promise := self._open.pop(sequence, None)) is None:
            return
        waited = now - promise.arrival
        if not sequence.output:
            least = max(waited, promise.first.told) + promise.prefill
            self._first_of(sequence.priority_class).would_have_come(promise.first, least)
        self._last_of(sequence.priority_class).gave_up(promise.last, waited)

    def forget(self, sequence: Sequence) -> None:
        """It was cancelled: nobody will know."""
        self._open.pop(sequence, None)

    @property
    def coverage(self) -> float:
        """Share of the bounds on first tokens that held."""
        return _coverage(self._first)

    @property
    def completion_coverage(self) -> float:
        """Share of the bounds on last tokens that held, of those of which it is known."""
        return _coverage(self._last)

    def _first_of(self, priority_class: int) -> Calibration:
        if priority_class not in self._first:
            self._first[priority_class] = Calibration.of_first_tokens(self._decisive)
        return self._first[priority_class]

    def _last_of(self, priority_class: int) -> Calibration:
        if priority_class not in self._last:
            self._last[priority_class] = Calibration.of_last_tokens()
        return self._last[priority_class]


def _coverage(calibrations: dict[int, Calibration]) -> float:
    kept = sum(each.kept for each in calibrations.values())
    broken = sum(each.broken for each in calibrations.values())
    return kept / max(1, kept + broken)
