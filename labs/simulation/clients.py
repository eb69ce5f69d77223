"""Clients that retry, or do not, when they are refused.

Clients with `BudgetedRetries` wait as long as `Retry-After` says, spread by jitter, and share a retry budget, so that
retries are at most a tenth of the requests (Beyer et al., Site Reliability Engineering, 2016). Those with
`ImmediateRetries` try again at once, as often as they may.
"""

from collections.abc import Iterable
from random import Random
from typing import Protocol

from admission.outcome import AdmissionRefused
from backend.scheduler.scheduled_step import NewToken
from backend.scheduler.sequence import Sequence
from labs.simulation.arrival import Arrival


class Clients(Protocol):
    """All clients of one run together."""

    def sent(self, arrival: Arrival) -> None:
        """Record an attempt that they send."""
        ...

    def retry(self, arrival: Arrival, refusal: AdmissionRefused, now: float) -> Arrival | None:
        """The next attempt, later than now; None when they give up."""
        ...


class NoRetries:
    """A refused request is not tried again."""

    def sent(self, arrival: Arrival) -> None:
        pass

    def retry(self, arrival: Arrival, refusal: AdmissionRefused, now: float) -> Arrival | None:
        return None


class ImmediateRetries:
    """A refused request is tried up to `most` times more, each time one round trip after the refusal."""

    def __init__(self, most: int = 4, round_trip: float = 0.1) -> None:
        self._most, self._round_trip = most, round_trip

    def sent(self, arrival: Arrival) -> None:
        pass

    def retry(self, arrival: Arrival, refusal: AdmissionRefused, now: float) -> Arrival | None:
        if arrival.attempt >= self._most:
            return None
        return arrival._replace(time=now + self._round_trip, attempt=arrival.attempt + 1)


class BudgetedRetries:
    """A refused request is tried up to `most` times more, each `Retry-After` x U(1, 2) later, within a budget."""

    def __init__(self, seed: int, most: int = 2, budget: float = 0.1, reserve: float = 10.0) -> None:
        """`budget` is the number of retries for each request; `reserve` is the largest saved-up budget."""
        self._random = Random(seed)
        self._most, self._budget, self._reserve = most, budget, reserve
        self._saved = 0.0

    def sent(self, arrival: Arrival) -> None:
        """Let each first attempt pay into the budget."""
        if arrival.attempt == 0:
            self._saved = min(self._saved + self._budget, self._reserve)

    def retry(self, arrival: Arrival, refusal: AdmissionRefused, now: float) -> Arrival | None:
        if arrival.attempt >= self._most or self._saved < 1:
            return None
        self._saved -= 1
        wait = refusal.retry_after * self._random.uniform(1, 2)
        return arrival._replace(time=now + wait, attempt=arrival.attempt + 1)


class Sessions:
    """Sessions: each turn comes its wait after the previous answer."""

    def __init__(self) -> None:
        self._turns: dict[Sequence, Arrival] = {}  # running turns with a next one

    def sent(self, sequence: Sequence, arrival: Arrival) -> None:
        if arrival.turns:
            self._turns[sequence] = arrival

    def ended(self, sequence: Sequence) -> None:
        """End the session of a sequence without an answer."""
        self._turns.pop(sequence, None)

    def answered(self, new_tokens: Iterable[NewToken], now: float) -> list[Arrival]:
        """The turns that follow the answers completed by these tokens."""
        if not self._turns:
            return []
        ended = [self._turns.pop(sequence, None) for sequence, _, reason in new_tokens if reason is not None]
        following = [arrival.next_turn(now) for arrival in ended if arrival is not None]
        return [arrival for arrival in following if arrival is not None]
