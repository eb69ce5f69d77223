from types import SimpleNamespace

import pytest

from admission.outcome import Outcome
from admission.step_times.step_time import StepTime
from backend.model.known_shapes import LLAMA_3_8B
from backend.roofline import GPUS, Footprint, Roofline
from backend.scheduler.batch import Batch
from backend.scheduler.scheduled_step import ScheduledStep
from gateway.http.request_scope import RequestScope
from gateway.telemetry.core_observer import CompletedStep
from gateway.telemetry.request_record import RequestRecord
from tests.gateway.telemetry.core_run import STEP
from tests.gateway.telemetry.metrics_rig import BLOCK_BYTES, Page, Rig, rig_after_preemptions


def test_steps_are_counted_by_what_they_compute(rig: Rig) -> None:
    rig.arrive("a", prompt=12, max_tokens=3)
    rig.step()
    rig.step()
    rig.arrive("b", prompt=4, max_tokens=3)
    rig.run()
    page = rig.page()
    kinds = {
        kind: page.value("sluice_step_duration_seconds_count", kind=kind) for kind in ("prefill", "decode", "mixed")
    }
    assert kinds == {"prefill": 2, "mixed": 1, "decode": 2}
    assert page.value("sluice_device_busy_seconds_total") == pytest.approx(5 * STEP)
    assert page.value("sluice_planning_duration_seconds_count") == 5
    assert page.value("sluice_prefill_chunks_total") == 3
    assert page.value("sluice_prefill_tokens_total") == page.value("vllm:prompt_tokens_total") == 16
    assert page.value("sluice_decode_tokens_total") == 4
    assert page.value("vllm:generation_tokens_total") == 6


def test_steps_have_a_floor_and_mixed_ones_are_divided_by_what_their_phases_cost() -> None:
    rig = Rig(roofline=Roofline(Footprint(LLAMA_3_8B, "bfloat16"), GPUS["h200"]))
    rig.arrive("a", prompt=8, max_tokens=9)
    rig.step()
    rig.step()
    assert rig.value("sluice_mixed_steps_seconds_total") == 0
    assert rig.value("sluice_device_floor_seconds_total") == pytest.approx(2 * 3.49e-3, rel=0.01), "two reads of it"
    rig.arrive("b", prompt=8, max_tokens=9)
    rig.step()
    page = rig.page()
    prompts, answers = (page.value("sluice_mixed_steps_seconds_total", phase=phase) for phase in ("prefill", "decode"))
    assert prompts + answers == pytest.approx(STEP)
    assert prompts > answers > 0, "eight tokens beside one"


def test_prompts_of_a_mixed_step_cost_what_its_model_takes_longer_for_them(rig: Rig) -> None:
    flat, kneed = StepTime((1.0,) + (0.0,) * 6), StepTime((1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0), knee=10)
    rig.metrics._engine._step_times = [SimpleNamespace(fitted=one) for one in (flat, kneed)]  # type: ignore[assignment]
    batch = Batch(0, 1, [0, 1], [5, 0], [1, 12], model=1)
    for tell in rig.core_telemetry.on_step:
        tell(CompletedStep(ScheduledStep(batch), 1.0, 0.4))
    assert rig.value("sluice_mixed_steps_seconds_total", phase="prefill") == pytest.approx(0.3), (
        "3 tokens beyond the knee, beside one"
    )


def test_the_batch_and_its_churn(rig: Rig) -> None:
    timelines = [rig.arrive(name, max_tokens=9) for name in "abc"]
    rig.step()
    rig.step()
    rig.cancel(timelines[0])
    assert rig.value("sluice_batch_size_max") == 8
    assert rig.value("sluice_batch_size_count") == 2
    assert rig.value("sluice_batch_joined_total") - rig.value("sluice_batch_left_total") == 2
    rig.run()
    assert rig.value("sluice_batch_joined_total") == rig.value("sluice_batch_left_total") == 3


def test_joined_and_left_never_go_down_while_steps_are_in_flight(rig: Rig) -> None:
    seen = []
    for number in range(12):
        rig.arrive(str(number), max_tokens=3)
        rig.core.schedule(rig.now)
        seen.append(churn(rig.page()))
        rig.core.schedule(rig.now)
        rig.complete()
        seen.append(churn(rig.page()))
    for one in range(2):
        assert [pair[one] for pair in seen] == sorted(pair[one] for pair in seen)


def test_joined_and_left_never_go_down_when_a_step_is_lost(rig: Rig) -> None:
    timelines = [rig.arrive(name, max_tokens=9) for name in "ab"]
    rig.core.schedule(rig.now)
    seen = [churn(rig.page())]
    rig.core.rollback(rig.now)
    seen.append(churn(rig.page()))
    rig.cancel(timelines[0])
    seen.append(churn(rig.page()))
    rig.run()
    seen.append(churn(rig.page()))
    assert seen == [(2, 0), (2, 0), (2, 1), (2, 2)]


def churn(page: Page) -> tuple[float, float]:
    return page.value("sluice_batch_joined_total"), page.value("sluice_batch_left_total")


def test_memory_follows_the_pool(rig: Rig) -> None:
    rig.arrive("a", prompt=6, max_tokens=9)
    rig.step()
    page = rig.page()
    used = rig.core.scheduler.config.num_blocks - rig.core.scheduler.kv_manager.pool.num_free
    assert used == 2
    assert page.value("sluice_kv_blocks") == 64 and page.value("sluice_kv_blocks_used") == used
    assert page.value("vllm:kv_cache_usage_perc") == page.value("vllm:gpu_cache_usage_perc") == used / 64
    assert page.value("sluice_kv_wasted_bytes") == 2 * BLOCK_BYTES / 4, "two of eight slots hold nothing yet"
    assert page.value("sluice_kv_bytes", tenant="acme") == used * BLOCK_BYTES
    assert page.value("sluice_device_memory_bytes", use="kv_cache") == 20
    assert page.value("vllm:cache_config_info", block_size="4", num_gpu_blocks="64") == 1


def test_even_steps_have_no_jitter_and_a_late_one_has_two(rig: Rig) -> None:
    rig.arrive("a", max_tokens=12)
    for _ in range(6):
        rig.step()
    page = rig.page()
    assert page.value("sluice_token_jitter_seconds_count") == 3
    assert page.value("sluice_token_jitter_seconds_sum") == pytest.approx(0, abs=1e-9)
    rig.now += 0.1
    rig.run()
    assert rig.value("sluice_token_jitter_seconds_sum") == pytest.approx(0.2)


def test_decodes_that_wait_for_a_step_of_prefills_alone_have_jitter(rig: Rig) -> None:
    waiting = rig.arrive("a", max_tokens=12).sequence
    rig.core.scheduler.running["a"] = waiting
    for completed, decodes, prefill in ((1.0, 1, 0), (1.1, 1, 0), (1.2, 1, 0), (1.5, 0, 64), (1.6, 1, 0)):
        rows = decodes + bool(prefill)
        batch = Batch(0, decodes, list(range(rows)), [0] * rows, [1] * decodes + [prefill] * bool(prefill))
        for tell in rig.core_telemetry.on_step:
            tell(CompletedStep(ScheduledStep(batch), completed, 0.1))
        rig.core.scheduler.running["b"] = waiting
    assert rig.value("sluice_token_jitter_seconds_count") == 2
    assert rig.value("sluice_token_jitter_seconds_sum") == pytest.approx(0.3)


def test_a_write_that_makes_no_progress_is_stalled(rig: Rig) -> None:
    record = rig.record(rig.arrive("a"))
    record.scope = RequestScope({}, None, None)  # type: ignore[arg-type]  # nothing is received or sent
    record.scope.writing_since = rig.now - 0.5
    assert rig.value("sluice_stalled_writes") == 0
    rig.now += 1
    assert rig.value("sluice_stalled_writes") == 1


def test_tokens_after_the_end_are_counted_as_late(rig: Rig) -> None:
    timeline = rig.arrive("a", max_tokens=9)
    rig.step()
    rig.core.schedule(rig.now)
    rig.cancel(timeline)
    rig.complete()
    assert rig.value("sluice_late_tokens_total") == 1


def test_preemptions_are_counted_by_their_cause() -> None:
    page = rig_after_preemptions().page()
    assert page.value("sluice_preemptions_total", cause="memory") > 0
    assert page.value("sluice_preemptions_total", cause="slot") == 0
    assert page.value("sluice_preemptions_total", cause="limit") == 0
    assert page.value("vllm:num_preemptions_total") == page.value("sluice_preemptions_total")
    assert page.value("sluice_recomputed_tokens_total") > 0


STOP, RELEASE = "sluice_disconnect_to_stop_seconds", "sluice_disconnect_to_release_seconds"


def leave(rig: Rig, record: RequestRecord, outcome: Outcome = Outcome.DISCONNECTED) -> None:
    """Its client goes now; the engine is told 2 ms later."""
    scope = RequestScope({}, None, None)  # type: ignore[arg-type]  # nothing is received or sent
    scope.outcome, scope.ended_early, record.scope = outcome, rig.now, scope
    rig.now += 0.002
    for timeline in record.engine.timelines:
        if timeline.ended is None:
            rig.cancel(timeline)
    rig.telemetry.ended(record, outcome)


def sums(page: Page) -> tuple[float, float]:
    return page.value(f"{STOP}_sum"), page.value(f"{RELEASE}_sum")


def test_a_queued_sequence_is_released_at_once(rig: Rig) -> None:
    leave(rig, rig.record(rig.arrive("a")))
    assert sums(rig.page()) == (pytest.approx(0.002), pytest.approx(0.002))


def test_memory_is_released_with_the_step_in_flight(rig: Rig) -> None:
    record = rig.record(rig.arrive("a", max_tokens=30))
    rig.step()
    rig.core.schedule(rig.now)
    leave(rig, record)
    assert rig.value(f"{RELEASE}_count") == 0
    rig.complete()
    assert sums(rig.page()) == (pytest.approx(0.002), pytest.approx(0.012))
    assert not rig.metrics._disconnects._releasing


def test_other_ends_are_no_disconnects(rig: Rig) -> None:
    leave(rig, rig.record(rig.arrive("a")), Outcome.EXPIRED)
    done = rig.record(rig.arrive("b", max_tokens=2))
    rig.run()
    rig.now += 0.001
    leave(rig, done)  # its answer was complete before
    assert rig.value(f"{STOP}_count") == rig.value(f"{RELEASE}_count") == 0


def test_orphans_are_streams_without_a_request(rig: Rig) -> None:
    record = rig.record(rig.arrive("a"), rig.arrive("b"))
    rig.engine.num_streams = 2
    assert rig.value("sluice_orphans") == 0
    rig.telemetry.live.discard(record)
    assert rig.value("sluice_orphans") == 2
