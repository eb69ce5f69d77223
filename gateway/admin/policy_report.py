"""The policy in force, and what was changed when."""

import asyncio
from typing import Any

from gateway.policies import Edition, Policies
from quotas.policy import Policy
from quotas.policy_text import class_fields, tenant_fields

Plain = dict[str, Any]


async def policy_report(policies: Policies) -> Plain:
    """Without the hashes of keys. A thread writes it out: there may be thousands of tenants."""
    policy, problem, history = policies.current, problem_of(policies), list(policies.history)
    return {
        "version": policy.version,
        "problem": problem,
        "has_files": policies.has_files,
        "effective": await asyncio.to_thread(effective, policy),
        "history": [_edition(edition) for edition in reversed(history)],
    }


def _edition(edition: Edition) -> Plain:
    changes = [line for line in edition.changes if ".hmac: " not in line]
    return {"version": edition.version, "at": edition.at, "changes": changes}


def problem_of(policies: Policies) -> str | None:
    """What is wrong with an edit that was not taken up."""
    return str(policies.problem) if policies.problem else None


def effective(policy: Policy) -> Plain:
    return {
        "classes": {entry.name: class_fields(entry) for entry in policy.classes},
        "defaults": _tenant(tenant_fields(policy.default)),
        "tenants": {name: _tenant(tenant_fields(policy.tenants[name])) for name in sorted(policy.tenants)},
    }


def _tenant(fields: Plain) -> Plain:
    keys = fields.get("keys", {})
    shown = {name: {field: value for field, value in key.items() if field != "hmac"} for name, key in keys.items()}
    return fields | ({"keys": shown} if keys else {})
