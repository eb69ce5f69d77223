"""What would have become of a refused request: the simulated world is forked, and in the other one it is let in."""

import os
from dataclasses import dataclass, field

from admission.outcome import AdmissionRefused
from admission.simulation.arrival import Arrival
from admission.simulation.loop import Loop
from admission.simulation.recorder import AttemptOutcome, Recorder


class _Found(Exception):
    """The outcome that was looked for is known."""


class WatchingRecorder(Recorder):
    """Stops the run when the outcome of `watched` is known."""

    watched: Arrival | None = None

    def _note(self, arrival: Arrival, outcome: AttemptOutcome) -> None:
        super()._note(arrival, outcome)
        if arrival is self.watched:
            raise _Found(outcome)


@dataclass(slots=True)
class Regrets:
    """Refusals that were looked into, and those of them that would have been good."""

    looked: int = 0
    good: int = 0
    lengths: list[int] = field(default_factory=list)  # prompts of the good ones

    @property
    def share(self) -> float:
        return self.good / self.looked if self.looked else 0.0


class ForkingLoop(Loop):
    """A `Loop` that looks into every n-th refusal. POSIX only; the process must have one thread."""

    regrets: Regrets
    every = 0  # 0: none
    refusals = 0

    def _refused(self, arrival: Arrival, refusal: AdmissionRefused, now: float) -> None:
        self.refusals += 1
        if self.every and self.refusals % self.every == 0:
            self.regrets.looked += 1
            self.regrets.good += self._would_be_good(arrival, now)
        super()._refused(arrival, refusal, now)

    def _would_be_good(self, arrival: Arrival, now: float) -> bool:
        child = os.fork()
        if child == 0:
            os._exit(self._let_in(arrival, now))
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status) == 0

    def _let_in(self, arrival: Arrival, now: float) -> int:
        """Run on with the request admitted, without a deadline, unless the queue is full; 0 when it turns out good."""
        recorder = self._recorder
        assert isinstance(recorder, WatchingRecorder)
        self.every = 0
        recorder.watched = admitted = arrival._replace(deadline=None)
        try:
            self._arrive(admitted, now)
            self._plan(now)
            self.run(())
        except _Found as found:
            return int(found.args[0] is not AttemptOutcome.GOOD)
        return 1
