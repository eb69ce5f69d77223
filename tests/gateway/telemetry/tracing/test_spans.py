import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode, TraceState
from starlette.applications import Starlette
from starlette.routing import Route

from admission.outcome import Outcome
from admission.promise import Promise
from backend.grammar import Grammar, GrammarKind
from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import FinishReason
from gateway.api.frontend import Frontend
from gateway.api.routes import Shortcut, make_app, make_probes
from gateway.errors import InternalError, InvalidApiKey, Overloaded, RateLimited, RouteNotFound
from gateway.telemetry.request_record import (
    Chunk,
    GuardrailCall,
    GuardrailVerdict,
    RequestRecord,
    StoreCall,
    TraceContext,
)
from gateway.telemetry.tracing.attributes import of_generation
from gateway.telemetry.tracing.http_attributes import route_of
from gateway.telemetry.tracing.sampler import SamplingReason
from gateway.telemetry.tracing.span_tree import MAX_EVENTS, MAX_TEXT_CHARS
from gateway.telemetry.tracing.spans import MAX_GUARDRAIL_CALLS, MAX_SEQUENCES, MIN_EVENTS, spans_of
from gateway.tenants.effective_policy import KVShape
from quotas.reservation import Ask
from tests.gateway.telemetry.records import BEGAN_NS, a_grant, a_record, a_sequence, a_timeline

RESOURCE = Resource({"service.name": "sluice"})
KV = KVShape(block_tokens=16, block_bytes=1000)
CALLS = [StoreCall("reserve", 100.0031, 100.0039, None), StoreCall("settle", 100.0751, 100.081, None)]


def spans(settled: float | None = 100.082, **changes: Any) -> dict[str, ReadableSpan]:
    """By name; `changes` of the story."""
    made = made_of(a_record(**({"grant": a_grant()} | changes)), settled)
    by_name = {span.name: span for span in made}
    assert len(by_name) == len(made)
    return by_name


def made_of(record: RequestRecord, settled: float | None = 100.082) -> list[ReadableSpan]:
    return spans_of(record, RESOURCE, KV, SamplingReason.RATIO, settled)


def parent(span: ReadableSpan) -> int | None:
    return span.parent and span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context
    return context.span_id


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_request_becomes_the_tree_of_its_phases() -> None:
    tree = spans(store_calls=CALLS)
    parents = {
        "sluice.auth": "POST /v1/completions",
        "sluice.quota.reserve": "POST /v1/completions",
        "EVALSHA reserve": "sluice.quota.reserve",
        "sluice.queue": "POST /v1/completions",
        "text_completion embedded": "POST /v1/completions",
        "sluice.prefill": "text_completion embedded",
        "sluice.decode": "text_completion embedded",
        "sluice.quota.settle": "POST /v1/completions",
        "EVALSHA settle": "sluice.quota.settle",
    }
    assert tree.keys() == parents.keys() | {"POST /v1/completions"}
    assert {name: parent(tree[name]) for name in parents} == {name: id_of(tree[of]) for name, of in parents.items()}
    kinds = {name: span.kind for name, span in tree.items() if span.kind is not SpanKind.INTERNAL}
    assert kinds == {
        "POST /v1/completions": SpanKind.SERVER,
        "EVALSHA reserve": SpanKind.CLIENT,
        "EVALSHA settle": SpanKind.CLIENT,
    }


def test_times_are_the_records_on_the_calendar_of_its_beginning() -> None:
    tree = spans()
    milliseconds = {
        name: (round((span.start_time - BEGAN_NS) / 1e6), round((span.end_time - BEGAN_NS) / 1e6))
        for name, span in tree.items()
        if span.start_time and span.end_time
    }
    assert milliseconds == {
        "POST /v1/completions": (0, 80),
        "sluice.auth": (0, 1),
        "sluice.quota.reserve": (3, 4),
        "sluice.queue": (4, 10),
        "text_completion embedded": (10, 75),
        "sluice.prefill": (10, 30),
        "sluice.decode": (30, 70),
        "sluice.quota.settle": (75, 82),
    }


def test_the_trace_is_the_clients_and_the_root_is_the_span_that_answers_were_given_under() -> None:
    context = TraceContext(7, 8, parent_id=9, client_samples=True, state="a=1,b=2")
    for span in made_of(a_record(trace=context)):
        made = span.get_span_context()
        assert made and made.trace_id == 7 and made.trace_flags.sampled
        assert dict(made.trace_state) == {"a": "1", "b": "2"}
    root = spans(trace=context)["POST /v1/completions"]
    assert (id_of(root), parent(root)) == (8, 9)
    assert root.parent and root.parent.is_remote


def test_the_root_has_the_client_and_the_cost() -> None:
    timeline = a_timeline()
    table = timeline.sequence.block_table
    table.peak, table.block_seconds, timeline.promise.charged = 3, 0.5, 0.012
    root = attributes(spans(timelines=[timeline], num_retries=2)["POST /v1/completions"])
    assert root["sluice.tenant.id"] == "acme"
    assert root["sluice.priority.class"] == "standard"
    assert root["sluice.policy.version"] == "v1"
    assert root["sluice.outcome"] == "completed"
    assert root["sluice.request.id"] == "req_1"
    assert root["http.response.status_code"] == 200
    assert root["http.request.resend_count"] == 2
    assert root["sluice.sampled.because"] == "ratio"
    assert root["sluice.kv.peak_bytes"] == 3000
    assert root["sluice.kv.byte_seconds"] == pytest.approx(500)
    assert root["sluice.engine.time_us"] == 12_000
    assert root["sluice.preemptions"] == 0


def test_the_queue_says_how_long_and_what_was_expected() -> None:
    timeline = a_timeline(promise=Promise(0.03, 0.9))
    queue = attributes(spans(timelines=[timeline], grant=a_grant(Ask(1, 10, 23)))["sluice.queue"])
    assert queue["sluice.queue.wait_ms"] == pytest.approx(6)
    assert queue["sluice.drr.deficit"] == 0.02
    assert (queue["sluice.estimate.ttft_ms"], queue["sluice.estimate.total_ms"]) == (30, 900)
    assert (queue["sluice.estimate.tokens"], queue["sluice.estimate.kv_bytes"]) == (33, 3000)


def test_generation_follows_the_conventions() -> None:
    sampling = SamplingParams(max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, seed=11, presence_penalty=1.0)
    chat = spans(operation="chat", sampling=sampling, streams=True)["chat embedded"]
    assert attributes(chat) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sluice",
        "gen_ai.output.type": "text",
        "gen_ai.request.model": "embedded",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.seed": 11,
        "gen_ai.request.presence_penalty": 1.0,
        "gen_ai.response.id": "cmpl-1",
        "gen_ai.response.model": "embedded",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": pytest.approx(0.031),
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 4,
        "sluice.tenant.id": "acme",
    }


def test_no_other_span_is_taken_for_a_generation() -> None:
    others = [span for name, span in spans().items() if name != "text_completion embedded"]
    assert not any(key.startswith("gen_ai.") for span in others for key in attributes(span))


def test_chunks_are_events_of_the_prefill() -> None:
    events = spans()["sluice.prefill"].events
    assert [event.name for event in events] == ["chunk", "chunk"]
    assert dict(events[1].attributes or {}) == {
        "sluice.step.number": 4,
        "sluice.chunk.start": 6,
        "sluice.chunk.tokens": 4,
    }
    assert events[1].timestamp == pytest.approx(BEGAN_NS + 20e6, abs=1e3)


def test_a_preemption_shows_where_it_happened() -> None:
    recomputed = [Chunk(3, 0, 10, 100.010), Chunk(9, 0, 12, 100.050)]
    timeline = a_timeline(preempted=[100.015, 100.040], resumed=[100.017, 100.050], chunks=recomputed)
    tree = spans(timelines=[timeline])
    assert [event.name for event in tree["sluice.prefill"].events] == ["chunk", "preempted", "resumed"]
    assert [event.name for event in tree["sluice.decode"].events] == ["first_token", "preempted", "chunk", "resumed"]


@pytest.mark.parametrize(
    ("reason", "event"),
    [(FinishReason.CANCELLED, "cancelled"), (FinishReason.EXPIRED, "expired"), (FinishReason.PREEMPTED, "preempted")],
)
def test_a_span_of_a_cut_answer_says_so(reason: FinishReason, event: str) -> None:
    timeline = a_timeline()
    timeline.sequence.finish_reason = reason
    assert spans(timelines=[timeline], outcome=Outcome.DISCONNECTED)["sluice.decode"].events[-1].name == event
    early = a_timeline(sequence=timeline.sequence, first_token=None, prefilled=None)
    tree = spans(timelines=[early], outcome=Outcome.DISCONNECTED)
    assert tree["sluice.prefill"].events[-1].name == event and "sluice.decode" not in tree


def test_a_client_that_goes_away_is_no_error_of_ours() -> None:
    assert all(
        span.status.status_code is StatusCode.UNSET
        for span in made_of(a_record(outcome=Outcome.DISCONNECTED, settling=None, grant=a_grant()))
    )


def test_each_question_to_a_guardrail_is_a_span_and_fails_where_there_was_no_verdict() -> None:
    calls = [("prompt", GuardrailVerdict.FAILED), *[("answer", GuardrailVerdict.ALLOWED)] * 2 * MAX_GUARDRAIL_CALLS]
    record = a_record()
    record.guardrail_calls = [GuardrailCall(stage, 100.001, 100.002, verdict) for stage, verdict in calls]
    asked = [span for span in made_of(record) if span.name == "sluice.guardrail"]
    assert len(asked) == MAX_GUARDRAIL_CALLS
    assert attributes(asked[0]) == {"sluice.guardrail.stage": "prompt", "sluice.guardrail.verdict": "failed"}
    assert [span.status.status_code for span in asked[:2]] == [StatusCode.ERROR, StatusCode.UNSET]
    assert {span.kind for span in asked} == {SpanKind.CLIENT}


NOT_RUN: dict[str, Any] = {"timelines": [], "reserved": None, "settling": None, "grant": None}


def test_a_refusal_is_where_it_happened_with_its_code_and_is_no_error_of_the_server() -> None:
    refused = {"status": 429, "outcome": Outcome.REFUSED, "error": RateLimited("no")}
    tree = spans(None, **NOT_RUN | refused)
    assert tree.keys() == {"POST /v1/completions", "sluice.auth", "sluice.quota.reserve"}
    root, reserve = tree["POST /v1/completions"], tree["sluice.quota.reserve"]
    for span in (root, reserve):
        assert attributes(span)["sluice.refusal.code"] == "rate_limit_exceeded"
        assert span.status.status_code is StatusCode.UNSET
    assert reserve.end_time == root.end_time
    assert attributes(root)["gen_ai.request.model"] == "embedded"


def test_a_full_queue_is_an_error_of_the_queue() -> None:
    overloaded = {"timelines": [], "status": 503, "outcome": Outcome.REFUSED, "error": Overloaded("full")}
    tree = spans(**overloaded)
    assert "text_completion embedded" not in tree
    for name in ("POST /v1/completions", "sluice.queue"):
        assert tree[name].status.status_code is StatusCode.ERROR
        assert attributes(tree[name])["error.type"] == "server_is_overloaded"
        assert attributes(tree[name])["sluice.refusal.code"] == "server_is_overloaded"
    assert tree["sluice.quota.reserve"].status.status_code is StatusCode.UNSET


def test_a_failure_after_the_first_byte_is_an_error_of_the_generation() -> None:
    failed = {
        "outcome": Outcome.FAILED,
        "error": InternalError("!"),
        "settling": None,
        "timelines": [a_timeline(ended=None)],
    }
    tree = spans(**failed)
    chat = tree["text_completion embedded"]
    assert chat.status.status_code is tree["POST /v1/completions"].status.status_code is StatusCode.ERROR
    assert attributes(chat)["error.type"] == "internal_error"
    assert "sluice.refusal.code" not in attributes(chat)
    assert chat.end_time == tree["POST /v1/completions"].end_time


def test_a_request_expired_in_the_queue_has_no_generation_span() -> None:
    timeline = a_timeline(admitted=None, first_token=None, prefilled=None, chunks=[], ended=100.05)
    timeline.sequence.finish_reason = FinishReason.EXPIRED
    tree = spans(timelines=[timeline], outcome=Outcome.EXPIRED, status=504)
    assert "text_completion embedded" not in tree
    assert [event.name for event in tree["sluice.queue"].events] == ["expired"]
    assert tree["sluice.queue"].status.status_code is StatusCode.ERROR


def test_a_key_that_is_not_known_is_refused_by_auth() -> None:
    record: dict[str, Any] = {"authenticated": None, "body_read": None, "reserving": None, "tenant": None}
    refused = {"status": 401, "outcome": Outcome.INVALID, "error": InvalidApiKey("?")}
    tree = spans(None, **NOT_RUN | record | refused)
    assert tree.keys() == {"POST /v1/completions", "sluice.auth"}
    assert attributes(tree["sluice.auth"])["sluice.refusal.code"] == "invalid_api_key"


def test_a_store_that_fails_is_an_error_of_its_call() -> None:
    calls = [StoreCall("reserve", 100.0031, 100.0039, "StoreUnavailable")]
    call = spans(store_calls=calls)["EVALSHA reserve"]
    assert call.status.status_code is StatusCode.ERROR
    assert attributes(call) == {
        "db.system.name": "redis",
        "db.operation.name": "EVALSHA",
        "db.stored_procedure.name": "reserve",
        "error.type": "StoreUnavailable",
    }


def test_other_calls_of_the_store_are_the_requests_own() -> None:
    calls = [*CALLS, StoreCall("extend", 100.05, 100.051, None), StoreCall("slice", 100.05, 100.051, None)]
    tree = spans(store_calls=calls)
    assert parent(tree["EVALSHA extend"]) == id_of(tree["POST /v1/completions"])
    assert "EVALSHA slice" not in tree


def test_a_request_of_many_prompts_is_bounded() -> None:
    chunks = [Chunk(step, step, 1, 100.010) for step in range(1000)]
    timelines = [a_timeline(sequence=a_sequence(), chunks=chunks) for _ in range(128)]
    made = made_of(a_record(timelines=timelines, grant=a_grant()))
    prefills = [span for span in made if span.name == "sluice.prefill"]
    assert [attributes(span)["sluice.sequence.index"] for span in prefills] == list(range(MAX_SEQUENCES))
    assert all(len(span.events) == MIN_EVENTS for span in prefills)
    assert attributes(prefills[0])["sluice.prefill.chunks"] == 1000
    (alone,) = [span for span in made_of(a_record(timelines=timelines[:1])) if span.name == "sluice.prefill"]
    assert len(alone.events) == MAX_EVENTS
    assert attributes(made[[span.name for span in made].index("text_completion embedded")])["sluice.sequences"] == 128


def test_clients_cannot_make_new_names_of_spans() -> None:
    asked = {"method": "GET", "operation": None, "timelines": [], "reserving": None, "reserved": None, "grant": None}
    root = spans(None, path="/v1/models/\n" + "x" * 5000, **asked)["GET /v1/models/{id}"]
    assert attributes(root)["http.route"] == "/v1/models/{id}"
    assert len(attributes(root)["url.path"]) == MAX_TEXT_CHARS
    stranger = spans(None, path="/" + "x" * 5000, error=RouteNotFound(""), **asked)["GET {unknown}"]
    assert attributes(stranger)["http.route"] == "{unknown}"
    assert len(attributes(stranger)["url.path"]) == MAX_TEXT_CHARS


def test_no_id_of_a_route_of_the_tenants_port_is_in_its_name() -> None:
    frontend = cast("Frontend", SimpleNamespace(cors=None))
    app = make_app(frontend, make_probes(frontend), has_metrics=True)
    assert isinstance(app, Shortcut) and isinstance(app._app, Starlette)
    for route in [route for route in app._app.routes if isinstance(route, Route)]:
        path = re.sub(r"\{\w+\}", "resp_0123", route.path_format)
        assert route_of(a_record(path=path)) == path.replace("resp_0123", "{id}")


@given(st.text(max_size=400), st.text(max_size=400), st.text(max_size=600))
def test_all_texts_of_clients_can_be_encoded_and_are_bounded(model: str, path: str, state: str) -> None:
    context = TraceContext(1, 2, 3, client_samples=True, state=state)
    record = a_record(model=model + "\ud800" * 3, path="/" + path, trace=context, request_id="r" * 128, grant=a_grant())
    encoded = encode_spans(made_of(record))
    assert len(encoded.SerializeToString()) < 16_000
    for span in encoded.resource_spans[0].scope_spans[0].spans:
        assert len(span.name) <= MAX_TEXT_CHARS and len(span.trace_state) <= 1200


def state_of(header: str) -> TraceState:
    context = made_of(a_record(trace=TraceContext(1, 2, state=header)))[0].get_span_context()
    assert context
    return context.trace_state


@pytest.mark.parametrize("header", ["a", "a=1,a=2", "A=1", "a=\n", "a=é", "=", ",".join(f"k{n}=1" for n in range(33))])
def test_a_tracestate_that_is_not_valid_is_left_out_and_not_logged(
    header: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not state_of(header)
    assert not caplog.records


def test_a_tracestate_keeps_its_order() -> None:
    assert list(state_of("b=2 , a@v=1,,").items()) == [("b", "2"), ("a@v", "1")]


@st.composite
def records(draw: st.DrawFn) -> tuple[RequestRecord, float | None]:
    """Requests of any length that ended at any point."""
    moments = iter(sorted(draw(st.lists(st.floats(0, 1e5), min_size=12, max_size=12))))
    names = ["began", "authenticated", "body_read", "reserving", "reserved"]
    values: dict[str, Any] = {name: next(moments) for name in names}
    queued, admitted, prefilled, preempted, resumed, over, settling = moments
    cut = draw(st.integers(0, 8))
    values |= dict.fromkeys(names[cut + 1 :])
    settled = None
    timelines = []
    if cut > 4:
        timeline = a_timeline(queued=queued, admitted=None, first_token=None, prefilled=None, chunks=[], ended=over)
        if cut > 5:
            timeline.admitted, timeline.chunks = admitted, [Chunk(1, 0, 10, admitted)]
        if cut > 6:
            timeline.first_token, timeline.preempted, timeline.resumed = prefilled, [preempted], [resumed]
        timelines = [timeline] * draw(st.integers(1, 3))
        settled = settling + draw(st.floats(0, 10))
    values |= {"timelines": timelines, "settling": settling if cut > 7 else None, "ended": settling}
    values["grant"] = a_grant() if cut > 3 else None
    values["outcome"] = draw(st.sampled_from(list(Outcome)))
    values["error"] = draw(st.sampled_from([None, RateLimited("no"), InternalError("no")]))
    return a_record(**values, first_byte=None), settled


@given(records())
def test_every_trace_is_one_tree_nested_in_time(case: tuple[RequestRecord, float | None]) -> None:
    record, settled = case
    made = made_of(record, settled)
    by_id = {id_of(span): span for span in made}
    assert len(by_id) == len(made) and 0 not in by_id
    assert [id_of(span) for span in made if span.parent is None] == [record.trace.span_id]
    for span in made:
        assert span.start_time is not None and span.end_time is not None and span.start_time <= span.end_time
        context = span.get_span_context()
        assert context and context.trace_id == record.trace.trace_id
        if span.parent is None:
            continue
        above = by_id[span.parent.span_id]
        assert above.start_time is not None and above.end_time is not None
        assert above.start_time <= span.start_time
        if span.name != "sluice.quota.settle":
            assert span.end_time <= above.end_time
        assert all(span.start_time <= event.timestamp <= span.end_time for event in span.events)


def test_a_generation_says_what_its_answers_had_to_match_and_how_long_compiling_was_waited_for() -> None:
    grammar = Grammar(GrammarKind.REGEX, "[a-z]+", "acme")
    found = of_generation(a_record(grammar=grammar, grammar_wait=0.004))
    assert (found["sluice.grammar.kind"], found["sluice.grammar.name"]) == ("regex", grammar.name)
    assert found["sluice.grammar.wait_ms"] == 4.0 and len(grammar.name) == 16
    assert "sluice.grammar.kind" not in of_generation(a_record())
