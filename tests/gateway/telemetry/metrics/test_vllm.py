import pytest

from backend.scheduler.sequence import FinishReason, Sequence
from tests.gateway.telemetry.metrics_rig import Rig
from tests.gateway.telemetry.records import a_record, a_sequence, a_timeline

TTFT, GAP, OLDER = (
    "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds",
)  # fmt: skip


def sequence(arrival: float = 0.0) -> Sequence:
    made = a_sequence()
    made.arrival = arrival
    return made


def test_running_and_waiting_requests_are_shown(rig: Rig) -> None:
    rig.arrive("a")
    rig.arrive("b")
    assert rig.value("vllm:num_requests_waiting") == 2
    rig.step()
    assert rig.value("vllm:num_requests_running") == 2
    assert rig.value("vllm:num_requests_waiting") == 0


def test_every_token_but_the_first_has_a_gap_however_they_are_delivered(rig: Rig) -> None:
    deliver = rig.metrics.deliveries.delivered
    last = deliver(sequence(), 0, 3, 0.0)
    deliver(sequence(), 3, 2, last)
    deliver(sequence(), 5, 0, last)
    assert rig.value(f"{TTFT}_count") == 1
    assert rig.value(f"{GAP}_count") == rig.value(f"{OLDER}_count") == 4


def test_the_first_token_and_the_gaps_between_the_others_are_timed(rig: Rig) -> None:
    request = sequence(arrival=10.0)
    rig.now = 10.5
    last = rig.metrics.deliveries.delivered(request, 0, 1, 0.0)
    rig.now = 10.9
    rig.metrics.deliveries.delivered(request, 1, 4, last)
    assert rig.value(f"{TTFT}_sum") == 0.5
    assert rig.value(f"{GAP}_sum") == rig.value(f"{OLDER}_sum") == pytest.approx(0.4)
    assert rig.value(f"{GAP}_count") == 4


def test_ends_are_counted_by_their_reasons(rig: Rig) -> None:
    ends = {FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort", FinishReason.EXPIRED: "abort"}
    timelines = [a_timeline(sequence=a_sequence()) for _ in ends]
    for timeline, reason in zip(timelines, ends, strict=True):
        timeline.sequence.finish_reason = reason
    rig.tell(a_record(timelines=timelines))
    page = rig.page()
    counts = {
        reason: page.value("vllm:request_success_total", finished_reason=reason) for reason in ("length", "abort")
    }
    assert counts == {"length": 1, "abort": 2}
    assert page.value("vllm:e2e_request_latency_seconds_sum") == pytest.approx(0.08)
