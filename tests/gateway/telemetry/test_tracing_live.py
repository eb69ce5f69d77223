"""The gateway and a collector, each in a process or on a thread of its own, over real sockets."""

import secrets
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.gateway.server_process import eventually
from tests.gateway.telemetry.otlp_receiver import Manner, otlp_receiver, plain
from tests.gateway.telemetry.trace_tree import PROMPT, SpanSeen, ask, check_tree, traced_server


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
        with traced_server(tmp_path, receiver.endpoint(protocol), protocol) as server:
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
    sent = b"".join(request.SerializeToString() for request in receiver.requests)
    assert server.key.encode() not in sent and PROMPT.encode() not in sent


def test_no_request_is_harmed_by_a_collector_that_refuses_hangs_or_is_gone(tmp_path: Path) -> None:
    with ExitStack() as running:
        receiver = running.enter_context(otlp_receiver(Manner.REFUSE))
        flags = ("--trace-sample-ratio", "1")
        with traced_server(tmp_path, receiver.grpc_endpoint, "grpc", *flags) as server:
            assert server.answers()
            eventually(lambda: server.metric("sluice_spans_dropped_total") > 0)
            receiver.manner, attempts = Manner.HANG, receiver.attempts
            assert server.answers()
            eventually(lambda: receiver.attempts > attempts)
            assert server.answers()
            running.close()
            assert server.answers()
        assert server.process.returncode == 0
    assert "Traceback" not in server.log.read_text()
