"""A simulated gateway: it gives requests their classes, and holds them to a policy's limits, as the real one does."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from admission.admission import RESERVED_LENGTH_QUANTILE
from admission.output_length import OutputLengths
from backend.scheduler.sequence import SPARE_CLASS
from gateway.errors import ApiError, ClassNotAllowed
from gateway.tenants.auth import Principal
from gateway.tenants.cache_limits import blocks_kept
from gateway.tenants.effective_policy import EffectivePolicy, KVShape
from labs.simulation.arrival import NO_TARGET, Arrival, ClassTarget
from labs.simulation.gateway_rules import GatewayRefused, GatewayRefusedForGood
from labs.what_if.limiter import Charge, Limiter
from quotas.errors import BudgetSpent, LimitExceeded, QuotaRefused
from quotas.policy.limit import Limit
from quotas.policy.policy import ClassPolicy, Policy
from quotas.reservation import Ask, Usage

SOME_DAY = datetime.fromisoformat("2024-01-01T00:00:00+00:00").timestamp()
"""The begin of traffic without a calendar: the first of a month, and a Monday, so that every budget begins with it."""


@dataclass(frozen=True, slots=True)
class PolicyRules:
    """The `GatewayRules` of one policy. Facts missing from the trace violate no rule."""

    policy: Policy
    began: float | None = None  # Unix seconds of a run's begin
    model: str | None = None  # of the requests
    kv_shape: KVShape | None = None

    def gateway(self) -> "PolicyGateway":
        return PolicyGateway(self)

    def price(
        self, tenant: str, prompt_tokens: int, cached_tokens: int, output_tokens: int
    ) -> tuple[float, str] | None:
        price = self.policy.tenant(tenant).price
        if price is None:
            return None
        price = price.of(self.model)
        prompts = price.input * prompt_tokens + price.cached_input * cached_tokens
        return float(prompts + price.output * output_tokens), price.currency


class PolicyGateway:
    """A `SimulatedGateway` under one policy. Limits begin unused."""

    def __init__(self, rules: PolicyRules) -> None:
        self._policy = rules.policy
        self._model = rules.model
        self._kv_shape = rules.kv_shape
        self._knows_time = rules.began is not None
        self._began = SOME_DAY if rules.began is None else rules.began
        self._targets = [target_of(level) for level in rules.policy.classes]
        self._limiter = Limiter()
        self._entitlements: dict[tuple[str, str | None], EffectivePolicy] = {}

    def served(self, arrival: Arrival) -> Arrival:
        if arrival.priority_class < SPARE_CLASS:
            arrival = arrival._replace(priority_class=self._level(arrival))
        kv_tokens = None if arrival.is_declared else self._kv_tokens(self._of(arrival))
        if kv_tokens is None:
            return arrival
        most = max(1, min(arrival.declared_tokens, kv_tokens - arrival.prompt_tokens))
        return arrival._replace(max_tokens=most, output_tokens=min(arrival.output_tokens, most))

    def target(self, priority_class: int) -> ClassTarget:
        return self._targets[priority_class] if priority_class < len(self._targets) else NO_TARGET

    def allowed_blocks(self, tenant: str) -> int | None:
        effective = self._of(Arrival(0.0, 1, 1, tenant=tenant))
        if effective.kv_bytes is None or self._kv_shape is None:
            return None
        return effective.kv_bytes // self._kv_shape.block_bytes

    def cache_scope(self, tenant: str) -> str:
        return self._policy.cache_scope(tenant)

    def cache_limits(self, tenant: str) -> tuple[int, int | None]:
        shape = self._kv_shape
        return (0, None) if shape is None else blocks_kept(self._policy, tenant, shape.block_bytes)

    def reserve(self, arrival: Arrival, lengths: OutputLengths, now: float) -> "UncountedGrant":
        """Reserves as `gateway.api` does for a real request. Raises `GatewayRefused`."""
        effective, moment, prompts = self._of(arrival), self._began + now, arrival.prompts
        if self._policy.unnamed_tenants == "refuse" and arrival.tenant not in self._policy.tenants:
            raise GatewayRefused("unnamed_tenants")
        self._check_key(effective, moment)
        if (model := self._model) is not None:
            _check("models", lambda: effective.check_model(model))
        if arrival.asked_class is None and arrival.priority_class < SPARE_CLASS:
            _check("classes", lambda: effective.service_class(arrival.service_tier))
        _check("queued_requests", lambda: effective.check_prompts(len(prompts)))
        for prompt in prompts:
            self._check_kv(effective, prompt)
        tokens = tuple(_tokens_to_begin_with(effective, prompt, lengths) for prompt in prompts)
        ask = Ask(1, sum(prompt.prompt_tokens for prompt in prompts[:: arrival.num_answers]), sum(tokens))
        if not effective.charged:
            return UncountedGrant(tokens)
        try:
            charge = self._limiter.reserve(effective.name, effective.charged_in(None, self._model), ask, moment)
        except QuotaRefused as refusal:
            raise _refused_by_limit(refusal) from None
        return CountedGrant(tokens, self._limiter, charge, self._began)

    def _level(self, arrival: Arrival) -> int:
        if arrival.asked_class is None:
            try:
                return self._of(arrival).service_class(arrival.service_tier).level
            except ClassNotAllowed:  # `reserve` refuses it
                return self._policy.class_for(arrival.tenant, arrival.key, arrival.service_tier).level
        highest = self._policy.highest_level(arrival.tenant, arrival.key)
        return min(max(highest, arrival.asked_class), len(self._targets) - 1)

    def _of(self, arrival: Arrival) -> EffectivePolicy:
        who = arrival.tenant, arrival.key
        found = self._entitlements.get(who)
        if found is None:
            principal = Principal(arrival.tenant, arrival.key or "")
            found = self._entitlements[who] = EffectivePolicy(self._policy, principal)
        return found

    def _kv_tokens(self, effective: EffectivePolicy) -> int | None:
        return effective.kv_tokens(self._kv_shape) if self._kv_shape else None

    def _check_key(self, effective: EffectivePolicy, moment: float) -> None:
        _check("scopes", lambda: effective.require("inference"))
        key = effective.tenant.key(effective.key)
        if key and key.expires and self._knows_time and moment >= key.expires.timestamp():
            raise GatewayRefused("key has expired")

    def _check_kv(self, effective: EffectivePolicy, prompt: Arrival) -> None:
        if shape := self._kv_shape:
            most = prompt.declared_tokens if prompt.is_declared else 1
            _check("kv_bytes", lambda: effective.check_kv(prompt.prompt_tokens + most, shape, ""))


@dataclass(frozen=True, slots=True)
class UncountedGrant:
    """The `SimulatedGrant` of a request that no limit counts."""

    tokens: tuple[int, ...]

    def extend(self, tokens: int, now: float) -> None:
        pass

    def settle(self, prompt_tokens: int, output_tokens: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class CountedGrant(UncountedGrant):
    """The `SimulatedGrant` of a request that limits count until it is settled."""

    limiter: Limiter
    charge: Charge
    began: float

    def extend(self, tokens: int, now: float) -> None:
        """Reserve more tokens. Raises `GatewayRefused`."""
        try:
            self.limiter.extend(self.charge, tokens, self.began + now)
        except QuotaRefused as refusal:
            raise _refused_by_limit(refusal) from None

    def settle(self, prompt_tokens: int, output_tokens: int) -> None:
        """Charges the computed tokens; an uncomputed request costs nothing."""
        self.limiter.settle(self.charge, Usage(prompt_tokens, output_tokens, requests=1 if prompt_tokens else 0))


def target_of(level: ClassPolicy) -> ClassTarget:
    """Returns the latencies that a class promises."""
    return ClassTarget(level.ttft, level.time_per_output_token, level.when_late == "refuse")


def _tokens_to_begin_with(effective: EffectivePolicy, prompt: Arrival, lengths: OutputLengths) -> int:
    most = prompt.declared_tokens
    if prompt.is_declared:
        return most
    expected = lengths.quantile(effective.name, most, RESERVED_LENGTH_QUANTILE)
    reservable = effective.reservable(prompt.prompt_tokens, expected)
    return most if reservable is None else min(reservable, most)


def _check(what: str, check: Callable[[], object]) -> None:
    """Calls `check`. Raises `GatewayRefused` for a client's error."""
    try:
        check()
    except ApiError:
        raise GatewayRefused(what) from None


def _refused_by_limit(refusal: QuotaRefused) -> GatewayRefused:
    match refusal:
        case LimitExceeded(limit=limit, retry_after=wait):
            return GatewayRefused(_name(limit), wait)
        case BudgetSpent(limit=limit):
            return GatewayRefusedForGood(_name(limit))
    return GatewayRefusedForGood(f"{_name(refusal.limit)}, which never holds as much")


def _name(limit: Limit) -> str:
    """Returns a limit's name as a reason, which all keys' limits of one kind share, as do all teams'."""
    return limit.label if limit.owner == "tenant" else f"{limit.owner}'s {limit.label}"
