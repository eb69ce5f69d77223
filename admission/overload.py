"""Admission control: an arrival waits, or is refused at once, by its forecast.

A request with a deadline is admitted if it is forecast in time, and if no earlier admitted request with a deadline
becomes late by it (the admission test of earliest deadline first: Liu and Layland, 1973). An admitted request is never
given up for another.

Room. A tenant in debt must leave a part of its slack free for the others, and a lower class for the higher classes of
its tenant. A debtor's part grows with the debt (`DueOrder.ramp`) up to a guard, the same in every class: between
tenants shares decide, not classes. Guards are learned, one for all debtors, and for lower classes one by tenant and
class: each rises when a request of a tenant without debt is refused that would be in time without that work, and falls
when one is admitted, so that `WRONGED_SHARE_OF_REQUESTS` of them are refused for that work. While no request is
wronged, debtors' guard falls from `GUARD_STEP_SHARE` to 0 in some 50 admissions, and that of lower classes is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from admission.backlog import Backlog, DrainMeter, Load
from admission.calibration import CalibratedEstimate, EstimateCalibration, LatencyBounds
from admission.forecast import Delayed, Forecast, Forecaster
from admission.order import DueOrder
from admission.outcome import DeadlineInfeasible, QueueFull, TenantQueueFull
from admission.output_length import OutputLengths
from admission.promise import Promise
from admission.scheduling_policy import Excess, QueueBounds, SchedulingPolicy
from admission.share import ASKING_S
from admission.step_times.step_time import Pipeline
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence

PATIENCE_MEAN_S = 10.0  # seconds of admitted prefill, some 50 requests, over which the mean deadline is taken
MAX_PATIENCE_S = 30.0  # longer deadlines count as this
HOPELESS_SHARE_OF_ESTIMATE = 0.5  # of the time of a first token on an idle machine
PATIENCE_ROOM_PREFILLS = 16.0
"""The room that a patient request leaves, in prefills of its own, for each multiple by which its deadline exceeds the
mean, scaled by how much of its time is taken: without it, patient requests would be admitted until all of their time is
taken, and would hold up all later arrivals.
"""
WRONGED_SHARE_OF_REQUESTS = 0.02  # of tenants without debt, refused for debtors and their own lower classes
GUARD_STEP_SHARE = 0.25  # by which a guard moves for a wronged request; debtors' begins there


@dataclass(frozen=True, slots=True)
class OverloadConfig:
    """The configuration of overload control."""

    bounds: QueueBounds = field(default_factory=QueueBounds)
    tenant_bounds: QueueBounds = field(default_factory=QueueBounds)
    deadlines: bool = True  # infeasible requests are refused
    confidence: float = 0.95  # that an admitted request is in time
    class_bounds: bool = True  # bounds of classes hold


class LearnedGuard:
    """The part of their slack that debtors leave free, and a tenant's lower classes for its higher ones."""

    def __init__(self) -> None:
        self._debtors_part = GUARD_STEP_SHARE
        # By tenant and class protected, what its lower classes leave, above 0, and when it was learned: within
        # `ASKING_S`, the oldest first.
        self._own_parts: dict[tuple[str, int], tuple[float, float]] = {}

    def kept_for(self, tenant: str, priority_class: int, ramp: float, now: float) -> float:
        """Return the part of its slack that a newcomer of the class with a deadline leaves, `ramp` being its tenant's
        debt (`DueOrder.ramp`). A higher class counts while requests of it, of the same tenant, are admitted or wronged:
        otherwise no request needs the room.
        """
        owed = ramp * self._debtors_part
        higher = [self._own_parts.get((tenant, level), (0.0, -inf)) for level in range(priority_class)]
        return max([owed, *[part for part, learned_at in higher if now - learned_at < ASKING_S]])

    def learn(self, tenant: str, priority_class: int, by_debtors: bool, by_lower_classes: bool, now: float) -> None:
        """Learn from a request of a tenant without debt: it was refused for the work of debtors, for that of its
        tenant's lower classes, for both together, or for neither: it was admitted.
        """
        self._debtors_part = _moved(self._debtors_part, by_debtors)
        own = self._own_parts
        part, _ = own.pop((tenant, priority_class), (0.0, now))
        if part := _moved(part, by_lower_classes):
            own[tenant, priority_class] = part, now
        while own and now - own[oldest := next(iter(own))][1] >= ASKING_S:
            del own[oldest]


def _moved(part: float, was_wronged: bool) -> float:
    change = 1.0 - WRONGED_SHARE_OF_REQUESTS if was_wronged else -WRONGED_SHARE_OF_REQUESTS
    return min(1.0, max(0.0, part + GUARD_STEP_SHARE * change))


class AdmissionControl:
    """Decides each arrival once, in O(running + a bounded number of the waiting tenants)."""

    def __init__(
        self,
        config: OverloadConfig,
        scheduler: Scheduler,
        backlog: Backlog,
        drain: DrainMeter,
        lengths: OutputLengths,
        forecaster: Forecaster,
        pipeline: Pipeline,
        order: DueOrder | None,
    ) -> None:
        """`order`: the accounts by which debtors leave room; None: no tenant does."""
        self.calibration = EstimateCalibration(config.confidence, pipeline, self._owes)
        self.deferred = 0  # admitted without a deadline, later than its class's target
        self.refuses_late = True  # False: late requests are admitted, as a replay does
        self._config, self._scheduler, self.backlog = config, scheduler, backlog
        self.drain, self.lengths, self.forecaster = drain, lengths, forecaster
        self.policy = SchedulingPolicy()
        self._order, self._guard = order, LearnedGuard()
        self._patience = 0.0  # seconds until the deadlines of admitted requests, a running mean weighted by prefill

    def admit(self, sequence: Sequence, now: float) -> tuple[Load, Promise]:
        """Admit the sequence to the queue, or raise an `AdmissionRefused`; returns its waiting work and its promise.

        The spare class delays no other and is promised nothing: its maker bounds its queue.
        """
        request = sequence.request
        if sequence.is_spare:
            return Load(), Promise()
        output = self.lengths.mean(sequence.tenant, request.max_tokens)
        load = self.backlog.load_of(sequence, output)
        if self._order is not None:  # its demand counts, admitted or refused
            self._order.asked(sequence, now)
        if self.backlog.total.count:  # an empty queue takes any request: it can only run at once
            self._check_bounds(sequence, load)
        targets = request.first_token_by, request.done_by, request.first_token_target
        has_estimate = self._config.deadlines and targets != (None, None, None)
        promise = self._check_deadline(sequence, load, now) if has_estimate else Promise()
        self.forecaster.add_newcomer(load.tokens, output)
        return load, promise

    def _owes(self, sequence: Sequence) -> bool:
        order = self._order
        return order is not None and order.share.credit(order.share.account(sequence.tenant)) < 0.0

    def _check_bounds(self, sequence: Sequence, load: Load) -> None:
        own = self.backlog.of(sequence.tenant)
        most = self.policy.most_waiting(sequence.tenant)
        excess = self._config.tenant_bounds.excess(own, load)
        if excess is None and most is not None and own.count >= max(most, 1):
            excess = Excess("count", most, own.count + 1)
        if excess is not None:
            share = max(1, self.backlog.num_tenants())
            raise TenantQueueFull(excess, self._until_drained((own.seconds + load.seconds) * share, 0.0))
        self._check_shared_bounds(sequence, own, load)

    def _check_shared_bounds(self, sequence: Sequence, own: Load, load: Load) -> None:
        backlog, level = self.backlog, sequence.request.priority_class
        excess = self._config.bounds.shared_excess(backlog.total, own, backlog.num_tenants(), load)
        of_class = self.policy.bounds_of(level) if excess is None and self._config.class_bounds else None
        if of_class is not None:
            own = backlog.of(sequence.tenant, level)
            excess = of_class.shared_excess(backlog.of_class(level), own, backlog.num_tenants(level), load)
        if excess is not None:
            total = backlog.total
            until = self._until_drained(total.seconds + load.seconds, 0.0)
            raise QueueFull(excess, total.count, until, of_class is not None)

    def _check_deadline(self, sequence: Sequence, load: Load, now: float) -> Promise:
        forecast = self.forecaster.of(sequence, sequence.num_tokens - load.tokens, now)
        calibrated = self.calibration.calibrate(sequence, forecast, now)
        if self.refuses_late:
            self._refuse_late(sequence, forecast, calibrated, now)
        self._learn_patience(sequence, forecast, now)
        self.calibration.overtaken(forecast.behind.sequences, forecast.prefill)
        knows_length = self.lengths.knows(sequence.tenant, sequence.request.max_tokens)
        self.calibration.track(sequence, calibrated, knows_length)
        target = sequence.request.first_token_target
        if sequence.request.first_token_by is None and target is not None and calibrated.first_token.reported > target:
            self.deferred += 1
        return Promise(calibrated.first_token.reported, calibrated.last_token.reported)

    def _refuse_late(self, sequence: Sequence, forecast: Forecast, calibrated: CalibratedEstimate, now: float) -> None:
        if self._scheduler.has_work:
            late = self._first_token_late(sequence, forecast, calibrated, now)
            late = late or self._last_token_late(sequence, forecast, calibrated, now)
        else:
            late = _hopeless(sequence, forecast, now)
        if late is None:
            return
        try:
            raise late
        finally:
            del late  # its traceback holds this frame: they would keep each other

    def _first_token_late(
        self, sequence: Sequence, forecast: Forecast, calibrated: CalibratedEstimate, now: float
    ) -> DeadlineInfeasible | None:
        if sequence.request.first_token_by is None:
            return None
        slack, order = sequence.request.first_token_by - now, self._order
        excess = _decisive(calibrated.first_token, forecast) + self._room_of_patience(forecast, slack) - slack
        harm = self._harm(forecast.behind, forecast.prefill, now)
        room = 0.0
        if order is not None:
            tenant, level = sequence.tenant, sequence.request.priority_class
            ramp = order.ramp(order.share.account(tenant))
            room = self._guard.kept_for(tenant, level, ramp, now) * slack
            if not ramp and max(excess, harm) > 0.0:
                by_debtors, by_lower_classes = self._wronged(order, sequence, forecast, excess, now)
                if by_debtors or by_lower_classes:
                    self._guard.learn(tenant, level, by_debtors, by_lower_classes, now)
            elif not ramp and excess + room <= 0.0:
                self._guard.learn(tenant, level, False, False, now)
        excess = max(excess + room, harm)
        if excess <= 0.0:
            return None
        until = self._until_possible(forecast, slack)
        return DeadlineInfeasible("first", calibrated.first_token.most, slack, forecast.own_wait >= excess, until)

    def _wronged(
        self, order: DueOrder, sequence: Sequence, forecast: Forecast, excess: float, now: float
    ) -> tuple[bool, bool]:
        """Return whether a late request, of a tenant without debt, is wronged by debtors, and by its tenant's lower
        classes: without their work it would be in time and make no other late. Both do where neither alone does.
        """
        due = order.due(sequence)
        before = [(entry.sequence, entry.tokens) for entry in order.due_by(due)]
        before += [(one, left) for one, left in self.forecaster.prefilling() if order.due(one) <= due]

        def is_in_time_without(debtors: bool, lower_classes: bool) -> bool:
            makes_way = order.makes_way_for(sequence, debtors, lower_classes)
            freed = sum([tokens for one, tokens in before if makes_way(one)]) * forecast.each
            return excess <= freed and self._harm(forecast.behind, forecast.prefill, now, makes_way) <= 0.0

        if not is_in_time_without(True, True):  # the usual case: nor without a part of that work
            return False, False
        for alone in ((True, False), (False, True)):
            if is_in_time_without(*alone):
                return alone
        return True, True

    def _learn_patience(self, sequence: Sequence, forecast: Forecast, now: float) -> None:
        """Count the deadline of an admitted request by its prefill: refused requests and many tiny ones cost too little
        to decide what is patient.
        """
        if sequence.request.first_token_by is not None:
            slack = min(max(0.0, sequence.request.first_token_by - now), MAX_PATIENCE_S)
            weight = min(1.0, forecast.prefill / PATIENCE_MEAN_S) if self._patience else 1.0
            self._patience += weight * (slack - self._patience)

    def _room_of_patience(self, forecast: Forecast, slack: float) -> float:
        if not self._patience or slack <= 0.0:
            return 0.0
        taken, beyond = min(1.0, forecast.wait / slack), min(slack, MAX_PATIENCE_S) / self._patience - 1.0
        return PATIENCE_ROOM_PREFILLS * forecast.prefill * taken * max(0.0, beyond)

    def _harm(
        self, behind: Delayed, prefill: float, now: float, makes_way: Callable[[Sequence], bool] | None = None
    ) -> float:
        """Return the most seconds by which the newcomer makes a waiting request late that would be in time without it;
        requests that make way for it do not count; 0 if none is late. O(requests behind), the main cost where many
        wait.
        """
        worst, of = 0.0, (0, True, False)
        likely = self.calibration.likely(of)
        for sequence, first_token in zip(behind.sequences, behind.first_tokens):  # noqa: B905 - as in `Ledger`
            due, kind = sequence.request.first_token_by, self.calibration.kind(sequence)
            assert due is not None, "it has a deadline"
            if of != kind:
                of = kind
                likely = self.calibration.likely(of)
            excess = likely.at(first_token) - (due - now)
            if excess <= worst or likely.at(first_token - prefill) > due - now:
                continue
            if makes_way is None or not makes_way(sequence):
                worst = excess
        return worst

    def _last_token_late(
        self, sequence: Sequence, forecast: Forecast, calibrated: CalibratedEstimate, now: float
    ) -> DeadlineInfeasible | None:
        if sequence.request.done_by is None:
            return None
        slack, bounds = sequence.request.done_by - now, calibrated.last_token
        if not forecast.wait and not self.lengths.knows(sequence.tenant, sequence.request.max_tokens):
            bounds = calibrated.first_token
        excess = _decisive(bounds, forecast) - slack
        if excess <= 0:
            return None
        until = self._until_possible(forecast, slack - (forecast.last_token - forecast.first_token))
        return DeadlineInfeasible("last", calibrated.last_token.most, slack, forecast.own_wait >= excess, until)

    def _until_possible(self, forecast: Forecast, slack: float) -> float:
        """Return the seconds until enough has drained for the same request to be in time."""
        return self._until_drained(self.backlog.total.seconds + forecast.prefill, slack)

    def _until_drained(self, seconds: float, slack: float) -> float:
        rate = self.drain.slow_rate
        return (seconds - slack * rate) / rate


def _decisive(bounds: LatencyBounds, forecast: Forecast) -> float:
    """Return the bound that decides. Past errors alone, or unknown lengths of answers, refuse no request that
    waits for no other: without admissions they would not be corrected, nor known.
    """
    return bounds.likely if forecast.wait else min(bounds.likely, bounds.estimate)


def _hopeless(sequence: Sequence, forecast: Forecast, now: float) -> DeadlineInfeasible | None:
    """Return the refusal if the first token would be far too late even on an idle machine, else None. An estimate too
    high by less than a factor of two refuses no feasible request.
    """
    for by in (sequence.request.first_token_by, sequence.request.done_by):
        if by is not None and by - now < HOPELESS_SHARE_OF_ESTIMATE * forecast.first_token:
            return DeadlineInfeasible("first", forecast.first_token, by - now, False, 0.0)
    return None
