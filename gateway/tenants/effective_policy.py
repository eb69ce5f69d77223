"""The policy as it applies to one principal: class, targets and limits."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from backend.config import NO_WINDOW, WindowNeed
from backend.paged_kv.block_pool import blocks_for
from gateway.errors import ClassNotAllowed, Forbidden, KeySettingsInvalid, ModelNotFound, Unsatisfiable
from gateway.key_mask import masked
from gateway.quoting import quoted
from gateway.tenants.auth import Principal
from gateway.tenants.rate_headers import RateHeaders
from quotas.policy.key_settings import both, lesser, read_key_settings
from quotas.policy.limit import HELD, Limit, PerSession, Resource
from quotas.policy.limit_parser import with_prices
from quotas.policy.policy import (
    ALL_MODELS,
    AliasedModel,
    ClassPolicy,
    KeyPolicy,
    Policy,
    Price,
    TenantPolicy,
    token_prices,
)
from quotas.policy.policy_file import PolicyError
from quotas.policy.units import show_size
from quotas.usage_row import SESSION, UsageRow, plain_row_name, row_name

SESSION_DIGITS = 32  # hexadecimal, of the name of a session as the store has it
MAX_NAME_CHARS = 256  # of a user or a value of metadata, of which the ledger is told
GENERATED = frozenset({Resource.TOKENS, Resource.OUTPUT_TOKENS, Resource.COST})


@dataclass(frozen=True, slots=True)
class KVShape:
    """Size of one block of the KV cache."""

    block_tokens: int
    block_bytes: int
    window: WindowNeed = NO_WINDOW

    def blocks_for(self, tokens: int) -> int:
        """Return the most blocks that a sequence of as many tokens holds at a time."""
        return self.window.blocks(blocks_for(tokens, self.block_tokens))


class _Limits(NamedTuple):
    """Limits, and those of them that hold in each case."""

    every: tuple[Limit, ...]
    charged: tuple[Limit, ...]
    of_session: tuple[Limit, ...]
    of_answers: tuple[Limit, ...]

    @classmethod
    def of(cls, limits: tuple[Limit, ...]) -> "_Limits":
        return cls(
            limits,
            tuple(limit for limit in limits if limit.is_charged),
            tuple(limit for limit in limits if isinstance(limit.window, PerSession)),
            tuple(limit for limit in limits if limit.resource in GENERATED),
        )


def _priced_by_model(limits: tuple[Limit, ...], price: Price | None) -> dict[str | None, _Limits]:
    """The limits of each model that has prices of its own, if they limit cost."""
    if price is None or all(limit.resource is not Resource.COST for limit in limits):
        return {}
    return {name: _Limits.of(with_prices(limits, token_prices(one, name))) for name, one in price.models}


def narrowed(policy: Policy, principal: Principal) -> tuple[KeyPolicy, str | None]:
    """The settings that narrow a key: the policy's entry for it, and its own; and what is wrong with its own under this
    policy, which then do not count.
    """
    entry = policy.tenant(principal.tenant).key(principal.key_id) or KeyPolicy(principal.key_id)
    if not principal.settings:
        return entry, None
    try:
        own = read_key_settings(principal.settings, principal.key_id, policy, principal.tenant)
    except PolicyError as error:
        return entry, f"{error.problems[0].path}: {error.problems[0].message}"
    return both(entry, own, policy), None


class EffectivePolicy:
    """The policy as it applies to one principal, computed once and used by every request until the policy changes."""

    is_line = False  # it is that of a line of a batch, whose use its batch books

    def __init__(self, policy: Policy, principal: Principal) -> None:
        self.name = principal.tenant
        self.key = principal.key_id
        self.tenant: TenantPolicy = policy.tenant(principal.tenant)
        narrowing, self.problem = narrowed(policy, principal)
        self._narrowing = narrowing
        self.limits = self.tenant.limits + lesser(narrowing.limits) + self.tenant.team_limits
        self._own = _Limits.of(self.limits)
        self._by_model = _priced_by_model(self.limits, self.tenant.price)
        self.charged = self._own.charged
        self.charged_in_passing = tuple(limit for limit in self.charged if limit.resource not in HELD)
        self.rate_headers = RateHeaders(self.charged)
        each: tuple[TenantPolicy, KeyPolicy] = self.tenant, narrowing
        models = [frozenset(one.models) for one in each if ALL_MODELS not in one.models]
        self.models = frozenset.intersection(*models) if models else None  # None: all
        self.scopes = _scopes(principal, self.tenant)
        self.cache_scope = policy.cache_scope(principal.tenant)  # prompts are shared within this scope
        self.kv_bytes = min(
            (limit.amount for limit in self.limits if limit.resource is Resource.KV_BYTES), default=None
        )
        self._queued = self.tenant.queued_requests
        self._is_served = policy.admits(principal.tenant)
        self._policy = policy
        highest = [one.highest_class for one in each if one.highest_class is not None]
        self._highest_level = max(policy.class_named(name).level for name in highest)
        self._classes: dict[str | None, ClassPolicy] = {}  # by tier

    def charged_in(self, session: str | None, model: str | None = None) -> tuple[Limit, ...]:
        """All limits that a request of this session is charged to, at the prices of the model: those of the session
        last.
        """
        limits = self._by_model.get(model, self._own)
        if session is None or not limits.of_session:
            return limits.charged
        digest = sha256(session.encode("utf-8", "surrogatepass")).hexdigest()[:SESSION_DIGITS]
        return limits.charged + tuple(replace(limit, session=digest) for limit in limits.of_session)

    @property
    def charged_unread(self) -> tuple[Limit, ...]:
        """The limits that are spent for a request of any model: none of cost where models have prices of their own."""
        if not self._by_model:
            return self.charged
        return tuple(limit for limit in self.charged if limit.resource is not Resource.COST)

    def limits_of(self, model: str | None) -> tuple[Limit, ...]:
        """All limits, at the prices of the model."""
        return self._by_model.get(model, self._own).every

    def require(self, scope: str) -> None:
        """Raise `Forbidden` unless the policy admits the tenant and the key has the scope, and `KeySettingsInvalid`
        for a key whose own settings the present policy does not allow.
        """
        if not self._is_served:
            raise Forbidden(
                f"This server serves only tenants that its policy names, and {self.name!r} is none of them: "
                "have the tenant named there, or use another tenant's key."
            )
        if scope not in self.scopes:
            scopes = ", ".join(self.scopes) or "none"
            raise Forbidden(f"This API key may not be used for {scope}: its scopes are {scopes}.")
        if self.problem is not None:
            raise KeySettingsInvalid(
                "This API key's own settings do not fit the policy in force, so that it is not served: "
                f"{self.problem}. Have the key edited."
            )

    def allows_model(self, model: str) -> bool:
        return self.models is None or model in self.models

    def models_of(self, model: str | None) -> list[str | None]:
        """The models to try for a request, in order: of an alias its models, one drawn by the weights first where
        they have some. Raises `ModelNotFound` for an alias that the tenant may not use.
        """
        if model is None or (aliased := self._policy.aliases.get(model)) is None:
            return [model]
        self.check_model(model)
        weights = [one.weight for one in aliased if one.weight is not None]
        if not weights:
            return [one.model for one in aliased]
        first = random.choices(aliased, weights)[0]
        others = sorted([one for one in aliased if one is not first], key=lambda one: -(one.weight or 0.0))
        return [first.model, *(one.model for one in others)]

    def check_model(self, model: str) -> None:
        """Raise `ModelNotFound` for a model denied to the tenant, as for an unknown one."""
        if self.models is not None and model not in self.models:
            raise ModelNotFound(f"The model {quoted(model, 200)} does not exist or you have no access to it.", "model")

    @property
    def highest_class(self) -> ClassPolicy:
        """The most urgent class that a request may have."""
        return self._policy.classes[self._highest_level]

    @property
    def classes(self) -> list[ClassPolicy]:
        """The classes that a request may have, the most urgent first."""
        allowed, classes = self._narrowing.classes, self._policy.classes[self._highest_level :]
        return [one for one in classes if not allowed or one.name in allowed]

    def service_class(self, tier: str | None) -> ClassPolicy:
        """The class of a request: its tier's, or the highest if that is above it. Raises `ClassNotAllowed` if the key
        may not have that. Without a tier it is the tenant's default, or the next class that the key may have.
        """
        found = self._classes.get(tier)
        if found is None:
            found = self._classes[tier] = self._class_of(tier)
        return found

    def _class_of(self, tier: str | None) -> ClassPolicy:
        wanted = self._policy.class_for(self.name, self.key, tier)
        found, allowed = self._policy.classes[max(self._highest_level, wanted.level)], self.classes
        if found in allowed:
            return found
        is_asked = any(tier in one.service_tiers for one in self._policy.classes)
        if is_asked or not allowed:
            names = ", ".join(f"{one.name} ({' or '.join(one.service_tiers) or 'default'})" for one in allowed)
            raise ClassNotAllowed(
                f"This API key may not have the class {found.name}: its classes are {names or 'none'}. Leave "
                "service_tier out, ask for another, or have the key edited.",
                "service_tier",
            )
        return next((one for one in allowed if one.level > found.level), allowed[-1])

    def usage_row(
        self, model: str, service_class: str, user: str | None, metadata: Mapping[str, Any], session: str | None
    ) -> str:
        """The name of the ledger's row for a request of this user, with this metadata and in this session, as finely
        as the tenant's policy asks.
        """
        if not (user or metadata or session):
            return plain_row_name(self.key, model, service_class)
        detail, tags = self.tenant.usage, list[tuple[str, str]]()
        parts = detail.by if detail.rows else ()
        for part in parts:
            name = part.removeprefix("metadata.")
            if name != part and isinstance(value := metadata.get(name), str):
                tags.append((name, masked(value[:MAX_NAME_CHARS])))
        if session is not None and "session" in parts:
            tags.append((SESSION, session))
        shown = masked(user[:MAX_NAME_CHARS]) if user and "user" in parts else ""
        return row_name(UsageRow(self.key, model, service_class, shown, tuple(tags)), detail.rows)

    def kv_tokens(self, shape: KVShape, of_adapter: int = 0) -> int | None:
        """The most tokens of a sequence within the tenant's KV memory, beside the blocks `of_adapter`; None without a
        limit.
        """
        if self.kv_bytes is None:
            return None
        return max(0, shape.window.places(self.kv_bytes // shape.block_bytes - of_adapter)) * shape.block_tokens

    def check_kv(self, num_tokens: int, shape: KVShape, param: str, of_adapter: int = 0) -> None:
        """Raise `Unsatisfiable`, about `param`, for a sequence beyond the tenant's KV memory."""
        most = self.kv_tokens(shape, of_adapter)
        if self.kv_bytes is not None and most is not None and num_tokens > most:
            beside = " beside the adapter" if of_adapter else ""
            raise Unsatisfiable(
                f"Your tenant's limit kv_bytes is {show_size(self.kv_bytes)}, which holds {most} tokens{beside}: "
                f"prompt and answer together are {num_tokens}. Lower max_tokens, shorten the prompt, or have the "
                "limit raised.",
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

    def reservable(self, num_prompt_tokens: int, expected: int, model: str | None = None) -> int | None:
        """The output tokens of a model to reserve at first for an answer of undeclared length; None: no limit counts
        them.

        `expected` is the tenant's high estimate of an answer.
        """
        limits = self._by_model.get(model, self._own).of_answers
        if not limits:
            return None
        fits = [most for limit in limits if (most := limit.most_output(num_prompt_tokens)) is not None]
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

    @property
    def aliases(self) -> Mapping[str, tuple[AliasedModel, ...]]:
        """The aliases of models that hold now."""
        return self._policies.current.aliases

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
