from gateway.doctor.finding import Severity
from gateway.doctor.findings import findings, past_findings, past_window
from tests.gateway.doctor.snapshots import BEFORE, HEALTHY, diagnosed, lives, snapshot, tenant


def test_nothing_is_found_of_a_gateway_that_is_well() -> None:
    assert diagnosed(live=(lives(),), tenants=(tenant("acme", running=8, requests=100),)) == []


def test_nothing_is_found_of_a_gateway_that_has_never_served() -> None:
    idle = {"sluice_store_connected": 1.0}
    engine = {"running": 0, "waiting": 0, "kv_blocks_used": 0}
    assert findings(snapshot(1.0, idle, engine), snapshot(4.0, idle, engine)) == []


def test_counters_that_began_anew_in_between_count_from_zero() -> None:
    restarted = {
        name: value / 100 if name.endswith(("_total", "_count", "_sum")) else value for name, value in HEALTHY.items()
    }
    assert findings(snapshot(1.0, HEALTHY), snapshot(6.0, restarted)) == []


def test_the_serious_come_first() -> None:
    severities = [
        finding.severity for finding in diagnosed({"sluice_store_connected": 0.0, "sluice_spans_dropped_total": 1.0})
    ]
    assert severities == [Severity.SERIOUS, Severity.WARNING]


def test_a_finding_of_minutes_ago_is_a_warning() -> None:
    refused = {'sluice_refusals_total{reason="quota_store",code="quota_unverifiable"}': 198.0}
    now = snapshot(400.0, HEALTHY | refused)
    found = past_findings(past_window(160.0, snapshot(160.0, BEFORE).samples, now))
    (finding,) = [one for one in found if one.name == "refusing"]
    assert finding.evidence == "in the last 4 min: 198 in 240.0 s: quota_store 198"
    assert {one.severity for one in found} == {Severity.WARNING}
    assert past_findings(past_window(160.0, snapshot(160.0, BEFORE).samples, snapshot(400.0, HEALTHY))) == []
