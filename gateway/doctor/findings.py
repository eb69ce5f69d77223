"""What ails a running gateway: a pure judgement over two snapshots of it."""

from collections.abc import Callable

from gateway.doctor import engine_findings, queue_findings, service_findings
from gateway.doctor.finding import Finding, Severity
from gateway.doctor.snapshot import Snapshot
from gateway.doctor.window import Window

_JUDGES: tuple[Callable[[Window], Finding | None], ...] = (
    engine_findings.stalled,
    queue_findings.not_admitted,
    service_findings.store_away,
    service_findings.invalid_policy,
    engine_findings.small_batches,
    engine_findings.preemptions,
    engine_findings.lost_steps,
    engine_findings.low_utilisation,
    engine_findings.long_prefills,
    engine_findings.slow_answers,
    engine_findings.slow_planning,
    queue_findings.held_by_own_limit,
    queue_findings.flood_of_work,
    queue_findings.flood_of_refusals,
    queue_findings.early_retries,
    queue_findings.estimates_off,
    service_findings.store_slow,
    service_findings.store_fails,
    service_findings.slow_clients,
    service_findings.late_loop,
    service_findings.orphans,
    service_findings.unsettled,
    service_findings.lost_telemetry,
    service_findings.draining,
)


def findings(before: Snapshot, after: Snapshot) -> list[Finding]:
    """The serious ones first. Empty: nothing is wrong that this knows of."""
    window = Window(before, after)
    found = [finding for judge in _JUDGES if (finding := judge(window)) is not None]
    found += queue_findings.above_target(window)
    return sorted(found, key=lambda finding: finding.severity is not Severity.SERIOUS)
