"""What clients do about a refusal.

`Patient` clients do as they are told: they wait as long as `Retry-After` says, spread by jitter, and share a retry
budget, so that retries are at most a tenth of the requests (Beyer et al., Site Reliability Engineering, 2016). `Hasty`
ones try again at once, as often as they may.
"""

from random import Random
from typing import Protocol

from admission.outcome import AdmissionRefused
from admission.simulation.arrival import Arrival


class Clients(Protocol):
    def sent(self, arrival: Arrival) -> None:
        """They send this."""
        ...

    def retry(self, arrival: Arrival, refusal: AdmissionRefused, now: float) -> Arrival | None:
        """The next attempt, later than now; None when they give up."""
        ...


class Resigned:
    """A refusal is the end of it."""

    def sent(self, arrival: Arrival) -> None:
        pass

    def retry(self, arrival: Arrival, refusal: AdmissionRefused, now: float) -> Arrival | None:
        return None


class Hasty:
    """Up to `most` attempts more, one round trip after each refusal."""

    def __init__(self, most: int = 4, round_trip: float = 0.1) -> None:
        self._most, self._round_trip = most, round_trip

    def sent(self, arrival: Arrival) -> None:
        pass

    def retry(self, arrival: Arrival, refusal: AdmissionRefused, now: float) -> Arrival | None:
        if arrival.attempt >= self._most:
            return None
        return arrival._replace(time=now + self._round_trip, attempt=arrival.attempt + 1)


class Patient:
    """Up to `most` attempts more, `Retry-After` x U(1, 2) after each refusal, within a budget."""

    def __init__(self, seed: int, most: int = 2, budget: float = 0.1, reserve: float = 10.0) -> None:
        """`budget`: retries for each request; `reserve`: the most that is saved up."""
        self._random = Random(seed)
        self._most, self._budget, self._reserve = most, budget, reserve
        self._saved = 0.0

    def sent(self, arrival: Arrival) -> None:
        """Each first attempt pays into the budget."""
        if arrival.attempt == 0:
            self._saved = min(self._saved + self._budget, self._reserve)

    def retry(self, arrival: Arrival, refusal: AdmissionRefused, now: float) -> Arrival | None:
        if arrival.attempt >= self._most or self._saved < 1:
            return None
        self._saved -= 1
        wait = refusal.retry_after * self._random.uniform(1, 2)
        return arrival._replace(time=now + wait, attempt=arrival.attempt + 1)
