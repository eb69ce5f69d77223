"""Findings about the queue: waiting tenants, their reasons, and the accuracy of predictions."""

from collections import Counter

from admission.explain import REASONS
from gateway.doctor.finding import Finding, Severity
from gateway.doctor.reasons import is_own_limit, plain_reason
from gateway.doctor.snapshot import Json, Window
from quotas.policy.units import counted

LATE_SHARE = 0.1  # of admissions: a target holds for nine in ten
MIN_ADMISSIONS = 5.0  # too few to estimate a tenth
FLOODING_SHARE = 0.8  # of waiting or refused requests: nearly all
MIN_FLOOD_REQUESTS = 10  # fewer are no flood
HELD_SHARE = 0.75  # of estimates: nine in ten should hold, and of 100 three standard errors are 0.09
EARLY_RETRY_SHARE = 0.5  # of retries: a client's jitter makes a few early
MAX_NAMED_TENANTS = 3

SERVERS_REASONS = {  # of `sluice_refusals_total`, with the remedy
    "quota_store": "see that Redis runs, is reached within --redis-timeout and takes writes; on_store_outage in the "
    "policy decides meanwhile",
    "queue_full": "add replicas or capacity, or bound the tenant that fills the queue",
    "preempted": "give KV memory more (--kv-memory-bytes), or lower --max-num-seqs",
    "error": "the log has the error of each",
}
FAILURES = {"quota_store", "error"}  # other reasons may be overload, which refusals answer
REMEDIES = {
    "batch": "serve with --batching continuous, the default",
    "peers": "serve with --batching continuous, the default",
    "release": "this passes; if it stays, lower --max-num-seqs",
    "budget": "raise --max-num-batched-tokens, or add replicas",
    "slots": "raise --max-num-seqs if KV memory has room, or add replicas",
    "memory": "give KV memory more (--kv-memory-bytes), lower --default-max-tokens, or add replicas",
    "model": "this passes with each step; serve the models by replicas of their own, or add replicas",
    "adapter": "give KV memory more (--kv-memory-bytes), so that more adapters stay in it",
    "allowance": "raise the tenant's kv_bytes in the policy, if it may have more",
    "tokens": "raise the tenant's token limits in the policy, if it may have more",
}


def not_admitted(window: Window) -> Finding | None:
    stuck = [row for row in _throughout(window) if not is_own_limit(row["reason"])]
    if not stuck or window.increase("sluice_admissions_total"):
        return None
    reasons = Counter(plain_reason(row["reason"]) for row in stuck)
    reason, _ = reasons.most_common(1)[0]
    return Finding(
        "not_admitted",
        "no request is admitted, and some wait",
        f"{counted(len(stuck), 'request')} queued, the longest for {_longest(stuck):.1f} s, and none was "
        f"admitted in {window.seconds:.1f} s: {reason}",
        _remedy(reason),
        Severity.SERIOUS,
    )


def held_by_own_limit(window: Window) -> Finding | None:
    held = [row for row in _throughout(window) if is_own_limit(row["reason"])]
    if not held:
        return None
    tenants = Counter(row["tenant"] for row in held).most_common(MAX_NAMED_TENANTS)
    names = ", ".join(f"{name} ({count})" for name, count in tenants)
    reason = plain_reason(held[0]["reason"])
    return Finding(
        "held_by_own_limit",
        "requests wait for their own tenant's limit",
        f"{counted(len(held), 'request')} queued, the longest for {_longest(held):.1f} s, of {names}: {reason}",
        _remedy(reason),
    )


def above_target(window: Window) -> list[Finding]:
    return [
        finding
        for name, targets in window.after.targets.items()
        if targets.ttft is not None and (finding := _class_above_target(window, name, targets.ttft))
    ]


def _class_above_target(window: Window, name: str, target: float) -> Finding | None:
    late = window.above(target, "sluice_queue_time_seconds", **{"class": name})
    oldest = window.after.samples.total("sluice_queue_oldest_age_seconds", **{"class": name})
    many = late.total >= MIN_ADMISSIONS and late.share >= LATE_SHARE
    if not many and oldest <= target:
        return None
    evidence = [f"{late.count:.0f} of {late.total:.0f} admitted requests had waited longer than {late.bound:g} s"]
    evidence = evidence if many else []
    evidence += [f"the oldest waits for {oldest:.1f} s"] if oldest > target else []
    return Finding(
        f"above_target_{name}",
        f"class {name} waits longer than its target of {target:g} s to the first token",
        "; ".join(evidence),
        "add replicas or capacity; or have the class refuse late requests (when_late: refuse), so that the others "
        "are on time",
        Severity.SERIOUS if many and late.share >= 0.5 else Severity.WARNING,
    )


def flood_of_work(window: Window) -> Finding | None:
    """Find one tenant with nearly the whole backlog: fairness makes it wait for itself, but it fills the queue."""
    rows = window.after.tenants
    waiting = sum(row["waiting"] for row in rows)
    top = max(rows, key=lambda row: row["waiting"], default=None)
    if top is None or waiting < MIN_FLOOD_REQUESTS or top["waiting"] < FLOODING_SHARE * waiting:
        return None
    if not any(row["requests"] or row["running"] or row["waiting"] for row in rows if row is not top):
        return None  # no other tenant is affected
    others = _longest([row for row in window.after.waiting if row["tenant"] != top["name"]])
    return Finding(
        "flooding_tenant",
        f"tenant {top['name']} floods the queue",
        f"{top['waiting']} of {waiting} waiting requests are its own, and {top['running']} of its requests are "
        f"running; it had {top['share']:.0%} of the engine's time in the last minute; no other tenant's request waits "
        f"longer than {others:.1f} s",
        "other tenants still get their shares; bound this one in the policy with queued_requests, "
        "concurrent_requests or a rate, and ask its owner about the traffic",
        tenant=top["name"],
    )


def flood_of_refusals(window: Window) -> Finding | None:
    before = {row["name"]: row["refused"] for row in window.before.tenants}
    refused = {row["name"]: row["refused"] - before.get(row["name"], 0) for row in window.after.tenants}
    total, name = sum(refused.values()), max(refused, key=refused.__getitem__, default="")
    if total < MIN_FLOOD_REQUESTS or refused[name] < FLOODING_SHARE * total:
        return None
    return Finding(
        "refused_tenant",
        f"tenant {name} is refused again and again",
        f"{refused[name]} of {total} refusals in {window.seconds:.1f} s were of its requests",
        "see /admin/v1/refusals for its limit: raise that in the policy, or ask its owner to obey Retry-After",
        tenant=name,
    )


def refusing(window: Window) -> Finding | None:
    """Find requests that are refused, or fail, for causes within the server."""
    counts = {reason: window.increase("sluice_refusals_total", reason=reason) for reason in SERVERS_REASONS}
    total = sum(counts.values())
    if total < MIN_FLOOD_REQUESTS:
        return None
    reason = max(counts, key=counts.__getitem__)
    by_reason = ", ".join(f"{name} {count:.0f}" for name, count in counts.items() if count)
    return Finding(
        "refusing",
        "requests are refused for causes within the server",
        f"{total:.0f} in {window.seconds:.1f} s: {by_reason}",
        SERVERS_REASONS[reason],
        Severity.SERIOUS if reason in FAILURES else Severity.WARNING,
    )


def early_retries(window: Window) -> Finding | None:
    early = window.increase("sluice_retries_total", honoured="false")
    every = window.increase("sluice_retries_total")
    if early < MIN_FLOOD_REQUESTS or early < EARLY_RETRY_SHARE * every:
        return None
    return Finding(
        "early_retries",
        "clients retry before their Retry-After",
        f"{early:.0f} of {every:.0f} retries in {window.seconds:.1f} s came early",
        "the request log names their tenants: have their clients obey Retry-After, or limit their rate",
    )


def promises_broken(window: Window) -> Finding | None:
    """Find tenants whose newest estimates of first tokens did not hold, at both ends of the window."""
    metric, newest = "sluice_tenant_estimate_coverage_ratio", {"token": "first", "window": "100"}
    before, after = (samples.by_label(metric, "tenant", **newest) for samples in window.both_samples)
    broken = {name: share for name, share in after.items() if max(share, before.get(name, share)) < HELD_SHARE}
    if not broken:
        return None
    worst = sorted(broken, key=broken.__getitem__)[:MAX_NAMED_TENANTS]
    names = ", ".join(f"{name} ({broken[name]:.0%})" for name in worst)
    return Finding(
        "promises_broken",
        "first tokens come later than these tenants' estimates",
        f"of their last 100 estimates held: {names}; nine in ten are meant to. {len(broken)} of {len(after)} tenants",
        "few tenants: their prompts or bursts have changed; bound them by rate or queued_requests. Most tenants: "
        "look for causes outside: other processes on its cores, a throttled device",
    )


def _throughout(window: Window) -> list[Json]:
    """The rows that waited for the whole window."""
    return [row for row in window.after.waiting if row["waited"] >= window.seconds]


def _longest(rows: list[Json]) -> float:
    return max((float(row["waited"]) for row in rows), default=0.0)


def _remedy(reason: str) -> str:
    name = next((name for name, text in REASONS.items() if text == reason), "")
    return REMEDIES.get(name, "see `sluice explain` for one of them, and the log")
