"""The core: every decision between a request's arrival and its last token, made of timed events alone."""

from collections.abc import Iterable

from admission.aging import Aging
from admission.backlog import Backlog, DrainMeter
from admission.deadline import Expiry
from admission.ledger import Ledger
from admission.memory import FuturePeak, Gate
from admission.orderings.ordering import Ordering
from admission.output_length import OutputLengths
from admission.overload import AdmissionControl
from admission.prefill_sizer import PrefillSizer
from admission.request import Asked
from admission.scheduling_policy import SchedulingPolicy
from admission.step_time import Pipeline, StepWork
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.scheduled_step import Delta, ScheduledStep
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import FinishReason, Sequence, Status


class WaitingRoom:
    """Keeps the backlog, the drain, the steps in flight and the promises up to date. Told of everything by the core."""

    def __init__(
        self, backlog: Backlog, drain: DrainMeter, pipeline: Pipeline, control: AdmissionControl, patience: Expiry
    ) -> None:
        self.backlog, self.drain, self.control = backlog, drain, control
        self._pipeline, self._patience = pipeline, patience

    def admit(self, sequence: Sequence, now: float) -> None:
        """Raises `Refused`, and then keeps nothing of it."""
        self.control.admit(sequence, now)

    def arrived(self, sequence: Sequence, now: float) -> None:
        self._wait(sequence, now)
        self._patience.arrived(sequence, now)

    def due(self, now: float) -> list[Sequence]:
        """Those whose time is over; each is to be ended."""
        return self._patience.due(now)

    def planned(self, scheduled: ScheduledStep, work: StepWork, now: float) -> None:
        """A step was planned that has this work to do."""
        self._pipeline.planned(work, now)
        for sequence in scheduled.admitted:
            self._leave(sequence, now)

    def lost(self) -> None:
        """None of the steps that were planned and not completed took place."""
        self._pipeline.lost()

    def take_back(self, preempted: Iterable[Sequence], now: float) -> None:
        """They wait again, unless they run or have ended since. Telling this twice does nothing."""
        for sequence in preempted:
            if sequence.status in (Status.PREEMPTED, Status.WAITING):
                self._wait(sequence, now)

    def completed(self, scheduled: ScheduledStep, now: float) -> None:
        """Its tokens have been accounted for. Only prefills bring first tokens."""
        self._pipeline.completed(now)
        for sequence in scheduled.sampled[scheduled.batch.num_decodes :]:
            if len(sequence.output) == 1:
                self.control.promises.first_token(sequence, now)

    def answered(self, sequence: Sequence, now: float) -> None:
        """It has had its last token."""
        self.control.promises.last_token(sequence, now)

    def expired(self, sequence: Sequence, now: float) -> None:
        """Its time is over."""
        self.control.promises.expired(sequence, now)

    def ended(self, sequence: Sequence, now: float) -> None:
        """In whatever state; those that expired or were answered have been told of before."""
        self.control.promises.forget(sequence)
        self._leave(sequence, now)

    def _wait(self, sequence: Sequence, now: float) -> None:
        self.backlog.add(sequence)
        self.drain.look(True, now)

    def _leave(self, sequence: Sequence, now: float) -> None:
        load = self.backlog.discard(sequence)
        if load is not None:
            self.drain.left(load.seconds, self.backlog.total.count > 0, now)
            self._patience.left_queue(sequence, now)


PREPAID_SHARE = 0.5
"""Of the output expected of a newcomer. Prepaying all makes service lag behind what was paid, by what is still to come;
prepaying none lets it run ahead by as much. The gap of `benchmarks/fairness.py` at Q = 512 is 3.1k tokens, not 5.2k.
"""


class TenantHooks:
    """The scheduler's `Policy` by tenants and time: pace by promises, memory by forecast, victims by debt."""

    def __init__(
        self,
        ordering: Ordering,
        ledger: Ledger,
        pace: PrefillSizer,
        gate: Gate,
        forecast: FuturePeak,
        lengths: OutputLengths,
    ) -> None:
        self.prefill_room = pace.prefill_room
        self._ordering = ordering
        self._ledger = ledger
        self._gate = gate
        self._forecast = forecast
        self._lengths = lengths

    def admits(self, sequence: Sequence, running: Iterable[Sequence], num_free: int) -> bool:
        return self._gate(sequence, running, num_free)

    def peak(self, sequences: Iterable[Sequence]) -> int:
        return self._forecast.blocks(sequences)

    def admitted(self, sequence: Sequence) -> None:
        """A newcomer pays ahead, once: what was preempted is still paid for."""
        if sequence.is_newcomer:
            expected = self._lengths.mean(sequence.tenant, sequence.max_tokens)
            self._ledger.prepay(sequence, PREPAID_SHARE * expected)

    def victim_rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Of one class, the tenant deepest in debt first; of one tenant, the least work lost; then the youngest."""
        return (-self._ordering.standing(sequence.tenant), -sequence.num_computed_tokens, sequence.arrival)


class Controller:
    """Implements `backend.engine.Core`. Pure: each call is an event with its time, in seconds of an injected clock.

    Owns the scheduler, and tells the ledger and the waiting room what is planned, measured and over.
    """

    def __init__(
        self, scheduler: Scheduler, ordering: Ordering, ledger: Ledger, lengths: OutputLengths, room: WaitingRoom
    ) -> None:
        self.scheduler = scheduler
        self.lengths = lengths
        self.room = room
        self._ordering = ordering
        self._ledger = ledger
        self.given_up: list[Sequence] = []  # not taken yet

    def asked(self, asked: Asked, now: float) -> None:
        """Decides nothing: what limits say of a request is not the core's. It is for whoever records the core."""

    def arrive(self, sequence: Sequence, now: float) -> None:
        """Queue it. Raises a `Refused` that says why not."""
        sequence.arrival = now
        self.room.admit(sequence, now)
        self.scheduler.add(sequence)
        self.room.arrived(sequence, now)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self.scheduler.holdings.now = now
        self.scheduler.finish(sequence, reason)
        if reason is FinishReason.STOP:
            self._answered(sequence, now)
        self._ended(sequence, now)

    def allow(self, tenant: str, blocks: int | None, now: float) -> None:
        """The tenant's lease on KV memory is this many blocks from now on; None: it needs none."""
        self.scheduler.allow(tenant, blocks)

    def extend(self, sequence: Sequence, tokens: int, now: float) -> None:
        """The sequence may generate `tokens` more than it was allowed so far."""
        if sequence.status is not Status.FINISHED:
            self.scheduler.extend(sequence, tokens)

    def policy_changed(self, terms: SchedulingPolicy, now: float) -> None:
        """From now on these terms hold."""
        aging = Aging(offsets=terms.offsets)
        self._ordering.policy_changed(terms.weights, aging)
        self.room.control.policy_changed(terms, aging)

    def standing(self, tenant: str) -> float:
        """The tenant's credit, in the unit of account; below 0: its debt."""
        return self._ordering.standing(tenant)

    def plan(self, now: float) -> Batch | None:
        if self.scheduler.is_full:
            return None
        self._expire(now)
        self._ordering.at(now)
        self.scheduler.holdings.now = now
        batch = self.scheduler.plan()
        for sequence in self.scheduler.take_ended():
            self._ended(sequence, now)
            self.given_up.append(sequence)
        if batch is not None:
            scheduled = self.scheduler.in_flight[-1]
            work = self._ledger.planned(scheduled)
            self.room.planned(scheduled, work, now)
        self.room.take_back(self.scheduler.preempted, now)
        return batch

    def take_ended(self) -> list[Sequence]:
        """Those that were given up since the last call: their deadlines passed, or their memory went to others.

        No decision depends on when it is called.
        """
        given_up, self.given_up = self.given_up, []
        return given_up

    def complete(self, output: StepOutput, now: float) -> list[Delta]:
        self._expire(now)
        self.scheduler.holdings.now = now
        scheduled = self.scheduler.in_flight[0]
        deltas = self.scheduler.complete(output)
        self._ledger.completed(output.elapsed)
        self.room.completed(scheduled, now)
        for sequence, _, reason in deltas:
            if reason is not None:
                self._answered(sequence, now)
                self._ended(sequence, now)
        return deltas

    def lost(self, now: float) -> bool:
        """The device had no memory for the oldest step in flight: it and those behind it are as if never planned.

        What they were charged is returned. False when nothing less can be planned in their place.
        """
        self.scheduler.holdings.now = now
        self._ledger.lost()
        feasible = self.scheduler.lost()
        self.room.lost()
        self.room.take_back(self.scheduler.preempted, now)
        return feasible

    def _expire(self, now: float) -> None:
        for sequence in self.room.due(now):
            self.room.expired(sequence, now)
            self.finish(sequence, FinishReason.EXPIRED, now)
            self.given_up.append(sequence)

    def _answered(self, sequence: Sequence, now: float) -> None:
        """Its answer is complete."""
        self.lengths.observe(sequence.tenant, sequence.max_tokens, len(sequence.output))
        self.room.answered(sequence, now)

    def _ended(self, sequence: Sequence, now: float) -> None:
        self._ledger.ended(sequence)
        self.room.ended(sequence, now)
