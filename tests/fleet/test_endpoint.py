import asyncio
from dataclasses import replace
from functools import partial

import httpx
import pytest

from fleet.app import Probe, RouterApp
from gateway.api.openapi import OPERATIONS
from gateway.errors import ShuttingDown
from tests.fleet.paper_fleet import (
    BODY,
    KEY,
    Answer,
    PaperFleet,
    Parts,
    answering,
    never,
    refusal,
    stream,
    whole,
)
from tests.fleet.states import IDLE

EVENTS = (b"data: 1\n\n", b"data: 2\n\ndata", b": 3\n\n", b"data: [DONE]\n\n")
RESET = httpx.ReadError("reset")


async def test_all_headers_but_those_of_the_connection_reach_the_replica() -> None:
    fleet = PaperFleet(a=answering(whole(b'{"x": 1}', x_sluice_estimate_ms="5")))
    given = [
        (b"traceparent", b"00-1-2-01"),
        (b"connection", b"close"),
        (b"x-request-id", b"mine"),
        (b"host", b"router"),
    ]
    answer = await fleet.request(path="/v1/completions?a=%20b", headers=given)
    (seen,) = fleet.seen
    assert str(seen.url) == "http://a:8000"
    assert seen.extensions["target"] == b"/v1/completions?a=%20b"
    assert seen.headers["traceparent"] == "00-1-2-01"
    assert seen.headers["x-request-id"] == "mine"
    assert seen.headers["host"] == "a:8000"
    assert seen.headers["authorization"] == f"Bearer {KEY}"
    assert "connection" not in seen.headers
    assert seen.headers.get_list("x-sluice-attempt") != ["forged"]
    assert answer.body == b'{"x": 1}'
    assert answer.header(b"x-request-id") == b"mine"
    assert answer.header(b"x-sluice-estimate-ms") == b"5"
    assert [name for name, _ in answer.headers].count(b"content-length") == 1


async def test_without_a_good_key_no_replica_is_asked() -> None:
    fleet = PaperFleet(a=answering(whole()))
    assert (await fleet.request(key=None)).code == "invalid_api_key"
    assert (await fleet.request(key="sk-sluice-demo-wrong")).status == 401
    assert (await fleet.request(body="x" * 20_000)).code == "request_too_large"
    assert (await fleet.request("GET", "/v1/chat/completions")).header(b"allow") == b"POST"
    assert (await fleet.request("GET", "/v1/none")).code == "unknown_url"
    assert not fleet.seen


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/x/y", "//v1/models/", "/v1/limits", "/v1/models/../../metrics", '/v1/models/a"']
)
async def test_a_call_that_generates_nothing_is_answered_by_a_replica_too(path: str) -> None:
    fleet = PaperFleet(a=answering(whole(b"[]")))
    assert (await fleet.request("GET", path)).body == b"[]"
    assert fleet.seen[0].extensions["target"] == path.encode(), "as it came, or a tenant reaches what is not routed"


async def test_each_operation_of_the_description_is_routed_and_the_description_told_without_a_key() -> None:
    fleet = PaperFleet(a=answering(whole()))
    for path in ("/openapi.json", "/docs"):
        assert (await fleet.request("GET", path, key=None)).status == 200
    assert not fleet.seen
    for method, path in {(one.method.upper(), one.path.replace("{", "").replace("}", "")) for one in OPERATIONS}:
        assert (await fleet.request(method, path)).status == 200, (method, path)
    assert (await fleet.request(path="/v2/rerank")).status == 200


@pytest.mark.parametrize("status", [503, 529])
@pytest.mark.parametrize("reason", ["queue_full", "deadline", "draining", "preempted"])
async def test_a_request_refused_for_a_replicas_own_reasons_goes_to_another(reason: str, status: int) -> None:
    fleet = PaperFleet(a=answering(refusal(reason, status)), b=answering(whole(b"yes")))
    assert (await fleet.request()).body == b"yes"
    assert fleet.asked == ["a", "b"]
    assert [(view.attempts, view.retried) for view in fleet.fleet.views.values()] == [(1, 1), (1, 0)]


@pytest.mark.parametrize(
    ("reason", "status"),
    [("rate", 429), ("budget", 429), ("deadline", 429), ("quota_store", 503), ("cancelled", 503), ("invalid", 400)],
)
async def test_a_refusal_of_the_tenant_is_never_retried(reason: str, status: int) -> None:
    fleet = PaperFleet(a=answering(refusal(reason, status)), b=answering(whole()))
    answer = await fleet.request()
    assert (answer.status, answer.code) == (status, reason)
    assert fleet.asked == ["a"]
    assert fleet.budget.taken == 0


@pytest.mark.parametrize("error", [RESET, httpx.ConnectError("refused"), httpx.RemoteProtocolError("closed")])
async def test_a_replica_that_is_lost_before_its_answer_is_followed_by_another(error: Exception) -> None:
    fleet = PaperFleet(a=answering(error), b=answering(stream(*EVENTS)))
    assert (await fleet.request()).body == b"".join(EVENTS)
    assert fleet.asked == ["a", "b"]
    signed = [request.headers["x-sluice-attempt"].encode() for request in fleet.seen]
    first, second = [fleet.services.keys.fleet.attempt(one) for one in signed]
    assert first is not None
    assert second == first._replace(number=2)


async def test_two_attempts_are_all() -> None:
    fleet = PaperFleet(a=answering(RESET), b=answering(RESET), c=answering(whole()))
    answer = await fleet.request()
    assert (answer.status, answer.code) == (503, "replica_lost")
    assert answer.header(b"retry-after") == b"1"
    assert fleet.asked == ["a", "b"]


async def test_a_refusal_that_no_other_replica_changes_is_handed_on_as_it_came() -> None:
    fleet = PaperFleet(a=answering(refusal("queue_full")), b=answering(refusal("queue_full")))
    answer = await fleet.request()
    assert (answer.status, answer.code) == (503, "queue_full")
    alone = PaperFleet(a=answering(refusal("queue_full")))
    assert (await alone.request()).code == "queue_full"
    assert alone.budget.taken == 0


async def test_a_stream_whose_replica_is_lost_ends_with_a_typed_error_and_is_asked_for_once() -> None:
    fleet = PaperFleet(a=answering(stream(EVENTS[0], RESET)), b=answering(whole()))
    answer = await fleet.request()
    assert answer.status == 200
    assert answer.parts[0] == EVENTS[0]
    assert b'"code":"replica_lost"' in answer.body
    assert b"[DONE]" not in answer.body
    assert answer.is_complete
    assert fleet.asked == ["a"]
    assert await fleet.settled() == [{"tenant": "demo", "has_begun": True, "output_tokens": None}]


async def test_anthropics_clients_read_the_routers_own_errors() -> None:
    fleet = PaperFleet(a=answering(stream(EVENTS[0], RESET)))
    ask = partial(fleet.request, "POST", "/v1/messages")
    lost = (await ask()).body.removeprefix(EVENTS[0])
    assert lost.startswith(b'event: error\ndata: {"type":"error","error":{') and b'"code":"replica_lost"' in lost
    assert (await PaperFleet(a=answering(RESET)).request("POST", "/v1/messages")).status == 529
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"):
        refused = await fleet.request("GET", path)
        assert refused.status in (404, 405)
        assert refused.body.startswith(b'{"type":"error"')
    unknown = await ask(key="sk-sluice-demo-wrong")
    assert (unknown.status, b'"type":"authentication_error"' in unknown.body) == (401, True)
    responses = PaperFleet(a=answering(whole(b"yes")))
    assert (await responses.request("POST", "/v1/responses")).body == b"yes"


@pytest.mark.parametrize("events", [EVENTS[:1], ()])
async def test_an_event_of_which_a_part_came_is_no_part_of_the_error_behind_it(events: tuple[bytes, ...]) -> None:
    fleet = PaperFleet(a=answering(stream(*events, b'data: {"text":"cu', RESET)))
    answer = await fleet.request()
    assert answer.code == "replica_lost" if not events else answer.parts[1].startswith(b'data: {"error":')
    assert answer.status == (200 if events else 503)
    assert await fleet.settled() == [{"tenant": "demo", "has_begun": bool(events), "output_tokens": None}]


@pytest.mark.parametrize(
    ("path", "error", "outcome"),
    [
        ("/v1/chat/completions", b'data: {"error":{"type":"timeout_error","code":"deadline_exceeded"}}\n\n', "expired"),
        ("/v1/chat/completions", b'data: {"error":{"type":"internal_error","code":"model_failed"}}\n\n', "failed"),
        ("/v1/completions", b'data: {"error":{"type":"invalid_request_error","code":null}}\n\n', "invalid"),
        (
            "/v1/completions",
            b'data: {"error":{"type":"service_unavailable_error","code":"quota_unverifiable"}}\n\n',
            "refused",
        ),
        (
            "/v1/completions",
            b'data: {"error":{"type":"invalid_request_error","code":"no_token_allowed"}}\n\n',
            "failed",
        ),
        ("/v1/messages", b'event: error\ndata: {"error":{"type":"overloaded_error","code":"preempted"}}\n\n', "failed"),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n', "failed"),
        ("/v1/responses", b'event: error\ndata: {"type":"error","error":{"type":"internal_error"}}\n\n', "failed"),
        ("/v1/responses", b"event: error\ndata: ?\n\n", "failed"),
        (
            "/v1/chat/completions",
            b'data: {"choices":[{"text":"data: {\\"error\\":1}"}]}\n\ndata: [DONE]\n\n',
            "completed",
        ),
    ],
)
async def test_a_stream_that_its_replica_ends_with_an_error_is_counted_as_that(
    path: str, error: bytes, outcome: str
) -> None:
    fleet, ended = PaperFleet(a=answering(stream(b"data: 1\n\n", error[:9], error[9:]))), list[str]()
    fleet.services.telemetry.on_end.append(lambda record: ended.append(record.outcome.value))
    answer = await fleet.request(path=path)
    assert answer.body == b"data: 1\n\n" + error
    assert ended == [outcome]
    assert fleet.asked == ["a"]


async def test_events_of_a_response_that_failed_are_no_failure_of_who_reads_them() -> None:
    error = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","code":"internal_error"}}\n\n'
    fleet, ended = PaperFleet(a=answering(stream(error))), list[str]()
    fleet.services.telemetry.on_end.append(lambda record: ended.append(record.outcome.value))
    assert (await fleet.request("GET", "/v1/responses/resp_1?stream=true")).body == error
    assert ended == ["completed"]


async def test_a_file_whose_replica_is_lost_does_not_end_as_if_it_were_whole() -> None:
    cut = httpx.Response(200, headers={"content-type": "application/octet-stream"}, stream=Parts(b"12345", RESET))
    answer = await PaperFleet(a=answering(cut)).request("GET", "/v1/files/file-1/content")
    assert (answer.body, answer.is_complete) == (b"12345", False)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
async def test_what_a_request_makes_is_not_made_twice(path: str) -> None:
    for error, asked in ((RESET, ["a"]), (httpx.ConnectError("refused"), ["a", "b"])):
        fleet = PaperFleet(a=answering(error), b=answering(whole(b"made")))
        answer = await fleet.request("POST", path)
        assert (answer.status, fleet.asked) == (503 if error is RESET else 200, asked)


@pytest.mark.parametrize("split", range(1, 30, 3))
async def test_delivered_tokens_of_a_lost_stream_are_settled_as_its_replica_told(split: int) -> None:
    """However it comes in parts; what came without being said is not counted."""
    said = b"data: 1\n\n: 1 tokens\n\ndata: 2\n\n: 23 tokens\n\n"
    parts = said[:-split], *(said[-split:][at : at + 1] for at in range(split)), b"data: 3\n\n"
    fleet = PaperFleet(a=answering(stream(*parts, RESET)), b=answering(whole()))
    answer = await fleet.request()
    assert answer.body.startswith(b"".join(parts)), "handed on as it came"
    assert await fleet.settled() == [{"tenant": "demo", "has_begun": True, "output_tokens": 23}]


async def test_an_attempt_lost_before_its_answer_costs_nothing() -> None:
    fleet = PaperFleet(a=answering(RESET), b=answering(RESET), c=answering(whole()))
    assert (await fleet.request()).code == "replica_lost"
    assert await fleet.settled() == [{"tenant": "demo", "has_begun": False, "output_tokens": None}]


@pytest.mark.parametrize(("reason", "status"), [("draining", 503), ("rate", 429), ("invalid", 400)])
async def test_a_lost_attempt_costs_nothing_when_the_next_replica_refuses(reason: str, status: int) -> None:
    fleet = PaperFleet(a=answering(RESET), b=answering(refusal(reason, status)))
    answer = await fleet.request()
    assert (answer.status, answer.code) == (status, reason)
    assert await fleet.settled() == [{"tenant": "demo", "has_begun": False, "output_tokens": None}]


async def test_an_answer_that_is_cut_before_its_end_is_not_begun() -> None:
    cut = httpx.Response(200, headers={"content-length": "10"}, stream=Parts(b"12345", RESET))
    fleet = PaperFleet(a=answering(cut), b=answering(whole()))
    assert (await fleet.request()).code == "replica_lost"
    assert fleet.asked == ["a"], "it was charged by its replica"


async def test_a_client_that_leaves_closes_the_replicas_connection() -> None:
    left, answer = asyncio.Event(), Answer()
    body = Parts(EVENTS[0], asyncio.Event())
    fleet = PaperFleet(a=answering(httpx.Response(200, stream=body)))
    request = asyncio.create_task(fleet.request(leave=left, answer=answer))
    while not answer.parts:
        await asyncio.sleep(0)
    (view,) = fleet.fleet.views.values()
    assert view.load == 1
    left.set()
    await request
    assert body.is_closed
    assert view.load == 0
    assert b'sluice_route_requests_total{outcome="disconnected"} 1' in await fleet.metrics.text()


async def test_a_request_at_a_replica_that_falls_silent_is_sent_to_another() -> None:
    fleet = PaperFleet(a=never, b=answering(whole(b"yes")))
    request = asyncio.create_task(fleet.request())
    while not fleet.seen:
        await asyncio.sleep(0)
    fleet.fleet.lost(fleet.fleet.views["a:8000"])
    assert (await request).body == b"yes"


async def test_a_shutdown_ends_what_is_left_with_its_error() -> None:
    fleet = PaperFleet(a=never)
    request = asyncio.create_task(fleet.request())
    while not fleet.seen:
        await asyncio.sleep(0)
    fleet.services.active_requests.close()
    assert (await fleet.request()).code == "shutting_down"
    fleet.services.active_requests.fail_all(ShuttingDown())
    assert (await request).code == "shutting_down"


async def test_where_no_replica_is_left_the_error_says_so() -> None:
    fleet = PaperFleet(a=answering(whole()))
    fleet.fleet.told(fleet.fleet.views["a:8000"], replace(IDLE, draining=True), asyncio.get_running_loop().time())
    answer = await fleet.request()
    assert (answer.status, answer.code) == (503, "no_replica")
    fleet.fleet.set_replicas(())
    assert (await fleet.request()).code == "no_replica"


async def test_it_is_ready_while_any_replica_takes_requests() -> None:
    fleet = PaperFleet(a=answering(whole()))
    probe = Probe(fleet.services, lambda: bool(fleet.fleet.available()))
    fleet.app = RouterApp(fleet.services, {"/readyz": probe})
    assert (await fleet.request("GET", "/readyz", key=None)).status == 200
    fleet.fleet.lost(fleet.fleet.views["a:8000"])
    assert (await fleet.request("GET", "/readyz", key=None)).status == 503


async def test_a_replica_that_fails_is_left_out_unless_most_do() -> None:
    fleet = PaperFleet(a=answering(RESET), b=answering(whole()), c=answering(whole()))
    for _ in range(4):
        assert (await fleet.request()).status == 200
    assert fleet.asked == ["a", "b", "a", "b", "b", "b"]


async def test_retries_end_with_their_budget() -> None:
    fleet = PaperFleet(a=answering(refusal("queue_full")), b=answering(whole()))
    statuses = [(await fleet.request()).status for _ in range(60)]
    assert statuses[:10] == [200] * 10
    assert statuses.count(200) <= 16
    assert fleet.budget.taken == statuses.count(200)


async def test_a_body_that_is_no_request_is_for_a_replica_to_refuse() -> None:
    fleet = PaperFleet(a=answering(refusal("invalid", 400)))
    for body in ([], "x", {"messages": 3}, BODY | {"messages": [None]}):
        assert (await fleet.request(body=body)).status == 400
    assert len(fleet.seen) == 4
