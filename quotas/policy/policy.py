"""A policy: classes of service, tenants' rights and limits, and their keys' restrictions. Immutable."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from hashlib import sha256
from operator import attrgetter
from typing import Literal

from quotas.policy.limit import NANOS, UTC_CALENDAR, Budget, Calendar, Limit, Resource, TokenPrices
from quotas.usage_row import as_kept

SERVICE_TIERS = ("flex", "scale", "priority", "fast")  # of OpenAI's API; auto and default are a tenant's default class
SCOPES = ("inference", "limits")
ALL_MODELS = "*"
MAX_N = 128  # answers to one prompt
MAX_SCHEMA_BYTES = 2**18  # of an answer's constraint: a schema, a pattern or another grammar
MAX_BATCH_LINES = 1_000_000  # of one batch
MAX_OPEN_BATCHES = 1000  # of one tenant
MAX_USAGE_ROWS = 2000  # of a tenant and a day
MAX_USAGE_PARTS = 5  # by which use is told apart
MAX_TAGS = 16  # of a key
MAX_BACKGROUND_RESPONSES = 1000  # of one tenant, at once
MAX_GUARDRAIL_DEADLINE_SECONDS = 60.0
MAX_GUARDRAIL_HOLD_CHARS = 100_000
MAX_TOP_LOGPROBS = 20  # of the most likely tokens at each position, as OpenAI's

Outage = Literal["closed", "open", "lease"]
Lateness = Literal["wait", "refuse"]
Unnamed = Literal["allow", "refuse"]
GuardrailStage = Literal["prompt", "answer"]
GuardrailFailure = Literal["closed", "open"]
LogTexts = Literal["none", "redacted", "whole"]


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of a class's queue, over all tenants; None: not bounded here."""

    requests: int | None = None
    tokens: int | None = None  # of their prompts
    bytes: int | None = None  # of their bodies
    seconds: float | None = None  # of the engine's time, predicted


@dataclass(frozen=True, slots=True)
class ClassPolicy:
    """One class of service. Times are in seconds; a class without targets promises none."""

    name: str
    level: int  # 0 is the most urgent
    service_tiers: tuple[str, ...] = ()
    ttft: float | None = None
    time_per_output_token: float | None = None
    aging: float = 0.0  # the delay of its due times over the first class's
    queue: QueueLimits = QueueLimits()
    when_late: Lateness = "wait"  # treatment of a request whose first token is expected later than `ttft`
    max_reasoning_tokens: int | None = None  # of an answer, before its content


@dataclass(frozen=True, slots=True)
class Price:
    """The exact price of one token; `cached_input` is that of prompt tokens found in the prefix cache, `reasoning` that
    of output tokens of an answer's reasoning.
    """

    input: Decimal
    output: Decimal
    cached_input: Decimal
    reasoning: Decimal
    currency: str  # ISO 4217
    batch: Decimal = Decimal(1)  # share of each price that a token costs in a batch
    models: tuple[tuple[str, "Price"], ...] = field(default=(), repr=False, hash=False)  # by name: prices of their own
    _by_model: dict[str, "Price"] = field(init=False, compare=False, repr=False)  # by whole names, and the ledger's

    def __post_init__(self) -> None:
        named = {known: price for name, price in self.models for known in (as_kept(name), name)}
        object.__setattr__(self, "_by_model", named)

    def of(self, model: str | None) -> "Price":
        """The price of a token of this model, whose name may be as the ledger keeps it."""
        return self if model is None else self._by_model.get(model, self)

    @property
    def in_batches(self) -> "Price":
        """The price of a token in a batch."""
        share = self.batch
        given, output = share * self.input, share * self.output
        return Price(given, output, share * self.cached_input, share * self.reasoning, self.currency)


def token_prices(price: Price, model: str = "") -> TokenPrices | None:
    """The prices in billionths of the currency's unit; None if one of them is no whole number of these."""
    amounts = [amount * NANOS for amount in (price.input, price.cached_input, price.output, price.reasoning)]
    if any(amount % 1 for amount in amounts):
        return None
    given, cached, output, reasoning = map(int, amounts)
    return TokenPrices(given, cached, output, reasoning, price.currency, model)


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Limits on a tenant's idle cached KV memory: a floor never evicted for others, a ceiling, and pinned system
    prompts.
    """

    floor: int = 0
    ceiling: int | None = None  # None: all unneeded memory
    pinned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredResponseLimits:
    """Bounds of a tenant's stored responses and conversations: the oldest make room."""

    bytes: int = 8 * 2**20  # 0: none are stored
    retention: float = 30 * 86400.0  # seconds
    background: int = 16  # responses in the background that have not ended; 0: none are computed there


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of a tenant's files and batches."""

    file_bytes: int = 256 * 2**20  # of all files, results included; 0: it has neither files nor batches
    retention: float = 30 * 86400.0  # seconds
    lines: int = 50_000  # of one batch
    open: int = 16  # batches that have not ended


@dataclass(frozen=True, slots=True)
class UsageDetail:
    """The parts of a tenant's requests by which its ledger tells use apart, besides key, model and class."""

    by: tuple[str, ...] = ("user",)  # `user`, `session`, or `metadata.NAME`
    rows: int = 500  # of a day; use of further users and tags is summed up


@dataclass(frozen=True, slots=True)
class GuardrailPolicy:
    """The guardrail of a tenant: a service that judges each prompt before it is computed, and each answer before it is
    sent.
    """

    url: str
    stages: tuple[GuardrailStage, ...] = ("prompt", "answer")
    deadline: float = 1.0  # seconds of one call
    on_failure: GuardrailFailure = "closed"
    hold: int = 400  # characters of a streamed answer that wait for a verdict at a time


@dataclass(frozen=True, slots=True)
class KeyPolicy:
    """Restricts requests with one API key. Its limits hold besides the tenant's."""

    id: str
    hmac: str | None = field(default=None, repr=False)  # hexadecimal; None: the key is in the state directory
    expires: datetime | None = None  # None: never
    scopes: tuple[str, ...] = SCOPES
    models: tuple[str, ...] = (ALL_MODELS,)  # default: all of the tenant's
    highest_class: str | None = None  # None: the tenant's
    classes: tuple[str, ...] = ()  # that may be had; none: all up to the highest
    limits: tuple[Limit, ...] = ()
    tags: tuple[tuple[str, str], ...] = ()  # by name, for reports of spend


@dataclass(frozen=True, slots=True)
class TeamPolicy:
    """The limits that the tenants of a team share."""

    name: str
    limits: tuple[Limit, ...] = ()  # of cost at prices of 0 in its currency: the prices are each tenant's
    calendar: Calendar = UTC_CALENDAR
    currency: str | None = None  # ISO 4217, of limits of cost


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """The rights and limits of one tenant. `default_class` is never more urgent than `highest_class`."""

    name: str
    highest_class: str
    default_class: str
    weight: float = 1.0
    models: tuple[str, ...] = (ALL_MODELS,)
    limits: tuple[Limit, ...] = ()
    on_store_outage: Outage = "lease"
    price: Price | None = None
    prefix_cache: CacheLimits = CacheLimits()
    stored_responses: StoredResponseLimits = StoredResponseLimits()
    batches: BatchLimits = BatchLimits()
    usage: UsageDetail = UsageDetail()
    guardrail: GuardrailPolicy | None = None
    log_texts: LogTexts = "none"  # whether prompts and answers are in the log of requests
    max_n: int = MAX_N  # answers to one prompt, hidden ones of best_of included
    max_schema_bytes: int = MAX_SCHEMA_BYTES  # of an answer's constraint; 0: no constraints
    max_top_logprobs: int = MAX_TOP_LOGPROBS  # most likely tokens at each position
    default_adapter: str | None = None  # of requests that name the served model; None: the model alone
    calendar: Calendar = UTC_CALENDAR  # of the budgets of the tenant and its keys
    team: str | None = None
    team_limits: tuple[Limit, ...] = ()  # the team's, at the tenant's prices
    keys: Mapping[str, KeyPolicy] = field(default_factory=dict)  # by id
    digest: int = field(init=False, compare=False, repr=False)  # of all the above
    queued_requests: int | None = field(init=False, compare=False, repr=False)  # the most that may wait

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", _digest(self))
        waiting = [limit.amount for limit in self.limits if limit.resource is Resource.QUEUED_REQUESTS]
        object.__setattr__(self, "queued_requests", min(waiting, default=None))

    def key(self, key_id: str | None) -> KeyPolicy | None:
        """The policy of the key; None if the policy does not mention it: it may do what its tenant may."""
        return self.keys.get(key_id) if key_id else None

    def limits_of(self, key_id: str | None = None) -> tuple[Limit, ...]:
        """All limits of a request with this key: the tenant's, then the key's, then the team's."""
        key = self.key(key_id)
        return self.limits + (key.limits if key else ()) + self.team_limits


@dataclass(frozen=True, slots=True)
class AliasedModel:
    """One of the models that an alias stands for."""

    model: str
    weight: float | None = None  # its part of the traffic; None: models are tried in the order of their alias


@dataclass(frozen=True, slots=True)
class Policy:
    """The content of policy files, in force at one time. `version` is a hash of the content."""

    version: str
    classes: tuple[ClassPolicy, ...]  # the most urgent first
    default: TenantPolicy  # of unnamed tenants; its name is empty
    tenants: Mapping[str, TenantPolicy]
    unnamed_tenants: Unnamed = "allow"  # treatment of unnamed tenants' keys
    prefix_sharing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # tenants by group; each in one at most
    teams: Mapping[str, TeamPolicy] = field(default_factory=dict)
    aliases: Mapping[str, tuple[AliasedModel, ...]] = field(default_factory=dict)  # by name
    caching: Mapping[str, CacheLimits] = field(init=False, compare=False, repr=False)
    """Limits of cached memory of the named tenants that have some."""
    changed_from: dict[str, list[str]] = field(init=False, compare=False, repr=False, default_factory=dict)
    """Differing tenants by earlier version, for `changed_tenants`, which each listener to an edit calls."""

    def __post_init__(self) -> None:
        named = self.tenants.items()
        caching = {name: kept for name, one in named if (kept := one.prefix_cache).floor or kept.pinned}
        object.__setattr__(self, "caching", caching)

    @staticmethod
    def of(
        classes: tuple[ClassPolicy, ...],
        default: TenantPolicy,
        tenants: Mapping[str, TenantPolicy] | None = None,
        unnamed_tenants: Unnamed = "allow",
        prefix_sharing: Mapping[str, tuple[str, ...]] | None = None,
        teams: Mapping[str, TeamPolicy] | None = None,
        aliases: Mapping[str, tuple[AliasedModel, ...]] | None = None,
    ) -> "Policy":
        tenants, groups, teams = dict(tenants or {}), dict(prefix_sharing or {}), dict(teams or {})
        aliases = aliases or {}
        version = _version(classes, default, tenants, unnamed_tenants, groups, teams, aliases)
        return Policy(version, classes, default, tenants, unnamed_tenants, groups, teams, aliases)

    def admits(self, tenant: str) -> bool:
        """True if requests of this tenant are served."""
        return self.unnamed_tenants == "allow" or tenant in self.tenants

    def tenant(self, name: str) -> TenantPolicy:
        return self.tenants.get(name, self.default)

    def cache_scope(self, tenant: str) -> str:
        """The name of the scope in which the tenant finds cached prefixes: the tenant alone, or its group with its
        present members, who find no blocks of former members.

        Names of tenants and of groups never collide.
        """
        for group, members in self.prefix_sharing.items():
            if tenant in members:
                digest = sha256(",".join(sorted(members)).encode()).hexdigest()[:16]
                return f"group:{group}:{digest}"
        return f"tenant:{tenant}"

    def cache_limits(self, tenant: str) -> CacheLimits:
        """The tenant's limits of cached memory. An unnamed tenant has no floor, since their number is unbounded."""
        limits = self.tenant(tenant).prefix_cache
        return limits if tenant in self.tenants else CacheLimits(ceiling=limits.ceiling)

    def class_named(self, name: str) -> ClassPolicy:
        return next(entry for entry in self.classes if entry.name == name)

    def class_for(self, tenant: str, key_id: str | None = None, service_tier: str | None = None) -> ClassPolicy:
        """The class of a request: its tier's, but never above the tenant's and the key's highest class.

        The tenant's default class serves `auto`, `default`, no tier, and unknown tiers.
        """
        asked = next((entry for entry in self.classes if service_tier in entry.service_tiers), None)
        wanted = asked or self.class_named(self.tenant(tenant).default_class)
        return self.classes[max(self.highest_level(tenant, key_id), wanted.level)]

    def highest_level(self, tenant: str, key_id: str | None = None) -> int:
        """The level of the most urgent class allowed to a request."""
        owner = self.tenant(tenant)
        key = owner.key(key_id)
        names = (owner.highest_class, key.highest_class if key and key.highest_class else owner.highest_class)
        return max(self.class_named(name).level for name in names)


def _version(
    classes: tuple[ClassPolicy, ...],
    default: TenantPolicy,
    tenants: Mapping[str, TenantPolicy],
    unnamed_tenants: Unnamed,
    prefix_sharing: Mapping[str, tuple[str, ...]],
    teams: Mapping[str, TeamPolicy],
    aliases: Mapping[str, tuple[AliasedModel, ...]],
) -> str:
    """A hash of the content. Tenants are summed up: their order does not matter, and an edit of one is one sum."""
    named = sum(map(attrgetter("digest"), tenants.values())) % 2**DIGEST_BITS
    groups = sorted((group, sorted(members)) for group, members in prefix_sharing.items())
    shared = [(team.name, _said(team.limits), team.currency) for _, team in sorted(teams.items())]
    content = [[astuple(entry) for entry in classes], default.digest, named, unnamed_tenants, groups, shared]
    content += [sorted(aliases.items())] if aliases else []
    return sha256(repr(content).encode()).hexdigest()[:12]


DIGEST_BITS = 128


def _digest(tenant: TenantPolicy) -> int:
    keys = [
        (
            key.id,
            key.hmac,
            key.expires,
            key.scopes,
            key.models,
            key.highest_class,
            key.classes,
            _said(key.limits),
            key.tags,
        )
        for key in sorted(tenant.keys.values(), key=lambda key: key.id)
    ]
    shared = _written(tenant.prefix_cache, tenant.stored_responses, tenant.batches, tenant.usage)
    content = (
        (tenant.name, tenant.highest_class, tenant.default_class, tenant.weight, tenant.models, _said(tenant.limits)),
        (tenant.on_store_outage, tenant.price, shared),
        (tenant.guardrail, tenant.max_n, tenant.max_schema_bytes, tenant.max_top_logprobs, keys),
        (tenant.calendar, tenant.team, _said(tenant.team_limits)),
        *([tenant.default_adapter] if tenant.default_adapter is not None else []),
        *([f"prices {tenant.price.models}"] if tenant.price and tenant.price.models else []),
        *([f"log_texts {tenant.log_texts}"] if tenant.log_texts != "none" else []),
    )
    return int.from_bytes(sha256(repr(content).encode("utf-8", "surrogatepass")).digest()[: DIGEST_BITS // 8])


class _Written(str):
    """Its representation is the text itself."""

    __slots__ = ()
    __repr__ = str.__str__


@lru_cache
def _written(*parts: object) -> _Written:
    """The parts as a digest reads them; most tenants have those of defaults."""
    return _Written(", ".join(map(repr, parts)))


def _said(limits: tuple[Limit, ...]) -> list[tuple[object, ...]]:
    return [
        (limit.name, limit.amount, limit.capacity, one.calendar if isinstance(one := limit.window, Budget) else None)
        + ((limit.alerts, limit.is_soft) if limit.alerts else ())
        for limit in limits
    ]


AGING_STEP_SECONDS = 20.0  # from one class to the next: see docs/policies.md for its value

SPARE_CLASS_NAME = "spare"  # of the lines of batches: it is behind every class, and no policy has a class of this name

CLASSES = (
    ClassPolicy(
        name="interactive",
        level=0,
        service_tiers=("fast", "priority", "scale"),
        ttft=0.5,
        time_per_output_token=0.04,
        queue=QueueLimits(requests=256, seconds=30.0),
    ),
    ClassPolicy(
        name="standard",
        level=1,
        ttft=2.0,
        time_per_output_token=0.08,
        aging=AGING_STEP_SECONDS,
        queue=QueueLimits(requests=1024, seconds=120.0),
    ),
    ClassPolicy(
        name="batch",
        level=2,
        service_tiers=("flex",),
        aging=2 * AGING_STEP_SECONDS,
        queue=QueueLimits(requests=4096, seconds=3600.0),
    ),
)
DEFAULTS = TenantPolicy(name="", highest_class="interactive", default_class="standard")
DEFAULT_POLICY = Policy.of(CLASSES, DEFAULTS)
