"""What stands between clients and the core: which class serves a request, and what its tenant's limits say of it.

The loop knows it as a protocol, since limits are not admission's; the gateway simulates by the rules that it serves by.
"""

from typing import Protocol

from admission.outcome import AdmissionRefused
from admission.output_length import OutputLengths
from admission.simulation.arrival import Arrival, ClassTarget

REFUSED_RETRY = 1.0  # seconds, where nobody can tell when it would be let in


class TurnedAway(AdmissionRefused):
    """Refused before it came to the core. `reason` is the limit's name, or what else forbids it, in a word or two."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(f"refused: {reason}", REFUSED_RETRY if retry_after is None else retry_after)
        self.reason = reason
        self.wait = retry_after  # seconds, as they are; None: nobody can tell


class Spent(TurnedAway):
    """Waiting will not help for as long as anybody waits."""


class Visit(Protocol):
    """One request that was let in, until all its answers have ended."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of each prompt's answer, that it may begin with."""
        ...

    def extend(self, tokens: int, now: float) -> None:
        """Let its answers have so many more. Raises `TurnedAway`, and then changes nothing."""
        ...

    def leave(self, prompt_tokens: int, output_tokens: int) -> None:
        """All have ended, and this was computed for them."""
        ...


class Door(Protocol):
    """Of one run. Times are in seconds of the run's clock, and never go back."""

    def served(self, arrival: Arrival) -> Arrival:
        """The same with the class that serves it, and with the most that an answer of undeclared length may have."""
        ...

    def target(self, priority_class: int) -> ClassTarget: ...

    def allowed_blocks(self, tenant: str) -> int | None:
        """KV memory that the tenant may hold; None: any number of blocks."""
        ...

    def enter(self, arrival: Arrival, lengths: OutputLengths, now: float) -> Visit:
        """Raises `TurnedAway`, and then nothing is charged. `lengths` are those of answers so far."""
        ...


class Rules(Protocol):
    """What a door is made of, and what is charged; one serves many runs, in any process."""

    def door(self) -> Door: ...

    def price(self, tenant: str, prompt_tokens: int, output_tokens: int) -> tuple[float, str] | None:
        """What these tokens cost the tenant, and the currency; None: it pays nothing."""
        ...
