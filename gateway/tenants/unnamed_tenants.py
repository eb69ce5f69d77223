"""Keys of tenants outside the policy: seldom intended, since a mistyped tenant has no limits."""

from collections.abc import Iterable, Mapping

from gateway.tenants.key_store import KeyRecord
from quotas.policy.policy import Policy
from quotas.policy.problems import did_you_mean

MAX_LISTED_TENANTS = 20


def describe_unnamed(policy: Policy, tenant: str) -> str:
    """The effect of `policy` on a tenant outside it, and a similar name that may have been intended."""
    if not policy.admits(tenant):
        fate = "its keys are refused (unnamed_tenants: refuse)"
    elif policy.default.limits:
        fate = "the defaults hold for it"
    else:
        fate = "nothing limits it"
    return f"{fate}{did_you_mean(tenant, policy.tenants)}"


def unnamed_keys(policy: Policy, records: Iterable[KeyRecord]) -> Mapping[str, list[str]]:
    """The ids of the keys of unnamed tenants, by tenant."""
    found: dict[str, list[str]] = {}
    for record in records:
        if record.tenant not in policy.tenants:
            found.setdefault(record.tenant, []).append(record.id)
    return found


def unnamed_tenant_lines(policy: Policy, records: Iterable[KeyRecord]) -> list[str]:
    """A line for each unnamed tenant, the first `MAX_LISTED_TENANTS` of them."""
    found = sorted(unnamed_keys(policy, records).items())
    lines = [
        f"{tenant} ({_keys(ids)}): {describe_unnamed(policy, tenant)}" for tenant, ids in found[:MAX_LISTED_TENANTS]
    ]
    return lines + ([f"and {len(found) - MAX_LISTED_TENANTS} more tenants"] if len(found) > MAX_LISTED_TENANTS else [])


def _keys(ids: list[str]) -> str:
    return f"key {ids[0]}" if len(ids) == 1 else f"{len(ids)} keys, {ids[0]} the first"
