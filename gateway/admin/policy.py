"""The policy on the admin port: its text, its history, and checks of pasted edits."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from heapq import nsmallest
from typing import Any

from gateway.errors import RequestTooLarge
from gateway.http.json_body import Wire
from gateway.key_mask import masked
from gateway.tenants.live_policy import MAX_CHANGE_LINES, Check, Edition, LivePolicy, check_policy
from quotas.policy.policy import Policy, TenantPolicy
from quotas.policy.policy_diff import policy_diff, shortened
from quotas.policy.policy_file import PolicyError, parse_policy
from quotas.policy.policy_text import alias_fields, class_fields, policy_parts, sharing_groups, tenant_fields
from quotas.policy.problems import Problem
from quotas.policy.units import show_size

Plain = dict[str, Any]


MAX_SHOWN_TENANTS = 500  # shown in full


async def policy_report(policies: LivePolicy, words: str = "") -> Plain:
    """The policy in force without hashes of keys, with the tenants whose names contain `words`.

    A thread writes it: there may be thousands of tenants.
    """
    policy, problem, history = policies.current, problem_of(policies), list(policies.history)
    return {
        "version": policy.version,
        "problem": problem,
        "has_files": policies.has_files,
        "named": len(policy.tenants),
        **await asyncio.to_thread(_written_out, policy, words.lower()),
        "history": [_edition(edition) for edition in reversed(history)],
    }


def _written_out(policy: Policy, words: str) -> Plain:
    found = [name for name in policy.tenants if words in name.lower()]
    shown = nsmallest(MAX_SHOWN_TENANTS, found)
    return {"effective": effective(policy, shown), "truncated": len(found) - len(shown)}


def _edition(edition: Edition) -> Plain:
    return {"version": edition.version, "at": edition.at, "changes": without_hash_lines(edition.changes)}


def without_hash_lines(changes: Iterable[str]) -> list[str]:
    """Lines of `policy_diff` without those of hashes of keys."""
    return [line for line in changes if ".hmac: " not in line]


def problem_of(policies: LivePolicy) -> str | None:
    """The problem of a rejected edit; None without one."""
    return masked(str(policies.problem)) if policies.problem else None


def effective(policy: Policy, tenants: Iterable[str]) -> Plain:
    return {
        "classes": {entry.name: class_fields(entry) for entry in policy.classes},
        "defaults": _tenant(tenant_fields(policy.default)),
        "tenants": {name: _tenant(tenant_fields(policy.tenants[name])) for name in tenants},
        "prefix_sharing": sharing_groups(policy),
        "aliases": alias_fields(policy),
    }


def _tenant(fields: Plain) -> Plain:
    """The fields of a tenant without hashes of keys, with its prompts shortened."""
    keys, cache = fields.get("keys", {}), fields["prefix_cache"]
    shown = {name: {field: value for field, value in key.items() if field != "hmac"} for name, key in keys.items()}
    if isinstance(cache["pinned"], list):
        cache = cache | {"pinned": [shortened(prompt) for prompt in cache["pinned"]]}
    return fields | {"prefix_cache": cache} | ({"keys": shown} if keys else {})


MAX_COUNTED_LINES = 5000  # omitted lines that are counted
MIN_TENANT_BYTES = 300  # lower bound of a tenant's text
MAX_POLICY_BYTES = 256 * 1024  # of a pasted policy
PASTED_BODY_BYTES = 2 * MAX_POLICY_BYTES  # of the JSON around it, in which newlines and quotes take two
NAME = "pasted"  # instead of a file's


class PastedPolicy(Wire):
    text: str

    def source(self) -> bytes:
        """Return the pasted text as bytes. Raises `RequestTooLarge`."""
        source = self.text.encode()
        if len(source) > MAX_POLICY_BYTES:
            raise RequestTooLarge(
                f"The policy has {len(source):,} bytes; this check takes at most {show_size(MAX_POLICY_BYTES)}: use "
                "`sluice policy check` and `sluice policy diff`."
            )
        return source


class PolicyCheck:
    """Checks pasted policies, one at a time and in a thread: a large policy takes tenths of a second."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def of(self, pasted: PastedPolicy, current: Policy, checks: Iterable[Check] = ()) -> Plain:
        """The problems of a pasted policy by line, including those of `checks`; without problems, the changes it would
        make.
        """
        source = pasted.source()
        async with self._lock:
            return await asyncio.to_thread(_checked, source, current, checks)

    async def text(self, policy: Policy) -> Plain:
        """The policy as the text of a file, without hashes of keys; None as text if it is too long to edit."""
        async with self._lock:
            text = await asyncio.to_thread(_text, policy)
        return {"version": policy.version, "text": text}


def _text(policy: Policy) -> str | None:
    """The text of a policy; None as soon as it is too long."""
    text = ""
    for part in (
        policy_parts(without_hashes(policy)) if len(policy.tenants) < MAX_POLICY_BYTES // MIN_TENANT_BYTES else ()
    ):
        text += part
        if len(text) > MAX_POLICY_BYTES:
            return None
    return text or None


def _checked(source: bytes, current: Policy, checks: Iterable[Check]) -> Plain:
    try:
        policy = parse_policy({NAME: source})
        check_policy(policy, {NAME: source}, checks)
    except PolicyError as error:
        return {"valid": False, "problems": [problem_row(problem) for problem in error.problems]}
    changes = policy_diff(without_hashes(current), without_hashes(policy), MAX_CHANGE_LINES + MAX_COUNTED_LINES)
    return {
        "valid": True,
        "problems": [],
        "classes": len(policy.classes),
        "tenants": len(policy.tenants),
        "changes": changes[:MAX_CHANGE_LINES],
        "truncated": max(0, len(changes) - MAX_CHANGE_LINES),
    }


def problem_row(problem: Problem) -> Plain:
    """Describe a problem; lines and columns count from 1, and line 0 means the whole policy."""
    mark = problem.mark
    return {"line": mark.line, "column": mark.column, "path": masked(problem.path), "message": masked(problem.message)}


def without_hashes(policy: Policy) -> Policy:
    """Return the policy, with its version, but without the hashes of its keys."""
    tenants = {name: _without_hashes(tenant) for name, tenant in policy.tenants.items()}
    return replace(policy, tenants=tenants)


def _without_hashes(tenant: TenantPolicy) -> TenantPolicy:
    keys = {key_id: replace(key, hmac=None) for key_id, key in tenant.keys.items()}
    return replace(tenant, keys=keys) if keys else tenant
