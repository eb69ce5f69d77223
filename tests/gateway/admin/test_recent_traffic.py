from admission.request import JudgedPrompt, JudgedRequest
from backend.scheduler.sequence import FinishReason
from gateway.admin import recent_traffic
from gateway.admin.recent_traffic import HISTORY_SECONDS, MAX_REQUESTS, RecentTraffic
from gateway.telemetry.request_record import RequestRecord
from tests.gateway.telemetry.records import a_record, a_sequence, a_timeline


def asked(name: str, tenant: str = "acme", declared: bool = True, refusal: str | None = None) -> JudgedRequest:
    prompts = (JudgedPrompt(7, 40, declared),)
    return JudgedRequest(name, tenant, "k1", "flex", 123, 0.5, None, None, prompts, refusal)


def a_request(asked: JudgedRequest, at: float) -> RequestRecord:
    return a_record(asked=asked, asked_at=at, response_id=asked.id, timelines=[])


def end(traffic: RecentTraffic, record: RequestRecord, tokens: int, reason: FinishReason) -> None:
    sequence = a_sequence()
    sequence.output[:] = [1] * tokens
    sequence.finish_reason = reason
    record.engine.timelines.append(a_timeline(sequence=sequence))
    traffic.request_ended(record)


def test_traffic_older_than_an_hour_is_forgotten() -> None:
    live = {a_request(asked("old"), 0.0), a_request(asked("new"), HISTORY_SECONDS + 1)}
    traffic = RecentTraffic(live)
    assert [request.asked.id for request in traffic.within(HISTORY_SECONDS + 2)] == ["new"]
    assert traffic.within(3 * HISTORY_SECONDS) == []
    for record in live:
        end(traffic, record, 3, FinishReason.STOP)
    live.clear()
    assert [request.asked.id for request in traffic.within(HISTORY_SECONDS + 2)] == ["new"]
    assert traffic.within(3 * HISTORY_SECONDS) == []


def test_memory_is_bounded() -> None:
    traffic = RecentTraffic(())
    for number in range(MAX_REQUESTS + 5):
        traffic.request_ended(a_request(asked(str(number)), number / 1e6))
    assert len(traffic.within(1.0)) == MAX_REQUESTS == recent_traffic.MAX_REQUESTS
