from admission.request import Asked, AskedPrompt
from backend.scheduler.sequence import FinishReason
from gateway.admin import recent_traffic
from gateway.admin.recent_traffic import MAX_REQUESTS, SECONDS, RecentTraffic, arrivals_of
from gateway.telemetry.request_record import RequestRecord
from tests.gateway.telemetry.records import a_record, a_sequence, a_timeline


def asked(name: str, tenant: str = "acme", declared: bool = True, refusal: str | None = None) -> Asked:
    prompts = (AskedPrompt(7, 40, declared),)
    return Asked(name, tenant, "k1", "flex", 123, 0.5, None, None, prompts, refusal)


def a_request(asked: Asked, at: float) -> RequestRecord:
    return a_record(asked=asked, asked_at=at, response_id=asked.id, timelines=[])


def end(traffic: RecentTraffic, record: RequestRecord, tokens: int, reason: FinishReason) -> None:
    sequence = a_sequence()
    sequence.output[:] = [1] * tokens
    sequence.finish_reason, sequence.features = reason, (tokens, 7)
    record.timelines.append(a_timeline(sequence=sequence))
    traffic.request_ended(record)


def test_answers_have_the_length_they_had_and_those_cut_short_what_they_wanted() -> None:
    whole, cut = a_request(asked("whole"), 0), a_request(asked("cut"), 1)
    open_end, refused = (
        a_request(asked("open", declared=False), 2),
        a_request(asked("refused", refusal="requests/min"), 3),
    )
    traffic = RecentTraffic({open_end})
    traffic.request_ended(refused)
    end(traffic, cut, 3, FinishReason.CANCELLED)
    end(traffic, whole, 11, FinishReason.STOP)
    arrivals = arrivals_of(traffic.within(100.0))
    assert [arrival.output_tokens for arrival in arrivals] == [11, 40, 11, 40]
    assert [arrival.time for arrival in arrivals] == [0, 1, 2, 3]
    first = arrivals[0]
    assert (first.tenant, first.key, first.service_tier, first.body_bytes) == ("acme", "k1", "flex", 123)
    assert (first.prompt_tokens, first.max_tokens, first.deadline) == (7, 40, 0.5)
    assert [arrival.features for arrival in arrivals] == [(11, 7), (3, 7), (), ()]
    assert arrivals[3].refused_by == "requests/min"


def test_what_is_older_than_an_hour_is_forgotten() -> None:
    live = {a_request(asked("old"), 0.0), a_request(asked("new"), SECONDS + 1)}
    traffic = RecentTraffic(live)
    assert [request.asked.id for request in traffic.within(SECONDS + 2)] == ["new"]
    assert traffic.within(3 * SECONDS) == []
    for record in live:
        end(traffic, record, 3, FinishReason.STOP)
    live.clear()
    assert [request.asked.id for request in traffic.within(SECONDS + 2)] == ["new"]
    assert traffic.within(3 * SECONDS) == []


def test_memory_is_bounded() -> None:
    traffic = RecentTraffic(())
    for number in range(MAX_REQUESTS + 5):
        traffic.request_ended(a_request(asked(str(number)), number / 1e6))
    assert len(traffic.within(1.0)) == MAX_REQUESTS == recent_traffic.MAX_REQUESTS


def test_who_was_refused_unread_asked_for_what_its_tenant_asked_for_before() -> None:
    unread = [
        a_request(Asked.unread(f"unread-{tenant}", tenant, "k2", "requests/min"), 2) for tenant in ("acme", "new")
    ]
    traffic = RecentTraffic([a_request(asked("read"), 1), *unread])
    read, like = arrivals_of(traffic.within(100.0))
    assert (like.prompt_tokens, like.max_tokens, like.tenant) == (read.prompt_tokens, read.max_tokens, "acme")
    assert (like.key, like.refused_by) == ("k2", "requests/min")
