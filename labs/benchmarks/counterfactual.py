"""The counterfactual of a refusal: the simulated world is forked, and in the other world the request is admitted.

The request keeps its deadline there, and everything else goes on: later requests are admitted or refused by the state
that they meet. A refusal was wrong when the other world has more good requests among the arrivals of the next `HORIZON`
seconds, the request itself included. The world without it needs no second run: it is the run that goes on.
"""

import os
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from admission.outcome import AdmissionRefused, DeadlineInfeasible
from labs.simulation.arrival import Arrival
from labs.simulation.loop import Loop
from labs.simulation.recorder import AttemptOutcome

HORIZON = 30.0  # seconds of arrivals that the request may affect
_FOUND = struct.Struct("<?i")  # whether the request was good, and how many were in all


@dataclass(frozen=True, slots=True)
class Replay:
    """One refusal in the world in which it was let in."""

    refused: Arrival
    coming: Collection[int]  # sessions of all that came within the horizon, its own among them
    was_good: bool  # the request itself
    good: int  # of all of those


@dataclass(slots=True)
class Regrets:
    """The replayed refusals, and the outcomes of the same requests in the run itself."""

    replays: list[Replay] = field(default_factory=list)
    good: dict[int, bool] = field(default_factory=dict)  # by session, in the run itself

    @property
    def looked(self) -> int:
        return len(self.replays)

    @property
    def gains(self) -> list[int]:
        """The additional good requests of each other world."""
        return [replay.good - sum(self.good[session] for session in replay.coming) for replay in self.replays]

    @property
    def wrong(self) -> float:
        """The share of the refusals whose other world has more good requests in all."""
        return sum(gain > 0 for gain in self.gains) / self.looked if self.looked else 0.0

    @property
    def good_itself(self) -> float:
        """The share of refused requests that would have been good themselves, not counting their cost to others."""
        return sum(replay.was_good for replay in self.replays) / self.looked if self.looked else 0.0

    @property
    def mean_gain(self) -> float:
        """The mean gain of good requests without a refusal; below 0, refusals were right on the whole."""
        return sum(self.gains) / self.looked if self.looked else 0.0

    def ended(self, outcomes: Mapping[int, AttemptOutcome]) -> None:
        """Note the outcomes of the run itself, by session."""
        self.good = {session: outcome is AttemptOutcome.GOOD for session, outcome in outcomes.items()}


class ForkingLoop(Loop):
    """A `Loop` that looks into every n-th refusal for a deadline. POSIX only; the process must have one thread.

    Each arrival is a session of its own, and nobody tries again.
    """

    regrets: Regrets
    every = 0  # 0: none
    refusals = 0

    def _refused(self, arrival: Arrival, refusal: AdmissionRefused, now: float) -> None:
        self.refusals += isinstance(refusal, DeadlineInfeasible)
        if self.every and isinstance(refusal, DeadlineInfeasible) and self.refusals % self.every == 0:
            self.regrets.replays.append(self._replayed(arrival, now))
        super()._refused(arrival, refusal, now)

    def _replayed(self, arrival: Arrival, now: float) -> Replay:
        coming = frozenset({arrival.session, *(a.session for time, _, a in self._due if time <= now + HORIZON)})
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writing, _FOUND.pack(*self._let_in(arrival, coming, now)))
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            found = pipe.read()
        os.waitpid(child, 0)
        return Replay(arrival, coming, *_FOUND.unpack(found))

    def _let_in(self, arrival: Arrival, coming: Collection[int], now: float) -> tuple[bool, int]:
        """Run on with the request admitted until all who come are served; returns whether it was good, and how many
        were.
        """
        self.every = 0
        control, seen = self._core.control, len(self._recorder.outcomes)
        control.refuses_late = False
        self._enter_freely(arrival, now)
        control.refuses_late = True
        self._plan(now)
        horizon, outcomes = now, dict[int, AttemptOutcome]()
        while not (self.is_over or coming <= outcomes.keys()):
            horizon = max(horizon, self.next_at) + 1.0
            self.advance(horizon)
            outcomes |= by_session(self._recorder.outcomes[seen:])
            seen = len(self._recorder.outcomes)
        good = [session for session in coming if outcomes.get(session) is AttemptOutcome.GOOD]
        return arrival.session in good, len(good)


def by_session(outcomes: Iterable[tuple[Arrival, AttemptOutcome]]) -> dict[int, AttemptOutcome]:
    """Returns the outcome of each session's last attempt."""
    last: dict[int, tuple[int, AttemptOutcome]] = {}
    for arrival, outcome in outcomes:
        if arrival.session not in last or arrival.attempt >= last[arrival.session][0]:
            last[arrival.session] = arrival.attempt, outcome
    return {session: outcome for session, (_, outcome) in last.items()}
