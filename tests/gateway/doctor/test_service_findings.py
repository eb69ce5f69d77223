import pytest

from gateway.doctor.finding import Severity
from tests.gateway.doctor.snapshots import found, histogram, lives


def test_a_store_that_is_away_or_was() -> None:
    assert found({"sluice_store_connected": 0.0})["store_away"].severity is Severity.SERIOUS
    was_away = found({"sluice_store_outages_total": 1.0})["store_away"]
    assert (was_away.severity, "; 1 outage began" in was_away.evidence) == (Severity.WARNING, True)


def test_a_slow_store() -> None:
    name, label = "sluice_store_latency_seconds", 'script="take"'
    before = histogram(name, {"0.01": 0, "0.025": 0, "0.05": 0, "+Inf": 0}, label)
    slow = histogram(name, {"0.01": 1, "0.025": 2, "0.05": 12, "+Inf": 12}, label)
    assert found(slow, before)["store_slow"].evidence == "10 of 12 calls took longer than 25 ms, 100 ms on average"
    quick = histogram(name, {"0.01": 11, "0.025": 11, "0.05": 12, "+Inf": 12}, label)
    assert "store_slow" not in found(quick, before)
    starved = found(slow | {"sluice_loop_late_seconds_total": 0.3}, before)
    assert "store_slow" not in starved, "what a late loop measures is its own lateness"
    assert "starved" in starved["late_loop"].trouble
    assert "late for 300 ms of 5.0 s" in starved["late_loop"].evidence
    once = found({"sluice_loop_lag_seconds": 0.06})["late_loop"].trouble
    assert once.startswith("the event loop was late at times"), "which is no starvation"


def test_store_calls_that_fail() -> None:
    assert "store_fails" in found({'sluice_store_errors_total{script="take"}': 1.0})


def test_a_replica_that_does_not_know_what_others_serve() -> None:
    stale = {"sluice_debts_replicas": 3.0, "sluice_debts_staleness_seconds": 4.0}
    assert "4.0 s ago, among 3 replicas" in found(stale)["fairness_local"].evidence
    assert "fairness_local" not in found(stale | {"sluice_debts_staleness_seconds": 0.3})
    assert "fairness_local" not in found(stale | {"sluice_debts_replicas": 1.0}), "alone there is nothing to know"


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("sluice_spans_dropped_total", "4 spans in"),
        ("sluice_log_lines_dropped_total", "4 log lines in"),
        ('sluice_metric_exports_total{result="failed"}', "4 pushes of metrics in"),
    ],
)
def test_lost_telemetry(metric: str, said: str) -> None:
    assert found({metric: 4.0})["lost_telemetry"].evidence.startswith(said)


def test_exported_telemetry_is_not_lost() -> None:
    assert "lost_telemetry" not in found({'sluice_metric_exports_total{result="exported"}': 4.0})


def test_clients_that_do_not_read() -> None:
    slow = lives(reason="its client reads slowly: a write has waited 3.2 s")
    finding = found(live=(slow, lives()))["slow_clients"]
    assert finding.evidence == "1 of 2, of acme: r1 (a write has waited 3.2 s); they hold 7 KV blocks"


@pytest.mark.parametrize(("lag", "severity"), [(0.2, Severity.WARNING), (0.8, Severity.SERIOUS)])
def test_a_late_event_loop(lag: float, severity: Severity) -> None:
    assert found({"sluice_loop_lag_seconds": lag})["late_loop"].severity is severity


def test_an_edited_policy_that_is_not_valid() -> None:
    problem = "policy.yaml:3:1: no such field\npolicy.yaml:4:1: another"
    assert found(policy={"problem": problem})["invalid_policy"].evidence == "policy.yaml:3:1: no such field"


def test_orphans_and_unsettled_reservations() -> None:
    orphaned = {"sluice_orphans": 2.0}
    assert "orphans" not in found(orphaned)
    assert "orphans" in found(orphaned, orphaned)
    idle = {"sluice_live_requests": 0.0}
    assert "8 reservations" in found(idle, idle)["unsettled"].evidence
    assert "unsettled" not in found(idle)


def test_a_gateway_that_drains() -> None:
    assert "draining" in found(draining=True)
