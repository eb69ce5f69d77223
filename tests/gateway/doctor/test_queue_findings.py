import pytest

from admission.explain import BEHIND_PREFIX, REASONS
from gateway.doctor.finding import Severity
from gateway.doctor.findings import findings
from tests.gateway.doctor.snapshots import BEFORE, HEALTHY, found, histogram, snapshot, tenant, waits

MEMORY, SLOTS, ALLOWANCE = REASONS["memory"], REASONS["slots"], REASONS["allowance"]


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [(MEMORY, "--kv-memory-bytes"), (BEHIND_PREFIX + SLOTS, "--max-num-seqs"), ("something else", "log")],
)
def test_waiting_and_not_admitted_names_the_reason(reason: str, remedy: str) -> None:
    none_admitted = {'sluice_admissions_total{class="standard"}': 100.0}
    finding = found(none_admitted, waiting=(waits(reason), waits(reason, 12.5)))["not_admitted"]
    assert finding.severity is Severity.SERIOUS
    assert finding.evidence.startswith("2 requests queued, the longest for 12.5 s, and none was admitted in 5.0 s: ")
    assert finding.evidence.endswith(reason.removeprefix(BEHIND_PREFIX))
    assert remedy in finding.remedy


def test_a_queue_that_moves_is_none_that_stands() -> None:
    assert "not_admitted" not in found(waiting=(waits(MEMORY),))
    just_come = {'sluice_admissions_total{class="standard"}': 100.0}
    assert "not_admitted" not in found(just_come, waiting=(waits(MEMORY, 0.2),))


def test_a_wait_for_the_tenants_own_limit_is_told_apart() -> None:
    none_admitted = {'sluice_admissions_total{class="standard"}': 100.0}
    troubles = found(none_admitted, waiting=(waits(ALLOWANCE), waits(ALLOWANCE, tenant="bolt")))
    assert "not_admitted" not in troubles
    evidence = troubles["held_by_own_limit"].evidence
    assert evidence.startswith("2 requests queued, the longest for 9.0 s, of acme (1), bolt (1): ")
    assert "kv_bytes" in troubles["held_by_own_limit"].remedy


def test_queue_time_above_a_classs_target() -> None:
    name, label = "sluice_queue_time_seconds", 'class="interactive"'
    before = histogram(name, {"0.25": 0, "0.5": 0, "1": 0, "+Inf": 0}, label)
    late = histogram(name, {"0.25": 1, "0.5": 4, "1": 10, "+Inf": 10}, label)
    finding = found(late, before)["above_target_interactive"]
    assert finding.evidence == "6 of 10 admitted requests had waited longer than 0.5 s"
    assert finding.severity is Severity.SERIOUS
    in_time = histogram(name, {"0.25": 9, "0.5": 10, "1": 10, "+Inf": 10}, label)
    assert "above_target_interactive" not in found(in_time, before)
    oldest = {
        'sluice_queue_oldest_age_seconds{class="standard"}': 7.0,
        'sluice_queue_oldest_age_seconds{class="batch"}': 99.0,
    }
    troubles = found(oldest)
    assert troubles["above_target_standard"].evidence == "the oldest waits for 7.0 s"
    assert "above_target_batch" not in troubles


def test_a_tenant_whose_newest_estimates_do_not_hold() -> None:
    def share(tenant: str, value: float, window: str = "100", token: str = "first") -> dict[str, float]:
        return {f'sluice_tenant_estimate_coverage_ratio{{tenant="{tenant}",token="{token}",window="{window}"}}': value}

    off = share("acme", 0.6) | share("bolt", 0.9) | share("other", 1.0) | share("bolt", 0.5, "300")
    finding = found(off, share("acme", 0.7))["promises_broken"]
    assert finding.evidence.startswith("of their last 100 estimates held: acme (60%); ")
    assert finding.evidence.endswith("1 of 3 tenants") and "queued_requests" in finding.remedy
    assert "promises_broken" not in found(off, share("acme", 0.9)), "it was well at the one end"
    assert "promises_broken" not in found(share("acme", 0.8) | share("acme", 0.5, token="last"))


def test_a_tenant_that_floods() -> None:
    noisy = tenant("noisy", waiting=40, running=6, share=0.5, requests=10)
    quiet = tenant("quiet", waiting=1, running=2, requests=5)
    waiting = (waits(SLOTS, 1.5, "noisy"), waits(SLOTS, 0.3, "quiet"))
    finding = found(tenants=(noisy, quiet), waiting=waiting)["flooding_tenant"]
    assert finding.trouble == "tenant noisy floods the queue"
    assert (
        "40 of 41 waiting requests are its own, and 6 of its requests are running; it had 50% of the engine's time"
        in finding.evidence
    )
    assert finding.evidence.endswith("no other tenant's request waits longer than 0.3 s")
    assert "flooding_tenant" not in found(tenants=(noisy,))
    assert "flooding_tenant" not in found(tenants=(noisy, quiet | {"waiting": 30}))


def test_a_tenant_that_is_refused_again_and_again() -> None:
    before = snapshot(10.0, BEFORE, tenants=(tenant("noisy", refused=5),))
    after = snapshot(15.0, HEALTHY, tenants=(tenant("noisy", refused=45), tenant("quiet", refused=2)))
    (finding,) = findings(before, after)
    assert finding.evidence == "40 of 42 refusals in 5.0 s were of its requests"


def test_retries_before_their_time() -> None:
    early = {'sluice_retries_total{honoured="false"}': 12.0, 'sluice_retries_total{honoured="true"}': 3.0}
    assert "12 of 15 retries" in found(early)["early_retries"].evidence


def test_refusals_that_are_the_servers_own_are_told_with_their_reasons() -> None:
    metric = 'sluice_refusals_total{reason="%s",code="%s"}'
    away = {metric % ("quota_store", "quota_unverifiable"): 198.0, metric % ("rate", "rate_limit_exceeded"): 500.0}
    finding = found(away)["refusing"]
    assert (finding.evidence, finding.severity) == ("198 in 5.0 s: quota_store 198", Severity.SERIOUS)
    full = {metric % ("queue_full", "server_is_overloaded"): 30.0}
    assert found(full)["refusing"].severity is Severity.WARNING
    assert "refusing" not in found({metric % ("rate", "rate_limit_exceeded"): 500.0})
