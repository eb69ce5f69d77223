"""Diagnoses a running gateway: a pure function of two snapshots of it."""

from collections.abc import Callable
from dataclasses import replace

from gateway.doctor import engine_findings, history, kv_findings, queue_findings, service_findings
from gateway.doctor.causes import ranked
from gateway.doctor.finding import Finding, Severity
from gateway.doctor.snapshot import Samples, Snapshot, Window

_JUDGES: tuple[Callable[[Window], Finding | None], ...] = (
    engine_findings.stalled,
    queue_findings.not_admitted,
    service_findings.store_away,
    service_findings.invalid_policy,
    engine_findings.small_batches,
    engine_findings.preemptions,
    kv_findings.thrashing,
    engine_findings.lost_steps,
    engine_findings.low_utilisation,
    engine_findings.long_prefills,
    engine_findings.slow_answers,
    engine_findings.slow_planning,
    engine_findings.prices_off,
    kv_findings.cache_never_hits,
    kv_findings.starving_floor,
    kv_findings.pin_never_hits,
    queue_findings.held_by_own_limit,
    queue_findings.flood_of_work,
    queue_findings.flood_of_refusals,
    queue_findings.refusing,
    queue_findings.early_retries,
    queue_findings.promises_broken,
    service_findings.store_slow,
    service_findings.store_fails,
    service_findings.fairness_local,
    service_findings.slow_clients,
    service_findings.late_loop,
    service_findings.orphans,
    service_findings.unsettled,
    service_findings.lost_telemetry,
    service_findings.draining,
)

# Decided by counters and histograms alone: a gauge at both ends of minutes says little of the time between.
_JUDGES_OF_COUNTERS = (
    service_findings.store_away,
    engine_findings.preemptions,
    kv_findings.thrashing,
    engine_findings.lost_steps,
    engine_findings.slow_answers,
    history.far_from_roofline,
    history.uneven_answers,
    history.wasted_work,
    queue_findings.refusing,
    queue_findings.early_retries,
    service_findings.store_slow,
    service_findings.store_fails,
    service_findings.late_loop,
    service_findings.lost_telemetry,
)


def past_findings(window: Window) -> list[Finding]:
    """The troubles in a `past_window`. All are warnings, because the trouble may be over by now."""
    found = [finding for judge in _JUDGES_OF_COUNTERS if (finding := judge(window)) is not None]
    minutes = f"in the last {window.seconds / 60:.0f} min" if window.seconds >= 60 else "in the last minute"
    return [replace(finding, severity=Severity.WARNING, evidence=f"{minutes}: {finding.evidence}") for finding in found]


def past_window(at: float, samples: Samples, now: Snapshot) -> Window:
    """The time since the moment `at`, on the clock of `now`, when the metrics were `samples`, of which no more is
    known.
    """
    after = replace(now, waiting=(), live=())
    return Window(replace(after, at=at, samples=samples, tenants=()), after)


def findings(before: Snapshot, after: Snapshot) -> list[Finding]:
    """Return the troubles between two snapshots, `ranked`; none if nothing is known to be wrong."""
    window = Window(before, after)
    found = [finding for judge in _JUDGES if (finding := judge(window)) is not None]
    found += queue_findings.above_target(window)
    return ranked(found)
