"""Who may enter: the engine's core behind a bounded queue. Pure; time comes in with each call."""

from admission.outcome import QueueFull
from backend.batch import Batch, StepOutput
from backend.scheduler import Delta, Scheduler
from backend.sequence import FinishReason, Sequence


class Controller:
    """Implements `backend.engine.Core` over a scheduler, refusing what the queue cannot hold.

    Each call is an event that carries its time, in seconds of the engine's clock.
    """

    def __init__(self, scheduler: Scheduler, max_waiting: int) -> None:
        self.scheduler = scheduler
        self.max_waiting = max_waiting

    def arrive(self, sequence: Sequence, now: float) -> None:
        """Queue it. Raises `QueueFull` when `max_waiting` sequences wait already."""
        waiting = len(self.scheduler.waiting)
        if waiting >= self.max_waiting:
            raise QueueFull(waiting)
        sequence.arrival = now
        self.scheduler.add(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self.scheduler.finish(sequence, reason)

    def plan(self, now: float) -> Batch | None:
        return self.scheduler.plan()

    def take_ended(self) -> list[Sequence]:
        return self.scheduler.take_ended()

    def complete(self, output: StepOutput, now: float) -> list[Delta]:
        return self.scheduler.complete(output)
