"""The spans of a router, as its exporter is given them, and the trace context that a replica is given."""

import asyncio
from dataclasses import replace
from typing import cast

import httpx
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from fleet.app import RouterApp
from fleet.tracing import RouteTracing, waited
from gateway.telemetry.tracing.exporter import BackgroundExporter
from gateway.telemetry.tracing.sampler import TraceSampler
from tests.fleet.paper_fleet import Handler, PaperFleet, Parts, answering, refusal, stream, whole

TRACE, PARENT = "ab" * 16, "cd" * 8
EVENT = b"data: {}\n\n"


class Kept:
    """An exporter that keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def put(self, spans: list[ReadableSpan]) -> None:
        self.spans += spans


def parent(span: ReadableSpan) -> int:
    assert span.parent
    return span.parent.span_id


def is_failed(span: ReadableSpan) -> bool:
    return not span.status.is_ok


def traced(ratio: float, **handlers: Handler) -> tuple[PaperFleet, Kept]:
    """A fleet behind a router that samples `ratio` of the requests without a trace."""
    paper, kept = PaperFleet(**handlers), Kept()
    clock = asyncio.get_running_loop().time
    tracing = RouteTracing(clock, cast(BackgroundExporter, kept), TraceSampler(ratio, 2.0, 100.0, waited))
    paper.services = replace(paper.services, tracing=tracing)
    paper.services.telemetry.on_end.append(tracing.request_ended)
    paper.app = RouterApp(paper.services, {})
    return paper, kept


def client(flags: str = "01") -> list[tuple[bytes, bytes]]:
    states = [(b"tracestate", b"a=1"), (b"tracestate", b"b=2")]  # as one, in two headers
    return [(b"traceparent", f"00-{TRACE}-{PARENT}-{flags}".encode()), *states, (b"baggage", b"user=7")]


async def test_a_second_attempt_has_a_span_of_its_own_that_says_why() -> None:
    paper, kept = traced(0.0, a=answering(refusal("queue_full")), b=answering(stream(EVENT)))
    assert (await paper.request(headers=client())).status == 200
    route, first, second = kept.spans
    assert (route.name, route.kind, first.name, first.kind) == ("route", SpanKind.SERVER, "attempt", SpanKind.CLIENT)
    assert f"{route.context.trace_id:032x} {parent(route):016x}" == f"{TRACE} {PARENT}"
    assert parent(first) == parent(second) == route.context.span_id
    said = dict(first.attributes or {})
    assert (said["sluice.route.replica"], said["error.type"], is_failed(first)) == ("a:8000", "queue_full", True)
    assert (said["http.response.status_code"], said["server.address"], said["server.port"]) == (503, "a", 8000)
    assert "sluice.route.retry_because" not in said
    said = dict(second.attributes or {})
    assert (said["sluice.route.replica"], said["sluice.route.retry_because"]) == ("b:8000", "queue_full")
    assert said["http.request.resend_count"] == 1
    assert float(cast(float, said["sluice.route.predicted_ms"])) >= 1000, "as it told"
    assert [event.name for event in second.events] == ["first_byte"]
    given = [dict(request.headers) for request in paper.seen]
    assert [one["traceparent"] for one in given] == [
        f"00-{TRACE}-{one.context.span_id:016x}-01" for one in (first, second)
    ]
    assert {(one["tracestate"], one["baggage"]) for one in given} == {("a=1,b=2", "user=7")}


async def test_a_replica_that_is_lost_in_the_middle_ends_both_spans_with_an_error() -> None:
    paper, kept = traced(0.0, a=answering(stream(EVENT, httpx.ReadError("gone"))))
    await paper.request(headers=client("00"))  # a failure is traced against the client's decision
    route, attempt = kept.spans
    for span in (route, attempt):
        assert (is_failed(span), dict(span.attributes or {})["error.type"]) == (True, "replica_lost")
    assert paper.seen[0].headers["traceparent"].endswith("-00")


async def test_the_router_decides_for_the_replica_where_no_client_has() -> None:
    for ratio, flags in ((1.0, "01"), (0.0, "00")):
        paper, kept = traced(ratio, a=answering(whole()))
        await paper.request(headers=[(b"tracestate", b"stale=1")])
        version, trace, _, sampled = paper.seen[0].headers["traceparent"].split("-")
        assert (version, sampled, len(kept.spans)) == ("00", flags, 2 * int(ratio))
        assert not kept.spans or f"{kept.spans[0].context.trace_id:032x}" == trace
        assert "tracestate" not in paper.seen[0].headers, "it belongs to no trace"


async def test_a_client_that_leaves_ends_the_attempt_and_is_no_error() -> None:
    leave, begun = asyncio.Event(), asyncio.Event()

    async def endless(request: httpx.Request) -> httpx.Response:
        begun.set()
        return httpx.Response(200, stream=Parts(EVENT, asyncio.Event()))

    paper, kept = traced(0.0, a=endless)
    asking = asyncio.create_task(paper.request(headers=client(), leave=leave))
    await begun.wait()
    leave.set()
    await asking
    assert [(span.name, is_failed(span)) for span in kept.spans] == [("route", False), ("attempt", False)]


async def test_without_a_collector_every_header_passes_as_it_is() -> None:
    paper = PaperFleet(a=answering(whole()))
    await paper.request(headers=client())
    headers = paper.seen[0].headers
    assert headers["traceparent"] == f"00-{TRACE}-{PARENT}-01"
    assert (headers["tracestate"], headers["baggage"]) == ("a=1, b=2", "user=7")
