"""Encodes spans for a collector: the bytes of their protobuf messages are written here, one after the other.

The SDK makes a Python object for every attribute of every span first, which takes ten times as long
(https://protobuf.dev/programming-guides/encoding/; the numbers of fields are those of opentelemetry/proto/trace/v1).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from struct import Struct

from opentelemetry.exporter.otlp.proto.common import trace_encoder
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_exporter
from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_exporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import Link, SpanKind
from opentelemetry.util.types import AttributeValue

from gateway.telemetry.tracing.span_tree import FinishedSpan, SpanEvent

MAX_KEPT = 4096  # encoded attributes: most have few values

_INTERNAL = SpanKind.INTERNAL
_KINDS = {kind: bytes([0x30, kind.value + 1]) for kind in SpanKind}
_KIND_INTERNAL = _KINDS[_INTERNAL]
_UNSET, _FAILED = b"\x7a\x00", b"\x7a\x02\x18\x02"
_LOCAL, _REMOTE = b"\x00\x01\x00\x00", b"\x00\x03\x00\x00"  # flags: it is known whether a parent is remote
_TIME, _TIMES = Struct("<BQ"), Struct("<BQBQ")  # after the tags of each
_DOUBLE = Struct("<d")
_64_BITS = 2**64 - 1


def encode_spans(spans: Sequence[FinishedSpan]) -> ExportTraceServiceRequest:
    """Returns what the SDK's function of this name does, for spans of one resource and scope, as all of ours are."""
    request: ExportTraceServiceRequest = ExportTraceServiceRequest.FromString(
        EncodedSpans(spans).SerializePartialToString()
    )
    return request


class EncodedSpans:
    """A request that is only ever sent: as bytes, which need not become a message first."""

    def __init__(self, spans: Sequence[FinishedSpan]) -> None:
        self._spans = spans

    def SerializePartialToString(self) -> bytes:  # noqa: N802 - protobuf's name, by which the exporter over HTTP asks
        if not self._spans:
            return b""
        resource, scope, resource_url, scope_url = _origin(self._spans[0].resource)
        spans = [_field(b"\x12", _span(span)) for span in self._spans]
        return _field(b"\x0a", resource + _field(b"\x12", b"".join([scope, *spans, scope_url])) + resource_url)


@lru_cache(4)
def _origin(resource: Resource) -> tuple[bytes, bytes, bytes, bytes]:
    """Returns the fields of a resource, of our scope, and of the URLs of their schemas, as the SDK encodes them."""
    span = FinishedSpan("", 1, 1, None, None, False, (0, 0), {}, (), (), _INTERNAL, False, resource)
    of_resource = trace_encoder.encode_spans([span]).resource_spans[0]
    of_scope = of_resource.scope_spans[0]
    resource_field = _field(b"\x0a", of_resource.resource.SerializeToString())
    scope_field = _field(b"\x0a", of_scope.scope.SerializeToString())
    return resource_field, scope_field, _text(b"\x1a", of_resource.schema_url), _text(b"\x1a", of_scope.schema_url)


def encode_for_exporters() -> None:
    """Let the SDK's exporters encode as here. One that does not look for `encode_spans` encodes as before."""
    vars(grpc_exporter)["encode_spans"] = encode_spans
    vars(http_exporter)["encode_spans"] = EncodedSpans


def _span(span: FinishedSpan) -> bytes:
    parent = span.parent_id
    parts = [
        _ids(span.trace_id, span.span_id),
        _text(b"\x1a", span.trace_state.to_header()) if span.trace_state else b"",
        b"" if parent is None else b"\x22\x08" + parent.to_bytes(8, "big"),
        _text(b"\x2a", span.name),
        _KIND_INTERNAL if span.kind is _INTERNAL else _KINDS[span.kind],
        _TIMES.pack(0x39, span.start_time, 0x41, span.end_time),
    ]
    if span.attributes:
        parts += _attributes(b"\x4a", span.attributes)
    if span.happened:
        parts += [_field(b"\x5a", _event(event)) for event in span.happened]
    if span.links:
        parts += [_field(b"\x6a", _link(link)) for link in span.links]
    parts += (_FAILED if span.is_failed else _UNSET, b"\x85\x01", _REMOTE if span.is_parent_remote else _LOCAL)
    return b"".join(parts)


def _event(event: SpanEvent) -> bytes:
    attributes = _attributes(b"\x1a", event.attributes) if event.attributes else ()
    return b"".join([_TIME.pack(0x09, event.at), _text(b"\x12", event.name), *attributes])


def _link(link: Link) -> bytes:
    return _ids(link.context.trace_id, link.context.span_id) + b"\x35" + _LOCAL


def _ids(trace_id: int, span_id: int) -> bytes:
    return b"\x0a\x10" + trace_id.to_bytes(16, "big") + b"\x12\x08" + span_id.to_bytes(8, "big")


def _attributes(tag: bytes, attributes: Mapping[str, AttributeValue]) -> list[bytes]:
    """Returns the fields of attributes. A measured time hardly ever comes again, and a list cannot be looked up."""
    return [
        _float_head(tag, key) + _DOUBLE.pack(value)
        if isinstance(value, float)
        else _attribute(tag, key, value)
        if isinstance(value, (str, int))
        else _new_attribute(tag, key, value)
        for key, value in attributes.items()
    ]


def _new_attribute(tag: bytes, key: str, value: AttributeValue) -> bytes:
    return _field(tag, _text(b"\x0a", key) + _field(b"\x12", _value(value)))


_attribute = lru_cache(MAX_KEPT, typed=True)(_new_attribute)  # 1 and True are one key of a dict


@lru_cache(MAX_KEPT)
def _float_head(tag: bytes, key: str) -> bytes:
    """Returns the field of an attribute that is a float, without the float."""
    return _new_attribute(tag, key, 0.0)[: -_DOUBLE.size]


def _value(value: AttributeValue) -> bytes:
    if isinstance(value, str):
        return _field(b"\x0a", value.encode())
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & _64_BITS)
    if isinstance(value, float):
        return b"\x21" + _DOUBLE.pack(value)
    return _field(b"\x2a", b"".join([_field(b"\x0a", _value(item)) for item in value or ()]))


@lru_cache(MAX_KEPT)
def _text(tag: bytes, text: str) -> bytes:
    return _field(tag, text.encode()) if text else b""  # an empty field is none


def _field(tag: bytes, content: bytes) -> bytes:
    """Returns a field of any length, after its tag."""
    length = len(content)
    return tag + (_SHORT[length] if length < len(_SHORT) else _varint(length)) + content


def _varint(number: int) -> bytes:
    """Returns a number of 64 bits, seven of them in a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_SHORT = [_varint(length) for length in range(512)]
