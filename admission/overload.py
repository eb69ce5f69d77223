"""Decides which requests may wait, within bounds on the queue and with deadlines that can be met, and gives up those
whose answers nobody waits for any more.

A request is refused when it arrives or not at all, with what was estimated. The order of refusal follows from the order
of service: of a lower class, or of a tenant beyond its share, more is ahead, so its estimate is the longer one. Length
comes after those: a prompt shorter than the typical one leaves part of the difference to longer ones, and a longer one
gets an age bonus for having to start sooner, or overload would be paid by long prompts alone.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Protocol

from admission.aging import Aging
from admission.backlog import Backlog, DrainMeter, Load
from admission.calibration import CalibratedEstimate, EstimateCalibration
from admission.estimate import Estimate, Estimator
from admission.outcome import DeadlineInfeasible, QueueFull, TenantQueueFull
from admission.output_length import OutputLengths
from admission.scheduling_policy import Excess, QueueBounds, SchedulingPolicy
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence, SequenceStatus

PROBE_EVERY = 64  # borderline refusals; one of them is admitted, so that estimates are not learned from the lucky alone
BORDERLINE = 1.25  # times the time that is left
LENGTH_SHARE = 0.45  # of the prefill time by which a prompt is shorter than the typical one: left to longer ones


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """The configuration of overload control."""

    bounds: QueueBounds = field(default_factory=QueueBounds)
    tenant_bounds: QueueBounds = field(default_factory=QueueBounds)
    deadlines: bool = True  # refuse what cannot be in time
    confidence: float = 0.4  # that the estimate of one that is admitted holds
    class_bounds: bool = True  # those that the policy has for classes hold as well


class AdmissionControl:
    """Decides about each arrival, once, in O(running + a bounded number of the tenants waiting)."""

    def __init__(
        self,
        config: OverloadConfig,
        scheduler: Scheduler,
        backlog: Backlog,
        drain: DrainMeter,
        lengths: OutputLengths,
        estimator: Estimator,
    ) -> None:
        self.calibration = EstimateCalibration(config.confidence)
        self.deferred = 0  # admitted without a deadline, later than their class is meant to be
        self.refuses_late = True  # False: what would be late is let in, as a replay of what became of it does
        self._config, self._scheduler, self._backlog = config, scheduler, backlog
        self._drain, self._lengths, self._estimator = drain, lengths, estimator
        self._policy = SchedulingPolicy()
        self._borderline = 0

    def admit(self, sequence: Sequence, now: float) -> Load:
        """Let the sequence wait, or raise an `AdmissionRefused`; returns the work that it adds while it waits.

        Where it has a target, its estimates are set.
        """
        output = self._lengths.mean(sequence.tenant, sequence.max_tokens)
        load = self._backlog.load_of(sequence, output)
        if self._backlog.total.count:  # an empty queue takes anything: it can only run at once
            self._check_bounds(sequence, load)
        if self._config.deadlines and _has_target(sequence):
            self._check_deadline(sequence, now)
        self._estimator.arrived(sequence, output)
        return load

    def policy_changed(self, policy: SchedulingPolicy, aging: Aging) -> None:
        self._policy = policy
        self._estimator.aging = aging

    def _check_bounds(self, sequence: Sequence, load: Load) -> None:
        own = self._backlog.of(sequence.tenant)
        most = self._policy.most_waiting(sequence.tenant)
        excess = self._config.tenant_bounds.excess(own, load)
        if excess is None and most is not None and own.count >= max(most, 1):
            excess = Excess("count", most, own.count + 1)
        if excess is not None:
            share = max(1, self._backlog.num_tenants)
            raise TenantQueueFull(excess, self._until_drained((own.seconds + load.seconds) * share, 0.0))
        self._check_shared_bounds(sequence, own, load)

    def _check_shared_bounds(self, sequence: Sequence, own: Load, load: Load) -> None:
        backlog, level = self._backlog, sequence.priority_class
        excess = self._config.bounds.shared_excess(backlog.total, own, backlog.num_tenants, load)
        of_class = self._policy.bounds_of(level) if excess is None and self._config.class_bounds else None
        if of_class is not None:
            own = backlog.of(sequence.tenant, level)
            excess = of_class.shared_excess(backlog.of_class(level), own, backlog.num_tenants_of(level), load)
        if excess is not None:
            total = backlog.total
            until = self._until_drained(total.seconds + load.seconds, 0.0)
            raise QueueFull(excess, total.count, until, of_class is not None)

    def _check_deadline(self, sequence: Sequence, now: float) -> None:
        estimate = self._estimator.of(sequence, now)
        calibrated = self.calibration.calibrate(sequence, estimate, now)
        if self.refuses_late and self._scheduler.has_work:  # an idle machine refuses nobody
            self._refuse_late(sequence, estimate, calibrated, now)
        self.calibration.track(sequence, calibrated)
        sequence.first_token_estimate = calibrated.first_token.reported
        sequence.last_token_estimate = calibrated.last_token.reported
        sequence.age_bonus = estimate.age_bonus
        target = sequence.first_token_target
        if sequence.first_token_by is None and target is not None and calibrated.first_token.reported > target:
            self.deferred += 1

    def _refuse_late(self, sequence: Sequence, estimate: Estimate, calibrated: CalibratedEstimate, now: float) -> None:
        late = self._first_token_late(sequence, estimate, calibrated, now)
        late = late or self._last_token_late(sequence, estimate, calibrated, now)
        if late is None or self._is_probe(late):
            return
        try:
            raise late
        finally:
            del late  # its traceback holds this frame: they would keep each other

    def _first_token_late(
        self, sequence: Sequence, estimate: Estimate, calibrated: CalibratedEstimate, now: float
    ) -> DeadlineInfeasible | None:
        if sequence.first_token_by is None:
            return None
        slack = sequence.first_token_by - now
        longer = estimate.typical_prefill - estimate.prefill
        excess = calibrated.first_token.likely + LENGTH_SHARE * max(0.0, longer) - slack
        if excess <= 0:
            return None
        own_doing = estimate.own_wait >= excess
        until = self._until_possible(estimate, slack)
        return DeadlineInfeasible("first", calibrated.first_token.most, slack, own_doing, until)

    def _last_token_late(
        self, sequence: Sequence, estimate: Estimate, calibrated: CalibratedEstimate, now: float
    ) -> DeadlineInfeasible | None:
        if sequence.done_by is None:
            return None
        slack = sequence.done_by - now
        excess = calibrated.last_token.likely - slack
        if excess <= 0:
            return None
        own_doing = estimate.own_wait >= excess
        until = self._until_possible(estimate, slack - (estimate.last_token - estimate.first_token))
        return DeadlineInfeasible("last", calibrated.last_token.most, slack, own_doing, until)

    def _is_probe(self, late: DeadlineInfeasible) -> bool:
        if late.estimate > BORDERLINE * late.slack:
            return False
        self._borderline += 1
        return self._borderline % PROBE_EVERY == 0

    def _until_possible(self, estimate: Estimate, slack: float) -> float:
        """Returns the seconds until so much would have drained that the same request could be in time."""
        return self._until_drained(self._backlog.total.seconds + estimate.prefill, slack)

    def _until_drained(self, seconds: float, slack: float) -> float:
        rate = self._drain.slow_rate
        return (seconds - slack * rate) / rate


def _has_target(sequence: Sequence) -> bool:
    """Returns whether the sequence has a deadline or a target. One that has none costs no estimate."""
    has_deadline = sequence.first_token_by is not None or sequence.done_by is not None
    return has_deadline or sequence.first_token_target is not None


class Expiry(Protocol):
    """A rule that says which sequences are to be given up. Times are in seconds of the engine's clock."""

    next_due: float  # nobody is due at this moment or before; what follows may be nobody either

    def arrived(self, sequence: Sequence, now: float) -> None: ...

    def left_queue(self, sequence: Sequence, now: float) -> None:
        """Note that a sequence was admitted, or has ended."""
        ...

    def due(self, now: float) -> list[Sequence]:
        """Returns those that are to be ended at this moment."""
        ...


class NoExpiry:
    """A rule by which nobody is given up."""

    next_due = inf

    def arrived(self, sequence: Sequence, now: float) -> None:
        pass

    def left_queue(self, sequence: Sequence, now: float) -> None:
        pass

    def due(self, now: float) -> list[Sequence]:
        return []


class DeadlineExpiry:
    """A sequence expires when it can have no token in time, or has not ended in time. O(log n) each.

    One that waits expires as soon as the shortest prefill there is would end too late, so that nothing is computed in
    vain; one that runs, when the deadline itself has passed. A deadline that is feasible never expires.
    """

    def __init__(self, shortest_prefill: Callable[[Sequence], float]) -> None:
        """`shortest_prefill` returns the seconds that a prompt takes on a machine that does nothing else."""
        self._shortest_prefill = shortest_prefill
        self._heap: list[tuple[float, int, Sequence]] = []  # those that have ended leave it lazily
        self.next_due = inf
        self._numbers = count()
        self._tolerated = 64  # entries, before those that have ended are cleared out

    def arrived(self, sequence: Sequence, now: float) -> None:
        deadlines = _deadlines(sequence)
        if deadlines:
            self._watch(sequence, self._latest_start(sequence))
        for time in deadlines:
            self._watch(sequence, time)

    def left_queue(self, sequence: Sequence, now: float) -> None:
        pass

    def due(self, now: float) -> list[Sequence]:
        expired: dict[Sequence, None] = {}  # in the order in which their times passed; each has several
        while self._heap and self._heap[0][0] < now:
            sequence = heappop(self._heap)[2]
            if _is_late(sequence, now) or (_is_idle(sequence) and self._is_too_late(sequence, now)):
                expired[sequence] = None
        self.next_due = self._heap[0][0] if self._heap else inf
        return list(expired)

    def _is_too_late(self, sequence: Sequence, now: float) -> bool:
        """Returns whether it is too late to begin. Prefill may have got faster since the sequence arrived."""
        latest = self._latest_start(sequence)
        if latest >= now:
            self._watch(sequence, latest)
        return latest < now

    def _latest_start(self, sequence: Sequence) -> float:
        return min(_deadlines(sequence)) - self._shortest_prefill(sequence)

    def _watch(self, sequence: Sequence, time: float) -> None:
        heappush(self._heap, (time, next(self._numbers), sequence))
        self.next_due = self._heap[0][0]
        if len(self._heap) > self._tolerated:
            self._heap = [entry for entry in self._heap if entry[2].status is not SequenceStatus.FINISHED]
            heapify(self._heap)
            self._tolerated = 2 * len(self._heap) + 64


def _deadlines(sequence: Sequence) -> list[float]:
    return [time for time in (sequence.first_token_by, sequence.done_by) if time is not None]


def _is_late(sequence: Sequence, now: float) -> bool:
    """Returns whether a deadline has passed that the sequence has not met."""
    if sequence.status is SequenceStatus.FINISHED:
        return False
    if sequence.done_by is not None and sequence.done_by < now:
        return True
    return not sequence.output and sequence.first_token_by is not None and sequence.first_token_by < now


def _is_idle(sequence: Sequence) -> bool:
    """Returns whether the sequence has had nothing yet, neither prefill nor tokens."""
    return sequence.status is SequenceStatus.WAITING and sequence.num_computed_tokens == 0 and not sequence.output


class ControlledDelay:
    """Controlled delay (CoDel: Nichols and Jacobson, 2012) for requests: the wait that is allowed is short while the
    queue does not run empty. `interval` and `target` are in seconds.
    """

    def __init__(self, interval: float = 2.0, target: float = 0.5) -> None:
        self.next_due = -inf  # it looks whenever it is asked
        self._interval, self._target = interval, target
        self._waiting: OrderedDict[Sequence, float] = OrderedDict()
        self._empty_at = 0.0

    def arrived(self, sequence: Sequence, now: float) -> None:
        if not self._waiting:
            self._empty_at = now
        self._waiting[sequence] = now

    def left_queue(self, sequence: Sequence, now: float) -> None:
        self._waiting.pop(sequence, None)
        if not self._waiting:
            self._empty_at = now

    def due(self, now: float) -> list[Sequence]:
        """Returns those that have waited too long; each is to be ended."""
        allowed = self._interval if now - self._empty_at < self._interval else self._target
        late = []
        for sequence, since in self._waiting.items():
            if now - since <= allowed:
                break
            late.append(sequence)
        return late
