"""The causes among findings: if one trouble shows in many ways, its cause is listed first, and its effects behind
it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from gateway.doctor.finding import Finding, Severity

ABOVE_TARGET = "above_target_"  # prefix of findings of a class
LATE = ("above_target", "slow_answers", "promises_broken", "early_retries", "refusing")

EXPLAINS = {  # by kind, the likelier cause first; no finding explains one above it
    "device_stalled": ("not_admitted", *LATE),
    "store_away": ("store_fails", "store_slow", "fairness_local", "refusing", "early_retries", "unsettled"),
    "starving_floor": ("small_batches", "not_admitted", "preemptions", "thrashing", *LATE),
    "small_batches": ("not_admitted", "preemptions", "thrashing", *LATE),
    "preemptions": ("thrashing", *LATE),
    "lost_steps": LATE,
    "late_loop": (
        "low_utilisation",
        "slow_planning",
        "prices_off",
        "store_slow",
        "store_fails",
        "fairness_local",
        *LATE,
    ),
    "flooding_tenant": ("refused_tenant", *LATE),
    "low_utilisation": LATE,
    "slow_planning": LATE,
    "long_prefills": LATE,
    "not_admitted": LATE,
    "above_target": LATE,
}
_RANKS = {kind: rank for rank, kind in enumerate(EXPLAINS)}


def ranked(found: Iterable[Finding]) -> list[Finding]:
    """Findings with the name of their `cause`, each behind it; serious ones, and causes of serious ones, come first."""
    ordered = sorted((replace(finding, cause="") for finding in found), key=_is_mild)
    roots = {finding: _root(finding, ordered) for finding in ordered}
    groups = [
        [root, *(replace(one, cause=root.name) for one in ordered if roots[one] is root is not one)]
        for root in ordered
        if roots[root] is root
    ]
    groups.sort(key=lambda group: min(map(_is_mild, group)))
    return [finding for group in groups for finding in group]


def _root(finding: Finding, found: Sequence[Finding]) -> Finding:
    """The root cause of a finding, itself if none explains it."""
    causes = [one for one in found if one is not finding and _explains(one, finding, found)]
    if not causes:
        return finding
    return _root(min(causes, key=lambda one: (_RANKS[_kind(one)], one.replicas != finding.replicas, str(one))), found)


def _explains(cause: Finding, finding: Finding, found: Sequence[Finding]) -> bool:
    is_first = _kind(cause) != _kind(finding) or found.index(cause) < found.index(finding)
    return is_first and _kind(finding) in EXPLAINS.get(_kind(cause), ()) and _meet(cause, finding)


def _meet(one: Finding, other: Finding) -> bool:
    """True if both are of the same gateway, or one's replicas contain the other's; not of two tenants."""
    if one.tenant and other.tenant and one.tenant != other.tenant:
        return False
    return one.replicas == other.replicas or not {*one.replicas}.isdisjoint(other.replicas)


def _kind(finding: Finding) -> str:
    return ABOVE_TARGET.rstrip("_") if finding.name.startswith(ABOVE_TARGET) else finding.name


def _is_mild(finding: Finding) -> bool:
    return finding.severity is not Severity.SERIOUS
