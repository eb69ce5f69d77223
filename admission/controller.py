"""The core: every decision between a request's arrival and its last token, driven by timed events alone."""

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Listed
from math import inf

from admission.expiry import Expiry
from admission.ledger import Ledger, work_of
from admission.observer import CoreObserver
from admission.order import DueOrder, class_offsets
from admission.outcome import AdmissionRefused
from admission.overload import AdmissionControl
from admission.promise import Promise
from admission.request import JudgedRequest
from admission.scheduling_policy import SchedulingPolicy
from admission.spare import SpareLast
from admission.step_times.idle_calibration import IdleCalibration, work_of_shape
from admission.step_times.step_time import CopyTime, Pipeline, StepTimeModel
from backend.calibration_steps import CalibrationStep, CalibrationTimes
from backend.paged_kv.block_names import BlockName
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.scheduled_step import NewToken, ScheduledStep
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus

DEADLINE_WAKE_DELAY_S = 1e-3  # after a deadline: at the deadline itself it has not passed yet


class Controller:
    """The core: queues, admits, charges and expires sequences, and plans steps through the scheduler that it owns.

    Pure: each call is an event with its time, in seconds of an injected clock. Every event is told to `observers`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        queue: SpareLast,
        ledger: Ledger,
        copy_time: CopyTime,
        pipeline: Pipeline,
        control: AdmissionControl,
        expiry: Expiry,
        step_times: Listed[StepTimeModel],
        calibrates: bool,
        observer_failed: Callable[[Exception], object],
    ) -> None:
        """`step_times`: of each model; idle calibration is of the first. `calibrates`: the owner of the device is to
        run calibration steps. `observer_failed` is called with the exception of an observer.
        """
        self.scheduler = scheduler
        self.calibrates = calibrates
        self.idle_calibration = IdleCalibration(scheduler.config, step_times[0])
        self.in_flight = scheduler.in_flight  # planned and not yet accounted for, the oldest first
        self.step_times, self.step_time, self.control = step_times, step_times[0], control
        self.lengths, self.backlog, self.drain = control.lengths, control.backlog, control.drain
        self.observers: list[CoreObserver] = []  # told in this order
        self.order, self._queue = queue.order, queue
        self.ledger, self.share = ledger, ledger.share
        self._observer_failed = observer_failed
        self._copy_time = copy_time
        self._pipeline = pipeline
        self._expiry = expiry
        self.given_up: list[Sequence] = []  # by the core itself, and not taken yet

    def requested(self, asked: JudgedRequest, now: float) -> None:
        """Tell observers of a request put to its tenant's limits. The core decides nothing by it."""
        self._tell(lambda observer: observer.requested(asked, now))

    def arrive(self, sequence: Sequence, now: float) -> Promise:
        """Queue the sequence. Raises an `AdmissionRefused`, and then keeps nothing of the sequence."""
        sequence.arrival = now
        self.scheduler.look_up(sequence, now)
        try:
            load, promise = self.control.admit(sequence, now)
        except AdmissionRefused as refusal:
            self._tell_arrived(sequence, refusal, now)
            raise
        self.scheduler.add(sequence, now)
        self.ledger.admitted(sequence, promise)
        if not sequence.is_spare:
            self.backlog.add(sequence, load)
            self.drain.sample(True, now)
        self._expiry.arrived(sequence, now)
        self._tell_arrived(sequence, promise, now)
        return promise

    def finish_sequence(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End the sequence in any state; a no-op once it has ended."""
        self._finish(sequence, reason, now)
        self._tell(lambda observer: observer.finished(sequence, reason, now))

    def allow(self, tenant: str, blocks: int | None, now: float) -> None:
        """Set the tenant's lease on KV memory, in blocks; None: no lease is needed."""
        self.scheduler.allow(tenant, blocks, now)
        self._tell(lambda observer: observer.allowed(tenant, blocks, now))

    def limit_cache(self, tenant: str, floor: int, ceiling: int | None, now: float) -> None:
        """Keep at least `floor` and at most `ceiling` idle cached blocks of the tenant; the floor is not evictable.
        None: no ceiling.
        """
        self.scheduler.kv_manager.limit_cache(tenant, floor, ceiling, now)
        self._tell(lambda observer: observer.cache_limited(tenant, floor, ceiling, now))

    def pin_prefixes(self, tenant: str, names: Collection[BlockName], now: float) -> None:
        """Pin cached blocks of these names for the tenant and on its account, and unpin its others; a block's name
        comes behind the name of its predecessor.
        """
        self.scheduler.kv_manager.pin_prefixes(tenant, names, now)
        self._tell(lambda observer: observer.prefixes_pinned(tenant, names, now))

    def raise_token_limit(self, sequence: Sequence, tokens: int, now: float) -> None:
        """Raise the sequence's token limit by `tokens`."""
        if sequence.status is not SequenceStatus.FINISHED:
            self.scheduler.raise_token_limit(sequence, tokens)
        self._tell(lambda observer: observer.extended(sequence, tokens, now))

    def charge_side_work(self, tenant: str, seconds: float, now: float, is_spare: bool = False) -> None:
        """Charge a tenant for work beside the steps: batches of inputs to embed, and processor seconds, which count as
        engine seconds. Work of the spare class is charged to the tenant's account there.
        """
        self.ledger.charge_side_work(tenant, seconds, now, is_spare)
        self._tell(lambda observer: observer.charged(tenant, seconds, now, is_spare))

    def debts_changed(self, served: Mapping[str, float], replicas: int, now: float) -> None:
        """Take from tenants' credits the engine seconds that other replicas have served them since the last call;
        `replicas` counts all.
        """
        for tenant, seconds in served.items():
            self.share.use(self.share.account(tenant), seconds)
        self._tell(lambda observer: observer.debts_changed(served, replicas, now))

    def set_policy(self, policy: SchedulingPolicy, now: float) -> None:
        self.share.set_policy(policy.weights)
        self.ledger.spare.set_policy(policy.weights)
        if isinstance(self.order, DueOrder):
            self.order.set_policy(class_offsets(first=policy.offsets))
        self._queue.spare.set_policy(class_offsets(0.0))
        self.scheduler.weights_changed()
        self.control.policy = policy
        self._tell(lambda observer: observer.policy_changed(policy, now))

    def calibrate(self, now: float) -> CalibrationStep | None:
        """Return the calibration step to run now, if one is due and the engine is idle; no step is planned until
        `calibrated` is called.
        """
        if not self.calibrates or self.scheduler.has_work or self.scheduler.config.awake_bytes:
            return None
        step = self.idle_calibration.next_step(now)
        if step is not None:
            self._tell(lambda observer: observer.calibrating(step, now))
        return step

    def calibrated(self, measured: CalibrationTimes, now: float, model: int = 0) -> None:
        """Record the times of a model's calibration steps, in seconds: of all steps at the start, or of the one run
        while idle, which may have been lost.
        """
        if not model:
            self.idle_calibration.record_times(measured, now)
        self.step_times[model].calibrate([(work_of_shape(step), seconds) for step, seconds in measured])
        self._tell(lambda observer: observer.calibrated(measured, now, model))

    def credit(self, tenant: str) -> float:
        """Return the tenant's credit in engine seconds per unit of weight; below 0 it is debt."""
        return self.share.credit(self.share.account(tenant))

    def predicted(self, step: ScheduledStep) -> float:
        """Return the predicted device seconds of the step."""
        return self.step_times[step.batch.model].fitted.seconds(work_of(step))

    @property
    def wakes_at(self) -> float | None:
        """The time at which to plan again without an event: a gathered batch is due, or the deadline of a waiting or
        held sequence has passed.
        """
        wakes_at, due = self.scheduler.wakes_at, self._expiry.next_due
        if self.in_flight or not self.scheduler.has_work or not -inf < due < inf:
            return wakes_at
        return due + DEADLINE_WAKE_DELAY_S if wakes_at is None else min(wakes_at, due + DEADLINE_WAKE_DELAY_S)

    def schedule(self, now: float) -> Batch | None:
        """Plan the next step; None when there is nothing to compute, or the most steps are in flight."""
        scheduler = self.scheduler
        if scheduler.is_full or self.idle_calibration.is_running:
            return None
        if self._expiry.next_due < now:
            self._expire(now)
        self._queue.set_time(now)
        self._copy_time.set_time(now)
        batch = scheduler.schedule(now)
        if scheduler.ended:
            for sequence in scheduler.take_ended():
                self._ended(sequence, now)
                self._give_up(sequence, now)
        step = None
        if batch is not None:
            step = self.in_flight[-1]
            self._pipeline.planned(self.ledger.planned(step), now)
            for sequence in step.admitted:
                self._leave_queue(sequence, now)
        if scheduler.preempted:
            self._queue_preempted(now)
        for observer in self.observers:
            try:
                observer.scheduled(step, now)
            except Exception as error:  # noqa: BLE001 - as in `_tell`, without a call for each observer and step
                self._observer_failed(error)
        return batch

    def take_ended(self) -> list[Sequence]:
        """Return the sequences ended by the core since the last call: expired, or out of memory.

        No decision depends on when it is called.
        """
        given_up, self.given_up = self.given_up, []
        return given_up

    def update_from_output(self, output: StepOutput, now: float) -> list[NewToken]:
        """Account for the oldest step in flight; returns its tokens in row order."""
        self._pipeline.completed(now)  # first: an expiry during a stall is blamed on the stall
        if self._expiry.next_due < now:
            self._expire(now)
        step = self.in_flight[0]
        new_tokens = self.scheduler.update_from_output(output, now)
        self.ledger.completed(output.elapsed)
        for sequence in step.sampled[step.batch.num_decodes :]:  # only prefills bring first tokens
            if step.has_brought_first(sequence):
                self.control.calibration.first_token(sequence, now)
        for sequence, _ in step.ended:
            self._answered(sequence, now)
            self._ended(sequence, now)
        for observer in self.observers:
            try:
                observer.updated(step, output, now)
            except Exception as error:  # noqa: BLE001 - as in `_tell`
                self._observer_failed(error)
        return new_tokens

    def rollback(self, now: float) -> bool:
        """Undo the oldest step in flight, for which the device had no memory, and the steps behind it.

        Their charges are returned. Returns False when no smaller step can be planned in their place.
        """
        step = self.in_flight[0]
        self.ledger.lost()
        feasible = self.scheduler.rollback(now)
        self._pipeline.lost()
        self._queue_preempted(now)
        self._tell(lambda observer: observer.rolled_back(step, now))
        return feasible

    def _expire(self, now: float) -> None:
        """End every sequence whose deadline has passed."""
        for sequence in self._expiry.due(now):
            self.control.calibration.expired(sequence, now)
            self._finish(sequence, FinishReason.EXPIRED, now)
            self._give_up(sequence, now)

    def _give_up(self, sequence: Sequence, now: float) -> None:
        self.given_up.append(sequence)
        self._tell(lambda observer: observer.gave_up(sequence, now))

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self.scheduler.finish_sequence(sequence, reason, now)
        if reason is FinishReason.STOP:
            self._answered(sequence, now)
        self._ended(sequence, now)

    def _answered(self, sequence: Sequence, now: float) -> None:
        """Learn from a complete answer; forecasts are not made for the spare class."""
        if sequence.is_spare:
            return
        self.lengths.observe(sequence.tenant, sequence.request.max_tokens, len(sequence.output))
        self.control.calibration.last_token(sequence, now)

    def _ended(self, sequence: Sequence, now: float) -> None:
        """Forget an ended sequence; the calibration has already recorded an expiry or an answer."""
        self.ledger.ended(sequence)
        self._queue.ended(sequence)
        self.control.calibration.forget(sequence, now)
        self._leave_queue(sequence, now)

    def _queue_preempted(self, now: float) -> None:
        """Queue preempted sequences again, unless they run or have ended since. Idempotent."""
        for sequence in self.scheduler.preempted:
            if not sequence.is_spare and sequence.status in (SequenceStatus.PREEMPTED, SequenceStatus.WAITING):
                if sequence not in self.backlog:
                    output = self.lengths.mean(sequence.tenant, sequence.request.max_tokens)
                    self.backlog.add(sequence, self.backlog.load_of(sequence, output))
                self.drain.sample(True, now)

    def _leave_queue(self, sequence: Sequence, now: float) -> None:
        load = self.backlog.discard(sequence)
        if load is not None:
            self.drain.left(load.seconds, self.backlog.total.count > 0, now)
            self._expiry.left_queue(sequence, now)

    def _tell_arrived(self, sequence: Sequence, answer: Promise | AdmissionRefused, now: float) -> None:
        """A frame of its own: a frame that raises the refusal and also holds it would be garbage for the collector."""
        self._tell(lambda observer: observer.arrived(sequence, answer, now))

    def _tell(self, tell: Callable[[CoreObserver], None]) -> None:
        """Tell every observer; one observer's failure keeps the event neither from the others nor from the core."""
        for observer in self.observers:
            try:
                tell(observer)
            except Exception as error:  # noqa: BLE001 - any failure is the observer's own
                self._observer_failed(error)
