"""The part of a gateway that a simulation needs: the class of each request, and its tenant's limits.

The loop knows it as a protocol, since limits are not admission's. `labs.what_if.simulated_policy` implements it by
the rules that the gateway serves by.
"""

from typing import Protocol

from admission.outcome import AdmissionRefused
from admission.output_length import OutputLengths
from labs.simulation.arrival import Arrival, ClassTarget

DEFAULT_RETRY_AFTER_SECONDS = 1.0  # seconds, if the limit's refill is unknown


class GatewayRefused(AdmissionRefused):
    """The gateway refused a request before the core saw it.

    `reason` is the limit's name, or another prohibition in a word or two.
    """

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(f"refused: {reason}", DEFAULT_RETRY_AFTER_SECONDS if retry_after is None else retry_after)
        self.reason = reason
        self.wait = retry_after  # seconds without jitter; None: unknown


class GatewayRefusedForGood(GatewayRefused):
    """The limit never again has room for the request."""


class SimulatedGrant(Protocol):
    """The reservation of one request, until all its answers have ended."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The initial tokens of the answer to each prompt."""
        ...

    def extend(self, tokens: int, now: float) -> None:
        """Let the answers have more tokens. Raises `GatewayRefused`, and then changes nothing."""
        ...

    def settle(self, prompt_tokens: int, output_tokens: int) -> None:
        """Settle at these computed tokens: all answers have ended."""
        ...


class SimulatedGateway(Protocol):
    """The gateway of one run. Times are in seconds of the run's clock, and never go back."""

    def served(self, arrival: Arrival) -> Arrival:
        """The arrival with its class, and with a bound on an answer of undeclared length."""
        ...

    def target(self, priority_class: int) -> ClassTarget: ...

    def allowed_blocks(self, tenant: str) -> int | None:
        """The tenant's KV limit in blocks; None: no limit."""
        ...

    def cache_scope(self, tenant: str) -> str:
        """The name of the tenant's sharing scope."""
        ...

    def cache_limits(self, tenant: str) -> tuple[int, int | None]:
        """The tenant's floor and ceiling of idle cached blocks; None: no ceiling."""
        ...

    def reserve(self, arrival: Arrival, lengths: OutputLengths, now: float) -> SimulatedGrant:
        """Charges the request to its limits; `lengths` are those of answers so far.

        Raises `GatewayRefused`, and then nothing is charged.
        """
        ...


class GatewayRules(Protocol):
    """The rules and prices of a gateway; one object serves many runs, in any process."""

    def gateway(self) -> SimulatedGateway: ...

    def price(
        self, tenant: str, prompt_tokens: int, cached_tokens: int, output_tokens: int
    ) -> tuple[float, str] | None:
        """The cost of these tokens to the tenant, and the currency; None: free.

        The prompt tokens are the computed ones, without cached ones.
        """
        ...
