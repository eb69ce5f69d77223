"""What is written here is what the SDK writes: a collector can tell no difference."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common import trace_encoder
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import Link, SpanContext, SpanKind

from gateway.telemetry.request_record import RequestRecord, TraceContext
from gateway.telemetry.tracing.sampler import SamplingReason
from gateway.telemetry.tracing.span_encoding import MAX_KEPT, EncodedSpans, encode_spans
from gateway.telemetry.tracing.span_tree import SAMPLED, FinishedSpan, SpanEvent, SpanTree
from gateway.telemetry.tracing.spans import spans_of
from gateway.tenants.effective_policy import KVShape
from tests.gateway.telemetry.records import a_grant, a_record
from tests.gateway.telemetry.tracing.test_spans import records

RESOURCE = Resource({"service.name": "sluice", "answer": 42}, schema_url="https://example.com/schema")

ids = st.integers(1, 2**64 - 1)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=300)
values = st.one_of(
    texts, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.lists(texts, max_size=3)
)
attributes = st.dictionaries(texts, values, max_size=5)
links = ids.map(lambda number: Link(SpanContext(number << 64 | 7, number, False, SAMPLED)))


def assert_as_the_sdk_writes(spans: list[FinishedSpan]) -> None:
    assert encode_spans(spans).SerializeToString() == trace_encoder.encode_spans(spans).SerializeToString()
    assert EncodedSpans(spans).SerializePartialToString() == trace_encoder.encode_spans(spans).SerializeToString()


@given(records(), st.sampled_from(SamplingReason))
def test_every_trace_is_encoded_as_by_the_sdk(case: tuple[RequestRecord, float | None], reason: SamplingReason) -> None:
    record, settled = case
    assert_as_the_sdk_writes(spans_of(record, RESOURCE, KVShape(16, 1000), reason, settled))


@given(st.lists(st.fixed_dictionaries({"attributes": attributes, "failed": st.booleans()}), max_size=3), st.data())
def test_whatever_a_span_has_is_encoded_as_by_the_sdk(spans: list[dict[str, Any]], data: st.DataObject) -> None:
    tree = SpanTree(RESOURCE, data.draw(ids) << 64, data.draw(st.sampled_from(["", "a=1,b=2", "no state"])))
    for span in spans:
        tree.add(
            data.draw(texts),
            data.draw(ids),
            data.draw(ids),
            data.draw(st.none() | ids),
            span["attributes"],
            kind=data.draw(st.sampled_from(SpanKind)),
            failed=span["failed"],
            events=[SpanEvent(at, "event", data.draw(st.none() | attributes)) for at in data.draw(st.lists(ids))],
            links=data.draw(st.lists(links, max_size=3)),
        )
    assert_as_the_sdk_writes(tree.spans)


def test_the_span_of_a_clients_is_a_remote_parent_to_a_collector() -> None:
    record = a_record(trace=TraceContext(7, 8, parent_id=9, client_samples=True, state="a=1"), grant=a_grant())
    spans = spans_of(record, RESOURCE, KVShape(16, 1000), SamplingReason.CLIENT, None)
    assert_as_the_sdk_writes([*spans[1:], spans[0]])


def test_numbers_that_are_equal_keep_their_kinds() -> None:
    tree = SpanTree(RESOURCE, 7)
    for value in (1, True, 1.0, 0.0, -0.0, 0, False):
        tree.add("span", 1, 2, None, {"value": value})
    assert_as_the_sdk_writes(tree.spans)


def test_more_values_than_are_kept_are_encoded_as_well() -> None:
    tree = SpanTree(RESOURCE, 7)
    tree.add("span", 1, 2, None, {})
    tree.add("span", 1, 2, None, {str(number): number for number in range(MAX_KEPT + 10)})
    assert_as_the_sdk_writes(tree.spans)
