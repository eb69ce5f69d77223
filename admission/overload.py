"""Decides which requests may wait: within bounds on the queue, and with deadlines that can be met.

A request is refused when it arrives or not at all, with what was estimated. The order of refusal follows from the order
of service: of a lower class, or of a tenant beyond its share, more is ahead, so its estimate is the longer one. Length
comes after those: a prompt shorter than the typical one leaves part of the difference to longer ones, and a longer one
gets an age bonus for having to start sooner, or overload would be paid by long prompts alone.
"""

from dataclasses import dataclass, field

from admission.aging import Aging
from admission.backlog import Backlog, DrainMeter, Load
from admission.calibration import CalibratedEstimate, EstimateCalibration
from admission.estimate import Estimate, Estimator
from admission.outcome import DeadlineInfeasible, QueueFull, TenantQueueFull
from admission.output_length import OutputLengths
from admission.scheduling_policy import Excess, QueueBounds, SchedulingPolicy
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence

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
        calibrated = self.calibration.calibrate(sequence.priority_class, estimate, now)
        if self._scheduler.has_work:  # an idle machine refuses nobody
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
        return DeadlineInfeasible("first", calibrated.first_token.reported, slack, own_doing, until)

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
        return DeadlineInfeasible("last", calibrated.last_token.reported, slack, own_doing, until)

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
