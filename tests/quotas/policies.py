"""Policies at random, policies from text, and policy files as an editor sees them."""

import re
from dataclasses import fields
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from quotas.policy.limit import (
    MAX_AMOUNT,
    MAX_RATE,
    PER_SESSION,
    RATE_UNITS,
    TENANT_ONLY,
    Alert,
    Budget,
    BudgetPeriod,
    Calendar,
    Limit,
    PerSession,
    Rate,
    Resource,
    Window,
)
from quotas.policy.policy import (
    MAX_BATCH_LINES,
    MAX_GUARDRAIL_HOLD_CHARS,
    MAX_N,
    MAX_OPEN_BATCHES,
    MAX_SCHEMA_BYTES,
    MAX_TOP_LOGPROBS,
    SCOPES,
    SERVICE_TIERS,
    BatchLimits,
    CacheLimits,
    ClassPolicy,
    GuardrailPolicy,
    KeyPolicy,
    Lateness,
    Policy,
    Price,
    QueueLimits,
    StoredResponseLimits,
    TeamPolicy,
    TenantPolicy,
)
from quotas.policy.policy_file import PolicyError, parse_policy
from quotas.policy.problems import Problems
from quotas.policy.schema import LOG_TEXTS, UNNAMED
from quotas.policy.yaml_nodes import Fields, Items, Node, Scalar, compose

POLICIES = Path(__file__).parents[2] / "policies"
EXAMPLES = [POLICIES / "default.yaml", *sorted((POLICIES / "examples").glob("*.yaml"))]

# Plain scalars of YAML's core schema (YAML 1.2.2, 10.3.2) that are not text
CORE_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
CORE_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan")
CORE_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}


def parsed(text: str) -> Policy:
    return parse_policy({"policy.yaml": text.encode()})


def problems_of(*texts: str | bytes) -> list[str]:
    """What is wrong with the files a.yaml, b.yaml, ... together."""
    contents = [text.encode() if isinstance(text, str) else text for text in texts]
    try:
        parse_policy({f"{chr(ord('a') + index)}.yaml": content for index, content in enumerate(contents)})
    except PolicyError as error:
        return [str(problem) for problem in error.problems]
    return []


def as_json(text: str) -> Any:
    """The file as JSON Schema sees it in an editor, typed by YAML's core schema."""
    node = compose("policy.yaml", text.encode(), Problems())
    assert node is not None
    return _json(node)


def _json(node: Node) -> Any:
    if isinstance(node, Fields):
        return {name: _json(value) for name, (_, value) in node.entries.items()}
    if isinstance(node, Items):
        return [_json(item) for item in node.nodes]
    assert isinstance(node, Scalar)
    return _scalar(node.text) if node.is_plain else node.text


def _scalar(text: str) -> Any:
    if text in CORE_WORDS:
        return CORE_WORDS[text]
    if CORE_INT.fullmatch(text):
        return int(text, 0 if text[:2] in {"0x", "0o"} else 10)
    return float(text.replace(".inf", "inf").replace(".nan", "nan")) if CORE_FLOAT.fullmatch(text) else text


amounts = st.integers(1, MAX_AMOUNT) | st.sampled_from([1, 10, 1000, 1500, 20_000, 10**6, 2**31, MAX_AMOUNT])
rates = st.integers(1, MAX_RATE) | st.sampled_from([1, 1500, 20_000, MAX_RATE])
seconds = st.integers(1, 10**9).map(lambda number: float(Decimal(number) / 10**6)) | st.integers(1, 10**6).map(float)
weights = st.integers(1, 10**6).map(lambda number: number / 1000)
moments = st.integers(0, 2**32).map(lambda stamp: datetime.fromtimestamp(stamp, UTC))
prices = st.integers(0, 10**9).map(lambda number: (Decimal(number) / 10**12).normalize())
names = st.sampled_from(["acme", "a.b-c_d", "Z" * 64, "no", "on", "010", "1e3", "0x10", "null", "2027-01-31", "y", "0"])
models = st.just(("*",)) | st.lists(st.sampled_from(["a", "b/c", "Qwen 3", "#d", "e: f"]), min_size=1, unique=True).map(
    tuple
)


calendars = st.builds(Calendar, st.sampled_from(["UTC", "Europe/Berlin", "Asia/Kathmandu"]), st.integers(0, 6))


alerts = st.lists(
    st.integers(1, 100).map(lambda at: Alert(at, f"https://a.example/{at}")), min_size=1, max_size=3, unique=True
)
warnings = st.just(((), False)) | st.tuples(alerts.map(tuple), st.booleans())


@st.composite
def windows(draw: st.DrawFn, unit: int | BudgetPeriod | PerSession, amount: int, calendar: Calendar) -> Window:
    match unit:
        case BudgetPeriod():
            return Budget(unit, calendar)
        case PerSession():
            return unit
    return Rate(unit, draw(st.just(amount) | rates))


@st.composite
def limit_sets(
    draw: st.DrawFn, calendar: Calendar, key: str | None = None, team: str | None = None
) -> tuple[Limit, ...]:
    limits: list[Limit] = []
    for resource in Resource:
        if resource.is_held and not ((key or team) and resource in TENANT_ONLY) and draw(st.booleans()):
            limits.append(Limit(resource, draw(st.just(0) | amounts), None, key, team=team))
        elif not resource.is_held and resource is not Resource.COST:  # which needs a price
            units = [*RATE_UNITS.values(), *BudgetPeriod, *([] if key or team else [PER_SESSION])]
            for unit in draw(st.sets(st.sampled_from(units), max_size=2)):
                amount = draw(rates if isinstance(unit, int) else amounts)
                alerts, is_soft = draw(warnings) if isinstance(unit, BudgetPeriod) else ((), False)
                window = draw(windows(unit, amount, calendar))
                limits.append(Limit(resource, amount, window, key, None, team, alerts, is_soft))
    return _ordered(tuple(limits))


@st.composite
def teams(draw: st.DrawFn, name: str) -> TeamPolicy:
    calendar = draw(calendars)
    return TeamPolicy(name, draw(limit_sets(calendar, team=name)), calendar)


@st.composite
def class_lists(draw: st.DrawFn) -> tuple[ClassPolicy, ...]:
    tiers = draw(st.permutations(SERVICE_TIERS))
    cut = draw(st.integers(0, 4))
    optional = st.none() | seconds
    found: list[ClassPolicy] = []
    for level, name in enumerate(draw(st.lists(st.sampled_from(["a", "b-1", "null", "y"]), min_size=1, unique=True))):
        own = tiers[:cut] if level == 0 else tiers[cut:] if level == 1 else []
        aging = found[-1].aging + draw(st.integers(0, 5)) if found else 0.0
        count = st.none() | amounts
        queue = QueueLimits(draw(count), draw(count), draw(count), draw(optional))
        ttft = draw(optional)
        late: Lateness = "refuse" if ttft is not None and draw(st.booleans()) else "wait"
        found.append(
            ClassPolicy(name, level, tuple(sorted(own)), ttft, draw(optional), aging, queue, late, draw(count))
        )
    return tuple(found)


system_prompts = st.sampled_from(["Be brief.", "none ", "010", "You are\n  two lines.\n", "é: #1 'quoted'", "x" * 500])


@st.composite
def cache_limits(draw: st.DrawFn) -> CacheLimits:
    ceiling = draw(st.none() | st.just(0) | amounts)
    floor = draw(st.just(0) | amounts)
    pinned = draw(st.lists(system_prompts, max_size=3, unique=True))
    return CacheLimits(floor if ceiling is None else min(floor, ceiling), ceiling, tuple(pinned))


guardrails = st.builds(
    GuardrailPolicy,
    st.sampled_from(["http://guardrail:8080/check", "https://[::1]/a?b=c#d", "http://g"]),
    st.sampled_from([("prompt", "answer"), ("prompt",), ("answer",)]),
    st.integers(1, 6000).map(lambda hundredths: hundredths / 100),
    st.sampled_from(["closed", "open"]),
    st.integers(1, MAX_GUARDRAIL_HOLD_CHARS),
)


@st.composite
def tenants(draw: st.DrawFn, name: str, classes: tuple[ClassPolicy, ...], teams: dict[str, TeamPolicy]) -> TenantPolicy:
    calendar, team = draw(calendars), draw(st.sampled_from([None, *teams]))
    highest = draw(st.sampled_from(classes))
    of_tokens = partial(st.builds, Price, prices, prices, prices, prices)
    own = of_tokens(st.just("EUR"), batch=st.sampled_from([Decimal(1), Decimal("0.5")]))
    priced = st.dictionaries(st.sampled_from(["minilm", "a b"]), own, max_size=2).map(
        lambda found: tuple(sorted(found.items()))
    )
    price = of_tokens(st.just("EUR"), models=priced) | of_tokens(st.just("USD"))
    return TenantPolicy(
        name=name,
        highest_class=highest.name,
        default_class=draw(st.sampled_from(classes[highest.level :])).name,
        weight=draw(weights),
        models=draw(models),
        limits=draw(limit_sets(calendar)),
        on_store_outage=draw(st.sampled_from(["closed", "open", "lease"])),
        price=draw(st.none() | price),
        prefix_cache=draw(cache_limits()),
        stored_responses=StoredResponseLimits(draw(st.integers(0, 2**40)), draw(st.integers(1, 10**6)) / 100),
        batches=BatchLimits(
            draw(st.integers(0, 2**40)),
            draw(st.integers(1, 10**6)) / 100,
            draw(st.integers(1, MAX_BATCH_LINES)),
            draw(st.integers(1, MAX_OPEN_BATCHES)),
        ),
        guardrail=draw(st.none() | guardrails),
        log_texts=draw(st.sampled_from(LOG_TEXTS)),
        max_n=draw(st.integers(1, MAX_N)),
        max_schema_bytes=draw(st.integers(0, MAX_SCHEMA_BYTES)),
        max_top_logprobs=draw(st.integers(0, MAX_TOP_LOGPROBS)),
        calendar=calendar,
        team=team,
        team_limits=teams[team].limits if team else (),
    )


@st.composite
def keys(draw: st.DrawFn, key_id: str, tenant: TenantPolicy, classes: tuple[ClassPolicy, ...]) -> KeyPolicy:
    allowed = classes[[entry.name for entry in classes].index(tenant.highest_class) :]
    highest = draw(st.none() | st.sampled_from(allowed))
    return KeyPolicy(
        id=key_id,
        hmac=draw(st.sampled_from([None, "0123456789abcdef" * 4, "12345678" * 8])),
        expires=draw(st.none() | moments),
        scopes=draw(st.sampled_from([SCOPES, SCOPES[:1], SCOPES[1:]])),
        models=draw(st.sampled_from([("*",), tenant.models])),
        highest_class=highest.name if highest else None,
        limits=draw(limit_sets(tenant.calendar, key=key_id)),
    )


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    classes = draw(class_lists())
    shared = {name: draw(teams(name)) for name in draw(st.lists(names, max_size=2, unique=True))}
    default = draw(tenants("", classes, shared))
    found = {}
    for index, name in enumerate(draw(st.lists(names, max_size=3, unique=True))):
        tenant = draw(tenants(name, classes, shared))
        ids = [f"{index}e{number}" for number in range(draw(st.integers(0, 2)))]
        own = {key_id: draw(keys(key_id, tenant, classes)) for key_id in ids}
        found[name] = TenantPolicy(**{**_fields(tenant), "keys": own})
    sharing = {draw(names): tuple(sorted(found)[:2])} if len(found) > 1 and draw(st.booleans()) else {}
    return Policy.of(classes, default, found, draw(st.sampled_from(UNNAMED)), sharing, shared)


def _fields(tenant: TenantPolicy) -> dict[str, Any]:
    return {one.name: getattr(tenant, one.name) for one in fields(tenant) if one.init}


def _ordered(limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
    """As policy files are read: by resource, rates before budgets, short windows first."""

    def order(limit: Limit) -> tuple[int, bool, float, str]:
        window = limit.window
        place = list(Resource).index(limit.resource)
        is_budget = not isinstance(window, Rate | None)
        return place, is_budget, window.seconds if isinstance(window, Rate) else 0, limit.label

    return tuple(sorted(limits, key=order))
