"""Diagnoses a fleet: a pure function of two looks at it, and of its replicas' own diagnoses."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import islice

from fleet.admin.summary import ReplicaSummary, ToldSummary
from fleet.view import Condition
from gateway.doctor.causes import ranked
from gateway.doctor.finding import Finding, Severity
from quotas.policy.units import counted, show_wait

BACKLOG_RATIO = 3.0  # to the mean of the others: cache affinity alone may make it 2
MIN_BACKLOG_SECONDS = 5.0  # above that mean: less is one long prompt, or a fresh burst
MAX_NAMED_REPLICAS = 3  # replicas with evidence in a finding
OWN = frozenset({"draining"})  # replicas' findings that the router's own replace


@dataclass(frozen=True, slots=True)
class Look:
    """The fleet at one moment; `at` is in seconds of a clock that both looks share."""

    at: float
    replicas: tuple[ReplicaSummary, ...]
    num_available: int  # replicas available to requests
    retries_left: bool  # every tenant has second attempts left

    def those(self, condition: Condition) -> list[ReplicaSummary]:
        return [one for one in self.replicas if one.condition is condition]


@dataclass(frozen=True, slots=True)
class FleetWindow:
    """The time between two looks."""

    before: Look
    after: Look


@dataclass(frozen=True, slots=True)
class Answers:
    """The replicas' own diagnoses, by the replica's name, and the reasons of missing ones."""

    findings: Mapping[str, Sequence[Finding]]
    problems: Mapping[str, str]


def fleet_findings(window: FleetWindow, answers: Answers) -> list[Finding]:
    """The troubles of a fleet and of its replicas, `ranked`; the fleet's first among equally serious ones."""
    found = [finding for judge in _JUDGES if (finding := judge(window)) is not None]
    own = {
        name: [one for one in findings if one.name not in OWN]
        for name, findings in answers.findings.items()
        if name in {one.name for one in window.after.replicas}
    }
    silent = {one.name for one in window.after.those(Condition.SILENT)}
    unasked = {name: why for name, why in answers.problems.items() if name not in silent}
    found += [*_undiagnosed(unasked), *together(own)]
    return ranked(found)


def together(own: Mapping[str, Iterable[Finding]]) -> list[Finding]:
    """The findings of replicas; equal findings are joined, naming all their replicas."""
    shared: dict[tuple[str, str, str], dict[str, Finding]] = {}
    for replica, findings in own.items():
        for finding in findings:
            shared.setdefault((finding.name, finding.trouble, finding.remedy), {})[replica] = finding
    return [_joined(by_replica) for by_replica in shared.values()]


def _joined(by_replica: Mapping[str, Finding]) -> Finding:
    first = next(iter(by_replica.values()))
    is_serious = any(one.severity is Severity.SERIOUS for one in by_replica.values())
    return replace(
        first,
        evidence=_each({name: one.evidence for name, one in by_replica.items()}),
        severity=Severity.SERIOUS if is_serious else Severity.WARNING,
        replicas=tuple(by_replica),
    )


def no_replica(window: FleetWindow) -> Finding | None:
    if window.before.num_available or window.after.num_available:
        return None
    num_replicas = len(window.after.replicas)
    counts = {condition: len(window.after.those(condition)) for condition in Condition}
    told = ", ".join(f"{count} {condition}" for condition, count in counts.items() if count)
    return Finding(
        "no_replica",
        "no replica takes requests, and all are answered 503",
        f"of {counted(num_replicas, 'replica')}: {told}" if num_replicas else "the router knows of no replica",
        "start replicas, and see that the router is told their addresses and admin ports (--replicas...), and that "
        "they and the router have one SLUICE_ADMIN_KEY",
        Severity.SERIOUS,
    )


def all_silent(window: FleetWindow) -> Finding | None:
    """Find a router without recent states, which routes by old ones: more likely its own delay than all replicas'."""
    look = window.after
    if not look.num_available or len(look.those(Condition.SILENT)) < len(look.replicas):
        return None
    return Finding(
        "all_silent",
        "no replica has told its state lately, and the router goes by their last states",
        _each({one.name: _silence(one) for one in look.replicas}),
        "reserve a core for the router, and see that it reaches the replicas' admin ports",
        Severity.SERIOUS,
    )


def silent(window: FleetWindow) -> Finding | None:
    look = window.after
    silent = look.those(Condition.SILENT)
    return _of_those(
        silent if len(silent) < len(look.replicas) or not look.num_available else [],
        "replica_silent",
        "no recent state, so no requests are sent there",
        _silence,
        "see that they run, and that the router reaches their admin ports with their SLUICE_ADMIN_KEY; if they are "
        "gone for good, take them out of the file of --replicas",
    )


def _silence(one: ReplicaSummary) -> str:
    since = "never told it" if one.silent_seconds is None else f"told it {show_wait(one.silent_seconds)} ago"
    return f"{since} ({one.problem})" if one.problem else since


def ejected(window: FleetWindow) -> Finding | None:
    times = {one.name: one.ejections for one in window.before.replicas}
    out = [
        one
        for one in window.after.replicas
        if one.condition is Condition.EJECTED or one.ejections > times.get(one.name, one.ejections)
    ]
    return _of_those(
        out,
        "replica_ejected",
        "ejected for a while, because requests fail there",
        lambda one: f"{show_wait(one.left_out_seconds)} more, {one.ejections} times so far",
        "their logs have the errors; a replica that fails again and again should be restarted",
    )


def replica_draining(window: FleetWindow) -> Finding | None:
    return _of_those(
        window.after.those(Condition.DRAINING),
        "replica_draining",
        "draining: nothing new is sent there",
        lambda one: f"{counted(one.told.running + one.told.waiting if one.told else 0, 'request')} left",
        "none, if they are meant to stop; the others take their load meanwhile",
    )


def imbalance(window: FleetWindow) -> Finding | None:
    """Find a replica with far more work than the others at both looks."""
    earlier = _work(window.before)
    work = {name: min(seconds, earlier[name]) for name, seconds in _work(window.after).items() if name in earlier}
    if len(work) < 2:
        return None
    name = max(work, key=work.__getitem__)
    most = work.pop(name)
    mean = sum(work.values()) / len(work)
    if most < BACKLOG_RATIO * mean or most - mean < MIN_BACKLOG_SECONDS:
        return None
    return Finding(
        "imbalance",
        "far more work than the other replicas",
        f"{most:.1f} s of work, where the other {len(work)} have {mean:.1f} s on average",
        f"see /admin/v1/fleet/replicas/{name} for the tenants that wait there. It may be slower than the others, have "
        "work from past this router, or have most prompts' beginnings cached: --routing predicted, the default, "
        "weighs that",
        replicas=(name,),
    )


def _work(look: Look) -> dict[str, float]:
    return {one.name: one.told.work_seconds for one in look.those(Condition.SERVING) if one.told is not None}


def models_differ(window: FleetWindow) -> Finding | None:
    return _differ(
        _told(window.after, lambda one: one.model),
        "models_differ",
        "another model than the other replicas, and requests go to all of them",
        "route to replicas of one model: a router for each",
        Severity.SERIOUS,
    )


def versions_differ(window: FleetWindow) -> Finding | None:
    return _differ(
        _told(window.after, lambda one: one.version),
        "versions_differ",
        "another version of Sluice than the other replicas",
        "this passes with a rolling update; if it stays, update the older replicas",
    )


def policies_differ(window: FleetWindow) -> Finding | None:
    earlier = _told(window.before, lambda one: one.policy)
    now = _told(window.after, lambda one: one.policy)
    lasting = {name: policy for name, policy in now.items() if earlier.get(name) == policy}  # an edit takes a second
    return _differ(
        lasting,
        "policies_differ",
        "another policy than the other replicas: a tenant's weight and limits depend on the replica",
        "give all replicas the same policy files; one with an invalid edit has the finding invalid_policy",
    )


def _told(look: Look, what: Callable[[ToldSummary], str]) -> dict[str, str]:
    """A fact of each replica's state, without outdated states."""
    told = {one.name: what(one.told) for one in look.replicas if one.told is not None}
    return {name: text for name, text in told.items() if text}


def _differ(
    told: Mapping[str, str], name: str, trouble: str, remedy: str, severity: Severity = Severity.WARNING
) -> Finding | None:
    """A finding if replicas differ; it names the minority."""
    counts = Counter(told.values())
    if len(counts) < 2:
        return None
    (usual, _), *_ = counts.most_common(1)
    others = {replica: text for replica, text in told.items() if text != usual}
    return Finding(
        name, trouble, f"{_each(others)}; {counts[usual]} have {usual}", remedy, severity, replicas=tuple(others)
    )


def _of_those(
    those: Sequence[ReplicaSummary], name: str, trouble: str, evidence: Callable[[ReplicaSummary], str], remedy: str
) -> Finding | None:
    if not those:
        return None
    told = _each({one.name: evidence(one) for one in those})
    return Finding(name, trouble, told, remedy, replicas=tuple(one.name for one in those))


def _each(told: Mapping[str, str]) -> str:
    """The fact of the only replica, or of each of the first ones."""
    if len(told) == 1:
        return next(iter(told.values()))
    more = [f"and {len(told) - MAX_NAMED_REPLICAS} more"] if len(told) > MAX_NAMED_REPLICAS else []
    return "; ".join([f"{name}: {text}" for name, text in islice(told.items(), MAX_NAMED_REPLICAS)] + more)


def _undiagnosed(unasked: Mapping[str, str]) -> list[Finding]:
    if not unasked:
        return []
    return [
        Finding(
            "replica_undiagnosed",
            "no diagnosis, though states arrive",
            _each(unasked),
            "run `sluice doctor --live` with the address of their admin port",
            replicas=tuple(unasked),
        )
    ]


def retries_spent(window: FleetWindow) -> Finding | None:
    if window.before.retries_left or window.after.retries_left:
        return None
    most = nlargest(MAX_NAMED_REPLICAS, window.after.replicas, key=lambda one: one.retried)
    retried = ", ".join(f"{one.retried} of {one.attempts} at {one.name}" for one in most if one.retried)
    return Finding(
        "retries_spent",
        "a tenant's second attempts are used up: requests that one replica refuses or loses are not sent to another",
        f"tried again elsewhere: {retried or 0}",
        "replicas are overloaded or fail: add replicas, and see what their own findings and logs say",
    )


_JUDGES: tuple[Callable[[FleetWindow], Finding | None], ...] = (
    no_replica,
    all_silent,
    models_differ,
    silent,
    ejected,
    replica_draining,
    retries_spent,
    imbalance,
    policies_differ,
    versions_differ,
)
