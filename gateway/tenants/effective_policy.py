"""The policy as it applies to one principal: class, targets and limits."""

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Protocol

from gateway.errors import Forbidden, ModelNotFound, Unsatisfiable
from gateway.quoting import quoted
from gateway.tenants.auth import Principal
from gateway.tenants.rate_headers import RateHeaders
from quotas.policy.limit import Limit, PerSession, Resource
from quotas.policy.policy import ClassPolicy, Policy, TenantPolicy
from quotas.policy.units import show_size

SESSION_DIGITS = 32  # hexadecimal, of the name of a session as the store has it
GENERATED = frozenset({Resource.TOKENS, Resource.OUTPUT_TOKENS, Resource.COST})


@dataclass(frozen=True, slots=True)
class KVShape:
    """Size of one block of the KV cache."""

    block_tokens: int
    block_bytes: int


class EffectivePolicy:
    """The policy as it applies to one principal, computed once and used by every request until the policy changes."""

    is_line = False  # it is that of a line of a batch, whose use its batch books

    def __init__(self, policy: Policy, principal: Principal) -> None:
        self.name = principal.tenant
        self.key = principal.key_id
        self.tenant: TenantPolicy = policy.tenant(principal.tenant)
        self.limits: tuple[Limit, ...] = self.tenant.limits_of(principal.key_id)
        self.charged = tuple(limit for limit in self.limits if limit.is_charged)
        self._of_session = tuple(limit for limit in self.limits if isinstance(limit.window, PerSession))
        self.rate_headers = RateHeaders(self.charged)
        self.models = self.tenant.models_of(principal.key_id)  # None: all
        self.scopes = _scopes(principal, self.tenant)
        self.cache_scope = policy.cache_scope(principal.tenant)  # prompts are shared within this scope
        self.kv_bytes = min(
            (limit.amount for limit in self.limits if limit.resource is Resource.KV_BYTES), default=None
        )
        self._queued = self.tenant.queued_requests
        self._of_answers = [limit for limit in self.limits if limit.resource in GENERATED]
        self._is_served = policy.admits(principal.tenant)
        self._policy = policy
        self._classes: dict[str | None, ClassPolicy] = {}  # by tier

    def charged_in(self, session: str | None) -> tuple[Limit, ...]:
        """All limits that a request of this session is charged to: those of the session last."""
        if session is None or not self._of_session:
            return self.charged
        digest = sha256(session.encode("utf-8", "surrogatepass")).hexdigest()[:SESSION_DIGITS]
        return self.charged + tuple(replace(limit, session=digest) for limit in self._of_session)

    def require(self, scope: str) -> None:
        """Raise `Forbidden` unless the policy admits the tenant and the key has the scope."""
        if not self._is_served:
            raise Forbidden(
                f"This server serves only tenants that its policy names, and {self.name!r} is none of them: "
                "have the tenant named there, or use another tenant's key."
            )
        if scope not in self.scopes:
            scopes = ", ".join(self.scopes) or "none"
            raise Forbidden(f"This API key may not be used for {scope}: its scopes are {scopes}.")

    def allows_model(self, model: str) -> bool:
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Raise `ModelNotFound` for a model denied to the tenant, as for an unknown one."""
        if self.models is not None and model not in self.models:
            raise ModelNotFound(f"The model {quoted(model, 200)} does not exist or you have no access to it.", "model")

    @property
    def highest_class(self) -> ClassPolicy:
        """The most urgent class that a request may have."""
        return self._policy.classes[self._policy.highest_level(self.name, self.key)]

    def service_class(self, tier: str | None) -> ClassPolicy:
        found = self._classes.get(tier)
        if found is None:
            found = self._classes[tier] = self._policy.class_for(self.name, self.key, tier)
        return found

    def kv_tokens(self, shape: KVShape) -> int | None:
        """The most tokens of a sequence within the tenant's KV memory; None without a limit."""
        return None if self.kv_bytes is None else self.kv_bytes // shape.block_bytes * shape.block_tokens

    def check_kv(self, num_tokens: int, shape: KVShape, param: str) -> None:
        """Raise `Unsatisfiable`, about `param`, for a sequence beyond the tenant's KV memory."""
        most = self.kv_tokens(shape)
        if self.kv_bytes is not None and most is not None and num_tokens > most:
            raise Unsatisfiable(
                f"Your tenant's limit kv_bytes is {show_size(self.kv_bytes)}, which holds {most} tokens: prompt and "
                f"answer together are {num_tokens}. Lower max_tokens, shorten the prompt, or have the limit raised.",
                param,
            )

    def check_prompts(self, count: int) -> None:
        """Raise `Unsatisfiable` for more prompts in one request than could ever wait; one alone may always run."""
        if self._queued is not None and count > max(self._queued, 1):
            raise Unsatisfiable(
                f"Your tenant's limit queued_requests is {self._queued}: this request has {count} prompts, each of "
                "which counts. Send fewer at once, or have the limit raised.",
                "prompt",
            )

    def check_answers(self, count: int, param: str) -> None:
        """Raise `Unsatisfiable`, about `param`, for more answers to a prompt than the tenant may ask for."""
        most = self.tenant.max_n
        if count > most:
            raise Unsatisfiable(
                f"Your tenant's limit max_n is {most}: {param} asks for {count} answers to a prompt. Lower {param}, "
                "or have the limit raised.",
                param,
            )

    def check_grammar(self, size: int, param: str) -> None:
        """Raise `Unsatisfiable`, about `param`, for a grammar larger than the tenant's limit."""
        most = self.tenant.max_schema_bytes
        if size > most:
            raise Unsatisfiable(
                f"Your tenant's limit max_schema_bytes is {most:,}: {param} has {size:,} bytes. Make it smaller, "
                "or have the limit raised.",
                param,
            )

    def check_logprobs(self, count: int | None, param: str) -> None:
        """Raise `Unsatisfiable`, about `param`, for more log probabilities at each position than the tenant may
        have.
        """
        most = self.tenant.max_top_logprobs
        if count is not None and count > most:
            raise Unsatisfiable(
                f"Your tenant's limit max_top_logprobs is {most}: {param} asks for {count}. Lower {param}, or have the "
                "limit raised.",
                param,
            )

    def reservable(self, num_prompt_tokens: int, expected: int) -> int | None:
        """The output tokens to reserve at first for an answer of undeclared length; None: no limit counts them.

        `expected` is the tenant's high estimate of an answer.
        """
        if not self._of_answers:
            return None
        fits = [most for limit in self._of_answers if (most := limit.most_output(num_prompt_tokens)) is not None]
        return max(1, min(expected, *fits))


class CurrentPolicy(Protocol):
    """Holds the policy in force, which is replaced whole."""

    current: Policy


class EffectivePolicies:
    """Caches the effective policy of every principal under the present policy."""

    make: type[EffectivePolicy] = EffectivePolicy

    def __init__(self, policies: CurrentPolicy) -> None:
        self._policies = policies
        self._policy = policies.current
        self._known: dict[Principal, EffectivePolicy] = {}

    @property
    def version(self) -> str:
        """The version of the policy that holds now."""
        return self._policies.current.version

    def of(self, principal: Principal) -> EffectivePolicy:
        if self._policies.current is not self._policy:
            self._policy, self._known = self._policies.current, {}
        effective = self._known.get(principal)
        if effective is None:
            effective = self._known[principal] = self.make(self._policy, principal)
        return effective


def _scopes(principal: Principal, tenant: TenantPolicy) -> tuple[str, ...]:
    """The key's scopes, as far as the policy allows them."""
    key = tenant.key(principal.key_id)
    return tuple(scope for scope in principal.scopes if key is None or scope in key.scopes)
