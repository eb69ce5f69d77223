"""A policy as complete YAML: every default filled in, every number in its shortest unit."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from decimal import Decimal
from textwrap import indent
from typing import Any

import yaml

from quotas.policy.limit import TENANT_ONLY, WEEKDAYS, Calendar, Limit, Rate, Resource
from quotas.policy.policy import (
    CacheLimits,
    ClassPolicy,
    GuardrailPolicy,
    KeyPolicy,
    Policy,
    Price,
    TeamPolicy,
    TenantPolicy,
)
from quotas.policy.schema import NO_ADAPTER, NO_GUARDRAIL, NO_PINS, NO_PRICE, NO_TEAM, UNLIMITED, WEIGHT_MARK
from quotas.policy.units import show_count, show_duration, show_money, show_number, show_price, show_share, show_size

Plain = dict[str, Any]


def policy_text(policy: Policy) -> str:
    """Return the YAML of a policy. Read back, it is the same policy."""
    return "".join(policy_parts(policy))


def policy_parts(policy: Policy) -> Iterator[str]:
    """Yield the YAML of a policy: what comes before the tenants, then each tenant, and the rest."""
    yield f"# version {policy.version}\n"
    yield _yaml({"classes": {entry.name: class_fields(entry) for entry in policy.classes}})
    yield _yaml({"defaults": tenant_fields(policy.default)})
    yield "tenants:\n" if policy.tenants else "tenants: {}\n"
    for name in sorted(policy.tenants):
        yield indent(_yaml({name: tenant_fields(policy.tenants[name])}), "  ")
    yield _yaml({"teams": {name: team_fields(team) for name, team in sorted(policy.teams.items())}})
    yield _yaml({"unnamed_tenants": policy.unnamed_tenants, "prefix_sharing": sharing_groups(policy)})
    yield _yaml({"aliases": alias_fields(policy)})


def _yaml(content: Plain) -> str:
    text: str = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=118)
    return text


def sharing_groups(policy: Policy) -> Plain:
    return {group: sorted(policy.prefix_sharing[group]) for group in sorted(policy.prefix_sharing)}


def alias_fields(policy: Policy) -> Plain:
    return {
        alias: [one.model if one.weight is None else f"{one.model}{WEIGHT_MARK}{one.weight:.17g}" for one in models]
        for alias, models in sorted(policy.aliases.items())
    }


def class_fields(entry: ClassPolicy) -> Plain:
    times = {name: getattr(entry, name) for name in ("ttft", "time_per_output_token", "aging")}
    shows = {"requests": _count, "tokens": _count, "bytes": show_size, "seconds": show_duration}
    bounds = asdict(entry.queue)
    fields: Plain = {"service_tiers": list(entry.service_tiers)} if entry.service_tiers else {}
    fields |= {name: show_duration(seconds) for name, seconds in times.items() if seconds is not None}
    if entry.when_late != "wait":
        fields["when_late"] = entry.when_late
    if entry.max_reasoning_tokens is not None:
        fields["max_reasoning_tokens"] = entry.max_reasoning_tokens
    return fields | {"queue": {name: show(bounds[name]) for name, show in shows.items() if bounds[name] is not None}}


def team_fields(team: TeamPolicy) -> Plain:
    fields: Plain = {"limits": _all_but_tenants(team.limits)}
    return fields | ({"currency": team.currency} if team.currency else {}) | _calendar(team.calendar)


def _calendar(calendar: Calendar) -> Plain:
    return {"time_zone": calendar.time_zone, "week_starts": WEEKDAYS[calendar.week_starts]}


def tenant_fields(tenant: TenantPolicy) -> Plain:
    fields: Plain = {
        "weight": _number(show_number(tenant.weight)),
        "models": list(tenant.models),
        "default_adapter": tenant.default_adapter or NO_ADAPTER,
        "highest_class": tenant.highest_class,
        "default_class": tenant.default_class,
        "limits": {resource.value: _limits(tenant.limits, resource) for resource in Resource},
        **_calendar(tenant.calendar),
        "team": tenant.team or NO_TEAM,
        "on_store_outage": tenant.on_store_outage,
        "price": _price(tenant.price) if tenant.price else NO_PRICE,
        "prefix_cache": _cache_limits(tenant.prefix_cache),
        "stored_responses": {
            "bytes": show_size(tenant.stored_responses.bytes),
            "retention": show_duration(tenant.stored_responses.retention),
            "background": tenant.stored_responses.background,
        },
        "batches": {
            "file_bytes": show_size(tenant.batches.file_bytes),
            "retention": show_duration(tenant.batches.retention),
            "lines": tenant.batches.lines,
            "open": tenant.batches.open,
        },
        "usage": {"by": list(tenant.usage.by), "rows": tenant.usage.rows},
        "guardrail": _guardrail(tenant.guardrail) if tenant.guardrail else NO_GUARDRAIL,
        "log_texts": tenant.log_texts,
        "max_n": tenant.max_n,
        "max_schema_bytes": tenant.max_schema_bytes,
        "max_top_logprobs": tenant.max_top_logprobs,
    }
    return fields | ({"keys": {key.id: key_fields(key) for key in tenant.keys.values()}} if tenant.keys else {})


def key_fields(key: KeyPolicy) -> Plain:
    optional = {
        "hmac": key.hmac,
        "expires": key.expires.isoformat() if key.expires else None,
        "scopes": list(key.scopes),
        "models": list(key.models),
        "highest_class": key.highest_class,
        "classes": list(key.classes) or None,
        "tags": dict(key.tags) or None,
    }
    return {name: value for name, value in optional.items() if value is not None} | {
        "limits": _all_but_tenants(key.limits)
    }


def _all_but_tenants(limits: Iterable[Limit]) -> Plain:
    """The limits of a key or a team."""
    return {resource.value: _limits(limits, resource) for resource in Resource if resource not in TENANT_ONLY}


def _limits(limits: Iterable[Limit], resource: Resource) -> Any:
    shown = [_limit(limit) for limit in limits if limit.resource is resource]
    if not shown:
        return UNLIMITED
    return shown if len(shown) > 1 else shown[0]


def _limit(limit: Limit) -> Any:
    if limit.window is None:
        return show_size(limit.amount) if limit.resource is Resource.KV_BYTES else _count(limit.amount)
    amount = show_money(limit.amount) if limit.resource is Resource.COST else show_count(limit.amount)
    rate = f"{amount}/{limit.window.unit}"
    if limit.alerts:
        alerts = [{"at": f"{alert.percent}%", "url": alert.url} for alert in limit.alerts]
        return {"budget": rate, **({"soft": True} if limit.is_soft else {}), "alerts": alerts}
    if isinstance(limit.window, Rate) and limit.window.burst != limit.amount:
        return {"rate": rate, "burst": _count(limit.window.burst)}
    return rate


def _price(price: Price) -> Plain:
    models = {name: _price_of_tokens(one, price.batch) for name, one in price.models}
    own = _price_of_tokens(price, Decimal(1)) | {"currency": price.currency}
    return own | ({"models": models} if models else {})


def _price_of_tokens(price: Price, batch: Decimal) -> Plain:
    """`batch` is the share in batches where none is said."""
    said = {} if price.batch == batch else {"batch": _number(show_share(price.batch))}
    return said | {
        "input": show_price(price.input),
        "output": show_price(price.output),
        "cached_input": show_price(price.cached_input),
        "reasoning": show_price(price.reasoning),
    }


def _guardrail(guardrail: GuardrailPolicy) -> Plain:
    return {
        "url": guardrail.url,
        "stages": list(guardrail.stages),
        "deadline": show_duration(guardrail.deadline),
        "on_failure": guardrail.on_failure,
        "hold": _count(guardrail.hold),
    }


def _cache_limits(limits: CacheLimits) -> Plain:
    ceiling = UNLIMITED if limits.ceiling is None else show_size(limits.ceiling)
    return {"floor": show_size(limits.floor), "ceiling": ceiling, "pinned": [*limits.pinned] or NO_PINS}


def _count(amount: int) -> str | int:
    return _number(show_count(amount))  # type: ignore[return-value]


def _number(text: str) -> str | int | float:
    """The text as a number if YAML reads it as one, so that it is not quoted."""
    return int(text) if text.isdecimal() else float(text) if text.replace(".", "").isdecimal() else text
