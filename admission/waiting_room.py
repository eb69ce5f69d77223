"""Between a request's arrival and its first step: who is let in, what waits, who is given up."""

from collections.abc import Iterable

from admission.backlog import Backlog
from admission.deadline import Patience
from admission.drain import DrainMeter
from admission.overload import AdmissionControl
from admission.pipeline import Pipeline
from admission.step_time import StepWork
from backend.flight import Flight
from backend.sequence import Sequence, Status


class WaitingRoom:
    """Keeps the backlog, the drain, the steps in flight and the promises up to date. Told of everything by the core."""

    def __init__(
        self, backlog: Backlog, drain: DrainMeter, pipeline: Pipeline, control: AdmissionControl, patience: Patience
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

    def planned(self, flight: Flight, work: StepWork, now: float) -> None:
        """A step was planned that has this work to do."""
        self._pipeline.planned(work, now)
        for sequence in flight.admitted:
            self._leave(sequence, now)

    def lost(self) -> None:
        """None of the steps that were planned and not completed took place."""
        self._pipeline.lost()

    def take_back(self, preempted: Iterable[Sequence], now: float) -> None:
        """They wait again, unless they run or have ended since. Telling this twice does nothing."""
        for sequence in preempted:
            if sequence.status in (Status.PREEMPTED, Status.WAITING):
                self._wait(sequence, now)

    def completed(self, flight: Flight, now: float) -> None:
        """Its tokens have been accounted for. Only prefills bring first tokens."""
        self._pipeline.completed(now)
        for sequence in flight.sampled[flight.batch.num_decodes :]:
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
