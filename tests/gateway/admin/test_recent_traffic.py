from admission.request import Asked, AskedPrompt
from backend.scheduler.sequence import FinishReason
from gateway.admin import recent_traffic
from gateway.admin.recent_traffic import MAX_REQUESTS, SECONDS, RecentTraffic, arrivals_of
from tests.gateway.telemetry.records import a_record, a_sequence, a_timeline


def asked(name: str, tenant: str = "acme", declared: bool = True, refusal: str | None = None) -> Asked:
    prompts = (AskedPrompt(7, 40, declared),)
    return Asked(name, tenant, "k1", "flex", 123, 0.5, None, None, prompts, refusal)


def ended(traffic: RecentTraffic, name: str, tokens: int, reason: FinishReason) -> None:
    sequence = a_sequence(name)
    sequence.output[:] = [1] * tokens
    sequence.finish_reason = reason
    traffic.request_ended(a_record(response_id=name, timelines=[a_timeline(sequence=sequence)]))


def test_answers_have_the_length_they_had_and_those_cut_short_what_they_wanted() -> None:
    traffic = RecentTraffic()
    for number, name in enumerate(("whole", "cut", "open", "refused")):
        traffic.asked(
            asked(name, declared=name != "open", refusal="requests/min" if name == "refused" else None), number
        )
    ended(traffic, "whole", 11, FinishReason.STOP)
    ended(traffic, "cut", 3, FinishReason.CANCELLED)
    arrivals = arrivals_of(traffic.within(100.0))
    assert [arrival.output_tokens for arrival in arrivals] == [11, 40, 11, 40]
    assert [arrival.time for arrival in arrivals] == [0, 1, 2, 3]
    first = arrivals[0]
    assert (first.tenant, first.key, first.service_tier, first.body_bytes) == ("acme", "k1", "flex", 123)
    assert (first.prompt_tokens, first.max_tokens, first.deadline) == (7, 40, 0.5)
    assert arrivals[3].refused_by == "requests/min"


def test_what_is_older_than_an_hour_is_forgotten() -> None:
    traffic = RecentTraffic()
    traffic.asked(asked("old"), 0.0)
    traffic.asked(asked("new"), SECONDS + 1)
    assert [request.asked.id for request in traffic.within(SECONDS + 2)] == ["new"]
    assert traffic.within(3 * SECONDS) == []
    ended(traffic, "old", 3, FinishReason.STOP)  # nothing to tell


def test_memory_is_bounded() -> None:
    traffic = RecentTraffic()
    for number in range(MAX_REQUESTS + 5):
        traffic.asked(asked(str(number)), number / 1e6)
    assert len(traffic.within(1.0)) == MAX_REQUESTS == recent_traffic.MAX_REQUESTS
