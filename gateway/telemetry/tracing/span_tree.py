"""Makes the SDK's spans of one trace, with given ids and times; every string in them is bounded."""

import logging
from collections.abc import Mapping, Sequence
from random import getrandbits

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from gateway.telemetry.otlp import SCOPE

MAX_TEXT_CHARS = 256  # of an attribute or a name
MAX_EVENTS = 64  # of one span

SAMPLED = TraceFlags(TraceFlags.SAMPLED)
FAILED = Status(StatusCode.ERROR)
UNSET = Status(StatusCode.UNSET)

Attributes = Mapping[str, AttributeValue | None]

logging.getLogger("opentelemetry.trace.span").disabled = True  # it would log clients' tracestate


class SpanTree:
    """Collects the spans of one trace; times are in Unix nanoseconds."""

    def __init__(self, resource: Resource, trace_id: int, state: str = "") -> None:
        """`state` is a tracestate header, dropped whole if a member is not valid."""
        self.spans: list[ReadableSpan] = []
        self._resource = resource
        self._trace_id = trace_id
        self._state = TraceState.from_header([state]) if state else None

    def add(
        self,
        name: str,
        began: int,
        ended: int,
        parent: int | None,
        attributes: Attributes,
        *,
        is_parent_remote: bool = False,
        kind: SpanKind = SpanKind.INTERNAL,
        failed: bool = False,
        events: Sequence[Event] = (),
        links: Sequence[Link] = (),
        span_id: int = 0,
    ) -> int:
        """Add a span below `parent` and return its id. Attributes that are None are left out; `span_id` 0 is for a new
        one.
        """
        span_id = span_id or getrandbits(64) or 1
        span = ReadableSpan(
            name[:MAX_TEXT_CHARS],
            self._context(span_id, False),
            None if parent is None else self._context(parent, is_parent_remote),
            self._resource,
            {
                key: bounded_text(value) if isinstance(value, str) else value
                for key, value in attributes.items()
                if value is not None
            },
            events[:MAX_EVENTS],
            links,
            kind,
            status=FAILED if failed else UNSET,
            start_time=began,
            end_time=max(began, ended),
            instrumentation_scope=SCOPE,
        )
        self.spans.append(span)
        return span_id

    def _context(self, span_id: int, is_remote: bool) -> SpanContext:
        return SpanContext(self._trace_id, span_id, is_remote, SAMPLED, self._state)


def bounded_text(value: str) -> str:
    """At most `MAX_TEXT_CHARS` characters, encodable: a lone surrogate becomes "?"."""
    if len(value) <= MAX_TEXT_CHARS and value.isascii():
        return value
    return value[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode()
