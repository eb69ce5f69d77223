"""Each trouble is named with its evidence when it is there, and not when it is not."""

import pytest

from admission.explain import REASONS
from gateway.doctor.finding import Severity
from gateway.doctor.findings import findings, past_findings
from tests.gateway.doctor.snapshots import (
    BEFORE,
    HEALTHY,
    diagnosed,
    found,
    histogram,
    lives,
    snapshot,
    tenant,
    waits,
)

MEMORY, SLOTS, ALLOWANCE = REASONS["memory"], REASONS["slots"], REASONS["allowance"]


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


def test_small_batches_at_full_memory() -> None:
    full = {"waiting": 5, "kv_blocks_used": 97}
    finding = found(engine=full, waiting=(waits(MEMORY, 1.0),))["small_batches"]
    assert finding.evidence == "8 of 64 sequences in a step on average, 97% of the KV blocks used, 5 waiting"
    assert "--kv-memory-bytes" in finding.remedy
    assert "small_batches" in found(engine=full | {"kv_blocks_used": 70}, waiting=(waits(MEMORY, 1.0),))
    assert "small_batches" not in found(engine=full | {"kv_blocks_used": 70}, waiting=(waits(SLOTS, 1.0),))
    assert "small_batches" not in found(engine=full | {"waiting": 0})
    assert "small_batches" not in found(engine=full | {"max_num_seqs": 10})


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [(MEMORY, "--kv-memory-bytes"), (f"behind others, because {SLOTS}", "--max-num-seqs"), ("something else", "log")],
)
def test_waiting_and_not_admitted_names_the_reason(reason: str, remedy: str) -> None:
    none_admitted = {'sluice_admissions_total{class="standard"}': 100.0}
    finding = found(none_admitted, waiting=(waits(reason), waits(reason, 12.5)))["not_admitted"]
    assert finding.severity is Severity.SERIOUS
    assert finding.evidence.startswith("2 wait, the longest for 12.5 s, and none was admitted in 5.0 s: ")
    assert finding.evidence.endswith(reason.removeprefix("behind others, because "))
    assert remedy in finding.remedy


def test_a_queue_that_moves_is_none_that_stands() -> None:
    assert "not_admitted" not in found(waiting=(waits(MEMORY),))
    just_come = {'sluice_admissions_total{class="standard"}': 100.0}
    assert "not_admitted" not in found(just_come, waiting=(waits(MEMORY, 0.2),))


def test_a_wait_for_the_tenants_own_limit_is_told_apart() -> None:
    none_admitted = {'sluice_admissions_total{class="standard"}': 100.0}
    troubles = found(none_admitted, waiting=(waits(ALLOWANCE), waits(ALLOWANCE, tenant="bolt")))
    assert "not_admitted" not in troubles
    assert troubles["held_by_own_limit"].evidence.startswith("2 wait, the longest for 9.0 s, of acme (1), bolt (1): ")
    assert "kv_bytes" in troubles["held_by_own_limit"].remedy


def test_preemptions() -> None:
    lost = {'sluice_preemptions_total{cause="memory"}': 6.0, "sluice_recomputed_tokens_total": 1234.0}
    finding = found(lost)["preemptions"]
    assert "6 preemptions in 5.0 s, 20 sequences joined the batch" in finding.evidence
    assert "1,234 tokens computed again" in finding.evidence
    assert "preemptions" not in found({'sluice_preemptions_total{cause="memory"}': 2.0})
    assert "preemptions" not in found({'sluice_preemptions_total{cause="limit"}': 9.0})
    assert "preemptions" not in found({**lost, "sluice_batch_joined_total": 1000.0})


def test_steps_that_the_device_had_no_memory_for() -> None:
    evidence = found({"sluice_lost_steps_total": 2.0})["lost_steps"].evidence
    assert evidence == "2 of 982 steps in 5.0 s were planned again with less"


def test_queue_time_above_a_classs_target() -> None:
    name, label = "sluice_queue_time_seconds", 'class="interactive"'
    before = histogram(name, {"0.25": 0, "0.5": 0, "1": 0, "+Inf": 0}, label)
    late = histogram(name, {"0.25": 1, "0.5": 4, "1": 10, "+Inf": 10}, label)
    finding = found(late, before)["above_target_interactive"]
    assert finding.evidence == "6 of 10 that were admitted had waited longer than 0.5 s"
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


def test_an_idle_device_while_work_waits() -> None:
    idle = {"sluice_device_busy_seconds_total": 7.0, "sluice_loop_lag_seconds": 0.04}
    finding = found(idle, waiting=(waits(SLOTS, 1.0),))["low_utilisation"]
    assert finding.evidence == "it computed in 40% of 5.0 s while 1 waited; the event loop was late by up to 40 ms"
    assert "low_utilisation" not in found(idle)
    assert "low_utilisation" not in found(idle, waiting=(waits(ALLOWANCE),))
    assert "low_utilisation" not in found(waiting=(waits(SLOTS, 1.0),))


def test_a_device_that_completes_no_step() -> None:
    stands = {name: BEFORE[name] for name in BEFORE if name.startswith("sluice_step_duration")}
    finding = found(stands, live=(lives(),))["device_stalled"]
    assert finding.severity is Severity.SERIOUS
    assert "device_stalled" not in found(stands, live=(lives(reason=f"paused: {ALLOWANCE}"),))
    assert "device_stalled" not in found(stands, live=(lives("waiting"),))


def test_long_prompts_that_delay_decodes() -> None:
    step = "sluice_step_duration_seconds"
    mixed = {
        f'{step}_count{{kind="mixed"}}': 10.0,
        f'{step}_sum{{kind="mixed"}}': 2.0,
        "sluice_prefill_chunks_total": 10.0,
        "sluice_prefill_tokens_total": 5120.0,
    }
    finding = found(mixed, live=(lives(service="interactive"),))["long_prefills"]
    assert "takes 200 ms on average, one of decodes alone 5 ms; a token is due every 40 ms" in finding.evidence
    assert "512 prompt tokens in a chunk" in finding.evidence
    assert "long_prefills" in found(mixed, live=(lives(),))
    whole = {name.replace("mixed", "prefill"): value for name, value in mixed.items()}
    assert "takes 200 ms on average" in found(whole, live=(lives(),))["long_prefills"].evidence
    nobody_answers = {name: value for name, value in BEFORE.items() if name.startswith(step)}
    assert "long_prefills" not in found(whole | nobody_answers)
    quick = mixed | {f'{step}_sum{{kind="mixed"}}': 0.08}
    assert "long_prefills" not in found(quick, live=(lives(service="interactive"),))


def test_long_prompts_are_held_against_all_decodes_where_none_was_alone_lately() -> None:
    step = "sluice_step_duration_seconds"
    alone = {name: BEFORE[name] for name in BEFORE if name.startswith(step)}
    mixed = {f'{step}_count{{kind="mixed"}}': 10.0, f'{step}_sum{{kind="mixed"}}': 2.0}
    assert "one of decodes alone 5 ms" in found(alone | mixed)["long_prefills"].evidence


def test_answers_slower_than_promised() -> None:
    slow = {'sluice_slo_misses_total{class="interactive",target="time_per_output_token"}': 5.0}
    assert found(slow)["slow_answers"].evidence.startswith("5 of 20 that ended")
    assert "slow_answers" not in found(dict.fromkeys(slow, 1.0))


def test_planning_that_takes_too_long() -> None:
    slow = {"sluice_planning_duration_seconds_sum": BEFORE["sluice_planning_duration_seconds_sum"] + 0.5}
    assert "510 us" in found(slow)["slow_planning"].evidence


def test_estimates_that_do_not_hold() -> None:
    name = "sluice_estimate_error_seconds"
    off = {f'{name}_count{{token="first",side="early"}}': 20.0, f'{name}_count{{token="first",side="late"}}': 20.0}
    assert found(off)["estimates_off"].evidence == "20 of 40 estimates held in 5.0 s; nine in ten are meant to"
    good = off | {f'{name}_count{{token="first",side="late"}}': 2.0}
    assert "estimates_off" not in found(good)
    few = {key: value / 4 for key, value in off.items()}
    assert "estimates_off" not in found(few)


def test_a_store_that_is_away_or_was() -> None:
    assert found({"sluice_store_connected": 0.0})["store_away"].severity is Severity.SERIOUS
    assert found({"sluice_store_outages_total": 1.0})["store_away"].severity is Severity.WARNING


def test_a_slow_store() -> None:
    name, label = "sluice_store_latency_seconds", 'script="take"'
    before = histogram(name, {"0.01": 0, "0.025": 0, "0.05": 0, "+Inf": 0}, label)
    slow = histogram(name, {"0.01": 1, "0.025": 2, "0.05": 12, "+Inf": 12}, label)
    assert found(slow, before)["store_slow"].evidence == "10 of 12 calls took longer than 25 ms, 100 ms on average"
    quick = histogram(name, {"0.01": 11, "0.025": 11, "0.05": 12, "+Inf": 12}, label)
    assert "store_slow" not in found(quick, before)
    starved = found(slow | {"sluice_loop_late_seconds_total": 0.3}, before)
    assert "store_slow" not in starved, "what a late loop measures is its own lateness"
    assert "late by 0.30 s in all of 5.0 s" in starved["late_loop"].evidence


def test_store_calls_that_fail() -> None:
    assert "store_fails" in found({'sluice_store_errors_total{script="take"}': 1.0})


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


def test_a_tenant_that_floods() -> None:
    noisy = tenant("noisy", waiting=40, running=6, share=0.5, requests=10)
    quiet = tenant("quiet", waiting=1, running=2, requests=5)
    waiting = (waits(SLOTS, 1.5, "noisy"), waits(SLOTS, 0.3, "quiet"))
    finding = found(tenants=(noisy, quiet), waiting=waiting)["flooding_tenant"]
    assert finding.trouble == "tenant noisy floods the queue"
    assert "40 of 41 that wait are its own, and 6 of its run; it had 50% of the engine's time" in finding.evidence
    assert finding.evidence.endswith("no other tenant's request waits for longer than 0.3 s")
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


def test_orphans_and_reservations_that_nobody_settles() -> None:
    orphaned = {"sluice_orphans": 2.0}
    assert "orphans" not in found(orphaned)
    assert "orphans" in found(orphaned, orphaned)
    idle = {"sluice_live_requests": 0.0}
    assert "8 reservations" in found(idle, idle)["unsettled"].evidence
    assert "unsettled" not in found(idle)


def test_a_gateway_that_drains() -> None:
    assert "draining" in found(draining=True)


def test_the_serious_come_first() -> None:
    severities = [
        finding.severity for finding in diagnosed({"sluice_store_connected": 0.0, "sluice_spans_dropped_total": 1.0})
    ]
    assert severities == [Severity.SERIOUS, Severity.WARNING]


def test_refusals_that_are_the_servers_own_are_told_with_their_reasons() -> None:
    metric = 'sluice_refusals_total{reason="%s",code="%s"}'
    away = {metric % ("quota_store", "quota_unverifiable"): 198.0, metric % ("rate", "rate_limit_exceeded"): 500.0}
    finding = found(away)["refusing"]
    assert (finding.evidence, finding.severity) == ("198 in 5.0 s: quota_store 198", Severity.SERIOUS)
    full = {metric % ("queue_full", "server_is_overloaded"): 30.0}
    assert found(full)["refusing"].severity is Severity.WARNING
    assert "refusing" not in found({metric % ("rate", "rate_limit_exceeded"): 500.0})


def test_what_metrics_showed_minutes_ago_is_told_as_a_warning() -> None:
    refused = {'sluice_refusals_total{reason="quota_store",code="quota_unverifiable"}': 198.0}
    now = snapshot(400.0, HEALTHY | refused)
    found = past_findings(160.0, snapshot(160.0, BEFORE).samples, now)
    (finding,) = [one for one in found if one.name == "refusing"]
    assert finding.evidence == "in the last 4 min: 198 in 240.0 s: quota_store 198"
    assert {one.severity for one in found} == {Severity.WARNING}
    assert past_findings(160.0, snapshot(160.0, BEFORE).samples, snapshot(400.0, HEALTHY)) == []
