"""Decides which requests may wait, within bounds on the queue and with deadlines that can be met.

A request is refused when it arrives or not at all, with what was estimated. It is let in where it is expected to be in
time, and where nobody is late for it who was let in before and is due later (admission control for earliest deadline
first: Liu and Layland, 1973). Tenants beyond their share leave the others the time that these may need (`reserve`). A
policy may have overload spare requests, or tokens: a prompt then needs more room than its own (`Prefer`).
"""

from dataclasses import dataclass, field

from admission.aging import Aging
from admission.backlog import Backlog, DrainMeter, Load
from admission.calibration import CalibratedEstimate, EstimateCalibration
from admission.conformal import BoundLine
from admission.estimate import Estimate, Estimator
from admission.orderings.fair_queue import FairQueue
from admission.outcome import DeadlineInfeasible, QueueFull, TenantQueueFull
from admission.output_length import OutputLengths
from admission.reserve import Reserve, Room
from admission.scheduling_policy import Excess, Prefer, QueueBounds, SchedulingPolicy
from admission.step_times.step_time import Pipeline
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence

TYPICAL_WEIGHT = 0.02  # of each newcomer in the running means of prompts and of deadlines
PROBE_EVERY = 64  # borderline refusals; one of them is admitted, so that estimates are not learned from the lucky alone
HOPELESS = 0.5  # of the time that a first token takes on an idle machine
BORDERLINE = 1.25  # times the time that is left
ROOM_OF_TOKENS = 2.0
"""The typical prompts for which there must be room where overload is to spare tokens, so that a long one finds as much
as a short one.
"""
SIZE_OF_REQUESTS = 1.0
"""Where overload is to spare requests, a prompt longer than the typical one needs more room than its own, so that it
makes way for several short ones: its own as many times as it is longer, as far as its time is taken. Where nothing
waits, refusing it would spare nobody.
"""
SIZE_OF_EXCESS = 2.5
"""The same of a tenant that leaves others room, whatever overload is to spare: for the part of its time that it leaves,
and the square of how many times its share it asks for beyond that. The more of it has to be refused, the more of its
short requests a long one would cost.
"""
ROOM_OF_PATIENCE = 16.0
"""Its own length as many times for each time that a request may wait longer than most do, as far as its time is taken.
What can wait would be let in until all of its time is, and would hold up all that come then, however urgent. With more
than this, what can wait is refused more often than what cannot, and saying so would not pay.
"""
MOST_PATIENT = 30.0  # seconds, as which longer deadlines count


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """The configuration of overload control."""

    bounds: QueueBounds = field(default_factory=QueueBounds)
    tenant_bounds: QueueBounds = field(default_factory=QueueBounds)
    deadlines: bool = True  # refuse what cannot be in time
    confidence: float = 0.9  # that the estimate of one that is admitted holds
    prefer: Prefer = Prefer.BALANCED  # until a policy says otherwise
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
        pipeline: Pipeline,
    ) -> None:
        self.calibration = EstimateCalibration(config.confidence, pipeline)
        self.deferred = 0  # admitted without a deadline, later than their class is meant to be
        self.refuses_late = True  # False: what would be late is let in, as a replay of what became of it does
        self._config, self._scheduler, self._backlog = config, scheduler, backlog
        self._drain, self._lengths, self._estimator = drain, lengths, estimator
        self._policy = SchedulingPolicy(prefer=config.prefer)
        fair = scheduler.waiting
        self._fair = fair if isinstance(fair, FairQueue) else None
        self._reserve = Reserve()
        if self._fair is not None:
            self._fair.shares = self._reserve
        self._typical = 0.0  # prompt tokens, of what is offered
        self._patience = 0.0  # seconds that it may wait for a first token, of what has a deadline for it
        self._borderline = 0

    def admit(self, sequence: Sequence, now: float) -> Load:
        """Let the sequence wait, or raise an `AdmissionRefused`; returns the work that it adds while it waits.

        Where it has a target, its estimates are set.
        """
        output = self._lengths.mean(sequence.tenant, sequence.max_tokens)
        load = self._backlog.load_of(sequence, output)
        self._offered(sequence, load, now)
        if self._backlog.total.count:  # an empty queue takes anything: it can only run at once
            self._check_bounds(sequence, load)
        if self._config.deadlines and _has_target(sequence):
            self._check_deadline(sequence, now)
        self._estimator.arrived(sequence, output)
        return load

    def policy_changed(self, policy: SchedulingPolicy, aging: Aging) -> None:
        self._policy = policy
        self._backlog.aging = aging

    def _offered(self, sequence: Sequence, load: Load, now: float) -> None:
        """Note what is asked for, whether it is let in or not."""
        weight = TYPICAL_WEIGHT if self._typical else 1.0
        self._typical += weight * (load.tokens - self._typical)
        if sequence.first_token_by is not None:
            slack = min(max(0.0, sequence.first_token_by - now), MOST_PATIENT)
            self._patience += (TYPICAL_WEIGHT if self._patience else 1.0) * (slack - self._patience)
        if self._fair is not None:
            reserve, tenant, account = self._reserve, sequence.tenant, self._fair.account(sequence.tenant)
            reserve.offered(tenant, account.weight, load.seconds, account.charged, now)
            if reserve.is_within(tenant):
                reserve.arrived_within(load.tokens * self._estimator.a_token, sequence.due - now, now)

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
        if self.refuses_late:
            self._refuse_late(sequence, estimate, calibrated, now)
        self.calibration.overtaken(estimate.behind, estimate.prefill)
        knows_length = self._lengths.knows(sequence.tenant, sequence.max_tokens)
        self.calibration.track(sequence, calibrated, knows_length)
        sequence.first_token_estimate = calibrated.first_token.reported
        sequence.last_token_estimate = calibrated.last_token.reported
        target = sequence.first_token_target
        if sequence.first_token_by is None and target is not None and calibrated.first_token.reported > target:
            self.deferred += 1

    def _refuse_late(self, sequence: Sequence, estimate: Estimate, calibrated: CalibratedEstimate, now: float) -> None:
        if self._scheduler.has_work:
            late = self._first_token_late(sequence, estimate, calibrated, now)
            late = late or self._last_token_late(sequence, estimate, calibrated, now)
        else:
            late = _hopeless(sequence, estimate, now)
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
        excess = calibrated.first_token.likely - slack
        reserve, tenant = self._reserve, sequence.tenant
        if not reserve.is_needed or reserve.is_beyond(tenant):
            room = reserve.room(tenant, slack, now)
            excess += self._more_room(estimate, slack, room) + room.seconds
            excess = max(excess, self._harm(sequence.priority_class, estimate, room.seconds, now))
        if excess <= 0:
            return None
        own_doing = estimate.own_wait >= excess
        until = self._until_possible(estimate, slack)
        return DeadlineInfeasible("first", calibrated.first_token.most, slack, own_doing, until)

    def _more_room(self, estimate: Estimate, slack: float, room: Room) -> float:
        """Returns the seconds of room that a prompt needs beyond its own prefill and what it leaves to others, by what
        overload is to spare.
        """
        own, typical, prefer = estimate.prefill, self._typical * estimate.a_token, self._policy.prefer
        if prefer is Prefer.TOKENS:
            return max(0.0, ROOM_OF_TOKENS * typical - own)
        if not typical or slack <= 0.0:
            return 0.0
        of_size = SIZE_OF_REQUESTS if prefer is Prefer.REQUESTS else 0.0
        of_size += SIZE_OF_EXCESS * room.excess * room.excess * room.kept / slack
        left = slack - room.seconds
        taken = min(1.0, estimate.wait / left) if left > 0.0 else 1.0
        of_patience = ROOM_OF_PATIENCE * max(0.0, min(slack, MOST_PATIENT) / self._patience - 1.0)
        return own * taken * (of_patience + of_size * max(0.0, own / typical - 1.0))

    def _harm(self, level: int, estimate: Estimate, room: float, now: float) -> float:
        """Returns by how many seconds somebody of a class as urgent is late at the most who would be in time without
        the newcomer; 0 if nobody is. O(all of them), which is most of a decision where many wait.
        """
        worst, prefill, bounds = 0.0, estimate.prefill, dict[int, BoundLine]()
        for sequence, first_token in estimate.behind:
            due, of = sequence.first_token_by, sequence.priority_class
            if due is None or of > level:
                continue
            likely = bounds.get(of)
            if likely is None:
                likely = bounds[of] = self.calibration.likely(of)
            slack = due - now - room
            excess = likely.at(first_token) - slack
            if excess > worst and likely.at(first_token - prefill) <= slack:
                worst = excess
        return worst

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
        if not late.slack < late.estimate <= BORDERLINE * late.slack:
            return False
        self._borderline += 1
        return self._borderline % PROBE_EVERY == 0

    def _until_possible(self, estimate: Estimate, slack: float) -> float:
        """Returns the seconds until so much would have drained that the same request could be in time."""
        return self._until_drained(self._backlog.total.seconds + estimate.prefill, slack)

    def _until_drained(self, seconds: float, slack: float) -> float:
        rate = self._drain.slow_rate
        return (seconds - slack * rate) / rate


def _hopeless(sequence: Sequence, estimate: Estimate, now: float) -> DeadlineInfeasible | None:
    """Returns why even an idle machine would be late by far, with the first token, whatever the estimate is off; it
    refuses nobody else.
    """
    for by in (sequence.first_token_by, sequence.done_by):
        if by is not None and by - now < HOPELESS * estimate.first_token:
            return DeadlineInfeasible("first", estimate.first_token, by - now, False, 0.0)
    return None


def _has_target(sequence: Sequence) -> bool:
    """Returns whether the sequence has a deadline or a target. One that has none costs no estimate."""
    has_deadline = sequence.first_token_by is not None or sequence.done_by is not None
    return has_deadline or sequence.first_token_target is not None
