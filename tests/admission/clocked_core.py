"""A core on a virtual clock, over a device that only takes time and draws the tokens it is told to."""

from collections import deque
from collections.abc import Callable, Collection

from admission.controller import Controller
from backend.scheduler.batch import NO_TOKEN, StepOutput
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import FinishReason, Sequence
from tests.backend.sequences import END, TOKEN


class ClockedCore:
    """Its steps take as many seconds as `seconds` says, each from the completion of the one before."""

    def __init__(self, core: Controller, seconds: Callable[[ScheduledStep], float], now: float = 0.0) -> None:
        self.core = core
        self.scheduler = core.scheduler
        self.now = now
        self.elapsed = 0.0  # in the last step that was completed
        self.launched: deque[ScheduledStep] = deque()
        self.forced: dict[
            str, int
        ] = {}  # ids of sequences, and how many tokens follow each of theirs without being drawn
        self.failing: set[str] = set()  # ids of the sequences for which the model computes no numbers
        self.accepts: Callable[[int], int] = int  # how many of that many drafted tokens are drawn
        self._seconds = seconds

    def add(self, sequence: Sequence) -> Sequence:
        """Let a sequence arrive now. Raises `AdmissionRefused`."""
        self.core.arrive(sequence, self.now)
        return sequence

    def finish(self, sequence: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self.core.finish_sequence(sequence, reason, self.now)

    def plan(self) -> list[Sequence]:
        """Plan as many steps as may be in flight; returns who was given up."""
        while self.core.schedule(self.now) is not None:
            self.launch(self.scheduler.in_flight[-1])
        return self.core.take_ended()

    def launch(self, step: ScheduledStep) -> None:
        self.launched.append(step)

    def complete(self, ended: Collection[str] = ()) -> None:
        """Complete the oldest step, in which those whose ids are given draw the token that ends them. Those that are
        `failing` draw none, and are ended as `StepLoop` does it.
        """
        step = self.launched.popleft()
        self.elapsed = self._seconds(step)
        self.now += self.elapsed
        drawn = dict.fromkeys(ended, END) | dict.fromkeys(self.failing, NO_TOKEN)
        tokens = [drawn.get(sequence.id, TOKEN) for sequence in step.sampled]
        forced = {
            row: [TOKEN] * self.forced[sequence.id]
            for row, sequence in enumerate(step.sampled)
            if sequence.id in self.forced and tokens[row] == TOKEN
        }
        for row, draft in step.batch.drafts:
            if tokens[row] == TOKEN and (accepted := self.accepts(len(draft))):
                forced[row] = [TOKEN] * accepted
        self.core.update_from_output(StepOutput(step.batch.step, tokens, self.elapsed, forced=forced or None), self.now)
        for sequence in step.failed:
            self.finish(sequence, FinishReason.FAILED)

    def lose(self) -> bool:
        """Let the device have no memory for the oldest step; returns whether to go on."""
        self.launched.clear()
        return self.core.rollback(self.now)

    def step(self, *ended: str) -> list[Sequence]:
        """Plan, and complete the oldest step; returns who was given up."""
        given_up = self.plan()
        if self.launched:
            self.complete(ended)
        return given_up

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def drain(self) -> None:
        """Serve until nothing can run any more."""
        while self.scheduler.has_work:
            self.plan()
            if not self.launched:
                break
            self.complete()
