from admission.explain import REASONS
from gateway.doctor.finding import Severity
from tests.gateway.doctor.snapshots import BEFORE, found, lives, waits

MEMORY, SLOTS, ALLOWANCE = REASONS["memory"], REASONS["slots"], REASONS["allowance"]


def test_small_batches_at_full_memory() -> None:
    full = {"waiting": 5, "kv_blocks_used": 97}
    finding = found(engine=full, waiting=(waits(MEMORY, 1.0),))["small_batches"]
    assert finding.evidence == "8 of 64 sequences in a step on average, 97% of the KV blocks used, 5 waiting"
    assert "--kv-memory-bytes" in finding.remedy
    kept = {"sluice_kv_blocks_kept": 60.0}
    finding = found(kept, kept, engine={"waiting": 5, "kv_blocks_used": 30}, waiting=(waits(MEMORY, 1.0),))[
        "small_batches"
    ]
    assert "30% of the KV blocks used, 60% kept idle by floors, 5 waiting" in finding.evidence
    assert "small_batches" in found(engine=full | {"kv_blocks_used": 70}, waiting=(waits(MEMORY, 1.0),))
    assert "small_batches" not in found(engine=full | {"kv_blocks_used": 70}, waiting=(waits(SLOTS, 1.0),))
    assert "small_batches" not in found(engine=full | {"waiting": 0})
    assert "small_batches" not in found(engine=full | {"max_num_seqs": 10})


def test_preemptions() -> None:
    lost = {'sluice_preemptions_total{cause="memory"}': 6.0, "sluice_recomputed_tokens_total": 1234.0}
    finding = found(lost)["preemptions"]
    assert "6 preemptions in 5.0 s, 20 sequences joined the batch" in finding.evidence
    assert "1,234 tokens computed again" in finding.evidence
    assert "preemptions" not in found({'sluice_preemptions_total{cause="memory"}': 2.0})
    for cause in ("slot", "limit"):
        assert "preemptions" not in found({f'sluice_preemptions_total{{cause="{cause}"}}': 9.0})
    assert "preemptions" not in found({**lost, "sluice_batch_joined_total": 1000.0})


def test_steps_that_the_device_had_no_memory_for() -> None:
    evidence = found({"sluice_lost_steps_total": 2.0})["lost_steps"].evidence
    assert evidence == "2 of 982 steps in 5.0 s were planned again with less"


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


def test_prices_that_are_not_the_devices() -> None:
    off = {"sluice_price_drift_ratio": 0.6}
    finding = found(off, off)["prices_off"]
    assert "missed their predicted times by 60% or more" in finding.evidence
    assert "prices_off" not in found(off), "it was not at the first look"
    assert "prices_off" not in found({"sluice_price_drift_ratio": 0.1}, {"sluice_price_drift_ratio": 0.1})
