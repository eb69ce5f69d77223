"""What a policy says of one request: its class, the limits that apply, what is left of each, whether it would pass."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from gateway.entitlement import Entitlement
from gateway.errors import ApiError
from gateway.known_key import KnownKey
from gateway.table import printable, table
from quotas.forecast import refusals
from quotas.limit import Budget, Limit, Rate, Resource
from quotas.policy import ClassPolicy, Policy
from quotas.reservation import Ask, LimitState
from quotas.units import show_count, show_duration, show_size

HEADING = ("limit", "allows", "asked", "left", "full again")


@dataclass(frozen=True, slots=True)
class Request:
    """One that nobody has made."""

    key: KnownKey
    ask: Ask
    model: str | None = None  # None: one that it may use
    service_tier: str | None = None


class Explanation:
    """Of a request under a policy, at a Unix time; `states` is None where the store cannot be asked."""

    def __init__(self, policy: Policy, request: Request, states: Sequence[LimitState] | None, now: float) -> None:
        self._policy = policy
        self._request = request
        self._entitlement = Entitlement(policy, request.key.principal)
        self._states: Mapping[Limit, LimitState] = {state.limit: state for state in states or ()}
        self._is_asked = states is not None
        self._now = now
        self.reasons = tuple(self._reasons())

    @property
    def verdict(self) -> str:
        if self.reasons:
            return "\n".join(f"it would be refused: {reason}" for reason in self.reasons)
        return "it would pass" if self._is_asked else "nothing in the policy alone refuses it"

    @property
    def text(self) -> str:
        served = self._entitlement.service_class(self._request.service_tier)
        lines = [
            f"policy {self._policy.version}",
            printable(self._request.key.described) + self._note(),
            f"class {served.name}{_targets(served)}",
            self._limits(),
            self.verdict,
        ]
        return "\n".join(lines) + "\n"

    def _note(self) -> str:
        named = self._request.key.principal.tenant in self._policy.tenants
        return "" if named else "; the policy does not name the tenant: its defaults hold"

    def _limits(self) -> str:
        if not self._entitlement.limits:
            return "no limits apply"
        return table(HEADING, [self._row(limit) for limit in self._entitlement.limits], frozenset(HEADING[1:4]))[:-1]

    def _row(self, limit: Limit) -> tuple[str, ...]:
        state, asked = self._states.get(limit), self._request.ask.of(limit.resource)
        left = f"{state.remaining}" if state else "?" if not self._is_asked and limit.is_charged else "-"
        return limit.name, _allowed(limit), f"{asked}" if limit.is_charged else "-", left, self._full_again(state)

    def _full_again(self, state: LimitState | None) -> str:
        if state is None or state.remaining == state.limit.capacity:
            return ""
        match state.limit.window:
            case Rate():
                return f"in {state.reset:.3g} s"
            case Budget():
                return f"{datetime.fromtimestamp(round(self._now + state.reset), UTC):%Y-%m-%d %H:%M} UTC"
        return "when others end"

    def _reasons(self) -> Iterator[str]:
        """In the order in which the gateway finds them, and all of them."""
        if (expires := self._request.key.expires) and expires.timestamp() <= self._now:
            yield f"the key expired at {expires:%Y-%m-%d %H:%M} UTC"
        try:
            self._entitlement.require("inference")
            if self._request.model is not None:
                self._entitlement.check_model(self._request.model)
        except ApiError as error:
            yield str(error)
        untouched = [LimitState(limit, limit.capacity, 0.0) for limit in self._entitlement.limits]
        states = [self._states.get(state.limit, state) for state in untouched]
        yield from map(str, refusals(states, self._request.ask, self._now))


def _targets(served: ClassPolicy) -> str:
    targets = (("first token", served.ttft), ("each further one", served.time_per_output_token))
    told = [f"{what} in {show_duration(seconds)}" for what, seconds in targets if seconds is not None]
    return f" (targets: {', '.join(told)})" if told else " (without targets)"


def _allowed(limit: Limit) -> str:
    if limit.resource is Resource.KV_BYTES:
        return show_size(limit.amount)
    burst = limit.window.burst if isinstance(limit.window, Rate) else limit.amount
    return show_count(limit.amount) + (f" (burst {show_count(burst)})" if burst != limit.amount else "")
