"""Tracing, with a store on paper, and of a gateway with a collector over real sockets."""

import asyncio
import json
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from gateway.settings.settings import Settings
from gateway.telemetry.otlp import Collector, resource
from gateway.telemetry.request_record import MAX_STORE_CALLS, StoreCall, current, record_store_call
from gateway.telemetry.tracing.exporter import BackgroundExporter
from gateway.telemetry.tracing.sampler import TraceSampler
from gateway.telemetry.tracing.step_spans import StepSpans
from gateway.telemetry.tracing.tracing import Tracing
from gateway.tenants.effective_policy import KVShape
from tests.gateway.server_process import eventually
from tests.gateway.telemetry.otlp_receiver import Manner, otlp_receiver, plain
from tests.gateway.telemetry.records import BEGAN_NS, a_grant, a_record
from tests.gateway.telemetry.trace_tree import PROMPT, SpanSeen, ask, check_tree, traced_server

NOW = 100.5


class Sent:
    def __init__(self) -> None:
        self.traces: list[list[ReadableSpan]] = []

    def put(self, spans: list[ReadableSpan]) -> None:
        self.traces.append(spans)


def tracing(sent: Sent, ratio: float = 1.0) -> Tracing:
    steps = StepSpans(Resource({}), 5, set(), sent.put)
    exporter = cast("BackgroundExporter", sent)
    return Tracing(Resource({}), KVShape(16, 1000), TraceSampler(ratio, 2.0, 40.0), steps, exporter, lambda: NOW)


def settle_ends(spans: list[ReadableSpan]) -> int:
    (settle,) = [span for span in spans if span.name == "sluice.quota.settle"]
    assert settle.end_time is not None
    return settle.end_time - BEGAN_NS


@pytest.fixture
def sent() -> Sent:
    return Sent()


async def test_a_trace_is_complete_once_its_quota_is_settled() -> None:
    sent, told = Sent(), asyncio.Event()

    async def settle() -> None:
        await told.wait()

    settlement = asyncio.create_task(settle())
    record = a_record(grant=a_grant(settlement=settlement))
    tracing(sent).request_ended(record)
    await asyncio.sleep(0)
    assert not sent.traces
    record.engine.store_calls.append(StoreCall("settle", 100.076, 100.09, None))
    told.set()
    await settlement
    await asyncio.sleep(0)
    assert settle_ends(sent.traces[0]) == pytest.approx(90e6, abs=1e3)
    assert "EVALSHA settle" in [span.name for span in sent.traces[0]]


async def test_a_settlement_that_failed_ends_a_trace_too() -> None:
    async def settle() -> None:
        raise RuntimeError("no store")

    sent = Sent()
    settlement = asyncio.create_task(settle())
    tracing(sent).request_ended(a_record(grant=a_grant(settlement=settlement)))
    await asyncio.gather(settlement, return_exceptions=True)
    await asyncio.sleep(0)
    assert settle_ends(sent.traces[0]) == pytest.approx(500e6, abs=1e3)


def test_a_request_without_limits_is_settled_at_once(sent: Sent) -> None:
    tracing(sent).request_ended(a_record(grant=a_grant()))
    assert settle_ends(sent.traces[0]) == pytest.approx(75e6, abs=1e3)


async def test_store_commands_are_put_down_to_the_request_whose_task_or_whose_tasks_gave_them() -> None:
    async def serve(name: str) -> Any:
        record = a_record()
        current.set(record)
        record_store_call(f"reserve {name}", 1.0, 2.0, None)
        await asyncio.sleep(0)
        await asyncio.create_task(settle(name))
        return record

    async def settle(name: str) -> None:
        record_store_call(f"settle {name}", 3.0, 4.0, ValueError("a detail"))

    record_store_call("of nobody", 0.0, 1.0, None)
    records = await asyncio.gather(*(asyncio.create_task(serve(name)) for name in "ab"))
    for record, name in zip(records, "ab", strict=True):
        assert record.engine.store_calls == [
            StoreCall(f"reserve {name}", 1.0, 2.0, None),
            StoreCall(f"settle {name}", 3.0, 4.0, "ValueError"),
        ]


async def test_store_commands_of_one_request_are_bounded() -> None:
    record = a_record()
    current.set(record)
    for _ in range(3 * MAX_STORE_CALLS):
        record_store_call("extend", 1.0, 2.0, None)
    assert len(record.engine.store_calls) == MAX_STORE_CALLS


def test_the_collector_is_as_the_settings_name_it() -> None:
    assert Collector.of(Settings()) is None
    over_http = Settings(
        otlp_endpoint="http://collector:4318/", otlp_protocol="http", otlp_headers="Authorization=Bearer%20a%3D,x-y=z"
    )
    collector = Collector.of(over_http)
    assert collector is not None
    assert collector.url("traces") == "http://collector:4318/v1/traces"
    assert collector.url("metrics") == "http://collector:4318/v1/metrics"
    assert collector.headers == {"authorization": "Bearer a=", "x-y": "z"}
    assert "Bearer" not in repr(collector)
    over_grpc = Collector.of(Settings(otlp_endpoint="http://collector:4317"))
    assert over_grpc is not None
    assert over_grpc.url("traces") == "http://collector:4317"


@pytest.mark.parametrize("headers", ["a", "a=b,", "a b=c", "a=b c", "=b", "a=b\n"])
def test_headers_that_are_no_pairs_are_refused_without_being_shown(headers: str) -> None:
    with pytest.raises(ValueError, match="NAME=VALUE") as refused:
        Settings(otlp_headers=headers)
    assert repr(headers) not in str(refused.value)


@pytest.mark.parametrize("url", ["localhost:4317", "grpc://localhost", "http://user:secret@localhost"])
def test_an_endpoint_is_a_url_without_a_password(url: str) -> None:
    with pytest.raises(ValueError, match="must begin with http") as refused:
        Settings(otlp_endpoint=url)
    assert url not in str(refused.value)


def test_all_that_a_process_sends_is_of_one_instance() -> None:
    us = resource().attributes
    assert us["service.name"] == "sluice"
    assert us["service.version"]
    assert us["service.instance.id"] == resource().attributes["service.instance.id"]


def seen(span: Span) -> SpanSeen:
    return SpanSeen(
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex() or None,
        span.name,
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        plain(span.attributes),
        [event.name for event in span.events],
    )


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_collector_has_the_whole_tree_of_a_request(tmp_path: Path, protocol: str) -> None:
    trace_id = secrets.token_hex(16)
    with otlp_receiver() as receiver:
        with traced_server(tmp_path, receiver.endpoint(protocol), protocol, "--otlp-logs", "on") as server:
            usage = ask(server, trace_id)
            refusal = httpx.post(f"{server.url}/v1/completions", json={}, headers={"traceparent": "nonsense"})
            assert refusal.status_code == 401
        spans = receiver.spans  # the gateway has stopped, and sent all it had
    check_tree(map(seen, spans), trace_id, usage)
    (root,) = [span for span in spans if span.name == "POST /v1/chat/completions"]
    assert (root.kind, root.trace_state) == (Span.SPAN_KIND_SERVER, "vendor=1")
    links = [link for span in spans if span.name == "sluice.engine.step" for link in span.links]
    assert (root.trace_id, root.span_id) in [(link.trace_id, link.span_id) for link in links]
    (refused,) = [span for span in spans if span.name == "POST /v1/completions"]
    assert plain(refused.attributes)["sluice.refusal.code"] == "invalid_api_key" and not refused.parent_span_id
    assert {resource["service.name"] for resource in receiver.resources} == {"sluice"}
    assert len({resource["service.instance.id"] for resource in receiver.resources}) == 1
    check_log(receiver.log_records, server.log.read_text(), root)
    sent = b"".join(request.SerializeToString() for request in receiver.requests)
    assert server.key.encode() not in sent and PROMPT.encode() not in sent


def check_log(records: list[LogRecord], log: str, root: Span) -> None:
    """Each line of a request is a record with the same fields, in the request's trace."""
    lines = [json.loads(line) for line in log.splitlines() if '"request ended"' in line]
    assert [record.body.string_value for record in records] == ["request ended"] * len(lines)
    for record, line in zip(records, lines, strict=True):
        fields = {name: value for name, value in line.items() if value is not None}
        seen = plain(record.attributes) | {"level": record.severity_text, "message": record.body.string_value}
        assert seen == {name: value for name, value in fields.items() if name not in {"time", "logger"}}
        assert record.trace_id.hex() == line["trace_id"]
    (ended,) = [record for record in records if record.trace_id == root.trace_id]
    assert (ended.span_id, ended.time_unix_nano) == (root.span_id, root.end_time_unix_nano)


def test_no_request_is_harmed_by_a_collector_that_refuses_hangs_or_is_gone(tmp_path: Path) -> None:
    with ExitStack() as running:
        receiver = running.enter_context(otlp_receiver(Manner.REFUSE))
        flags = ("--trace-sample-ratio", "1", "--otlp-logs", "on")
        with traced_server(tmp_path, receiver.grpc_endpoint, "grpc", *flags) as server:
            assert server.answers()
            eventually(lambda: server.metric("sluice_spans_dropped_total") > 0)
            eventually(lambda: server.metric("sluice_log_lines_dropped_total") > 0)
            receiver.manner, attempts = Manner.HANG, receiver.attempts
            assert server.answers()
            eventually(lambda: receiver.attempts > attempts)
            assert server.answers()
            running.close()
            assert server.answers()
        assert server.process.returncode == 0
    assert "Traceback" not in server.log.read_text()
