"""The part of a gateway that a simulation needs: the class of each request, and its tenant's limits.

The loop knows it as a protocol, since limits are not admission's. `labs.what_if.simulated_policy` implements it by
the rules that the gateway serves by.
"""

from typing import Protocol

from admission.outcome import AdmissionRefused
from admission.output_length import OutputLengths
from labs.simulation.arrival import Arrival, ClassTarget

DEFAULT_RETRY_AFTER = 1.0  # seconds, where nobody can tell when the request would be let in


class GatewayRefused(AdmissionRefused):
    """The gateway refused a request before it came to the core.

    `reason` is the limit's name, or what else forbids the request, in a word or two.
    """

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(f"refused: {reason}", DEFAULT_RETRY_AFTER if retry_after is None else retry_after)
        self.reason = reason
        self.wait = retry_after  # seconds, as they are; None: nobody can tell


class GatewayRefusedForGood(GatewayRefused):
    """The limit will have nothing more for the request for as long as anybody waits."""


class SimulatedGrant(Protocol):
    """The reservation of one request, until all its answers have ended."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The number of tokens that the answer to each prompt may begin with."""
        ...

    def extend(self, tokens: int, now: float) -> None:
        """Let the answers have more tokens. Raises `GatewayRefused`, and then changes nothing."""
        ...

    def settle(self, prompt_tokens: int, output_tokens: int) -> None:
        """All answers have ended, and so much was computed for them."""
        ...


class SimulatedGateway(Protocol):
    """The gateway of one run. Times are in seconds of the run's clock, and never go back."""

    def served(self, arrival: Arrival) -> Arrival:
        """Returns the arrival with the class that serves it, and with a bound on an answer of undeclared length."""
        ...

    def target(self, priority_class: int) -> ClassTarget: ...

    def allowed_blocks(self, tenant: str) -> int | None:
        """Returns the KV memory that the tenant may hold; None: any number of blocks."""
        ...

    def cache_scope(self, tenant: str) -> str:
        """Returns the name of those who find what the tenant has cached."""
        ...

    def cache_limits(self, tenant: str) -> tuple[int, int | None]:
        """Returns how many of its idle cached blocks are kept for the tenant, and how many it may have; None: any."""
        ...

    def reserve(self, arrival: Arrival, lengths: OutputLengths, now: float) -> SimulatedGrant:
        """Charges the request to its limits; `lengths` are those of answers so far.

        Raises `GatewayRefused`, and then nothing is charged.
        """
        ...


class GatewayRules(Protocol):
    """The rules that a gateway is made of, and its prices; one object serves many runs, in any process."""

    def gateway(self) -> SimulatedGateway: ...

    def price(
        self, tenant: str, prompt_tokens: int, cached_tokens: int, output_tokens: int
    ) -> tuple[float, str] | None:
        """Returns the cost of these tokens to the tenant, and the currency; None: it pays nothing. The prompt tokens
        are those that were computed, without those that were cached.
        """
        ...
