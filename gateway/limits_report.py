"""What a tenant sees of its own limits."""

from collections.abc import Sequence
from typing import Any

from gateway.entitlement import Entitlement
from quotas.limit import Limit, Rate
from quotas.reservation import LimitState


def limits_report(entitlement: Entitlement, version: str, states: Sequence[LimitState]) -> dict[str, Any]:
    """Limits that `states` has nothing of are told without what is left of them."""
    known = {state.limit: state for state in states}
    return {
        "object": "list",
        "tenant": entitlement.name,
        "policy_version": version,
        "default_class": entitlement.service_class(None).name,
        "highest_class": entitlement.tenant.highest_class,
        "models": list(entitlement.tenant.models),
        "data": [_entry(limit, known.get(limit)) for limit in entitlement.limits],
    }


def _entry(limit: Limit, state: LimitState | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "object": "limit",
        "resource": limit.resource.value,
        "applies_to": "key" if limit.key else "tenant",
        "amount": limit.amount,
        "per": limit.window.unit if limit.window else None,
        "burst": limit.window.burst if isinstance(limit.window, Rate) else None,
    }
    if state is not None:
        entry |= {"remaining": state.remaining, "reset_seconds": round(state.reset, 3)}
    return entry
