"""Makes spans of one trace with given times, as the SDK's exporters take them; every string in them is bounded."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import getrandbits

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from gateway.telemetry.otlp import SCOPE

MAX_TEXT = 256  # characters of an attribute or a name
MAX_EVENTS = 64  # of one span
MAX_STATE_MEMBERS = 32  # of tracestate, as the specification has it

SAMPLED = TraceFlags(TraceFlags.SAMPLED)
FAILED = Status(StatusCode.ERROR)
UNSET = Status(StatusCode.UNSET)

_STATE_MEMBER = re.compile(
    r"(?P<key>[a-z][_0-9a-z*/-]{0,255}|[a-z0-9][_0-9a-z*/-]{0,240}@[a-z][_0-9a-z*/-]{0,13})"
    r"=(?P<value>[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])"
)

Attributes = Mapping[str, AttributeValue | None]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """An event of a span at a time in Unix nanoseconds."""

    at: int
    name: str
    attributes: Mapping[str, AttributeValue] | None = None


class SpanTree:
    """Collects the spans of one trace; times are in Unix nanoseconds."""

    def __init__(self, resource: Resource, trace_id: int, state: str = "") -> None:
        self.spans: list[ReadableSpan] = []
        self._resource = resource
        self._trace_id = trace_id
        self._state = trace_state(state) if state else None

    def add(
        self,
        name: str,
        began: int,
        ended: int,
        parent: SpanContext | None,
        attributes: Attributes,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        failed: bool = False,
        events: Sequence[SpanEvent] = (),
        links: Sequence[Link] = (),
        span_id: int = 0,
    ) -> SpanContext:
        """Add a span and return its context. Attributes that are None are left out; `span_id` 0 is for a new one."""
        context = self.context(span_id or getrandbits(64) or 1)
        self.spans.append(
            ReadableSpan(
                name[:MAX_TEXT],
                context,
                parent,
                self._resource,
                {key: _bounded(value) for key, value in attributes.items() if value is not None},
                [Event(event.name, event.attributes, event.at) for event in events[:MAX_EVENTS]],
                links,
                kind,
                status=FAILED if failed else UNSET,
                start_time=began,
                end_time=max(began, ended),
                instrumentation_scope=SCOPE,
            )
        )
        return context

    def context(self, span_id: int, is_remote: bool = False) -> SpanContext:
        """Returns the context of a span of this trace, ours or a client's."""
        return SpanContext(self._trace_id, span_id, is_remote, SAMPLED, self._state)


def trace_state(header: str) -> TraceState | None:
    """Returns the members of a tracestate header; None if one is not valid, which is never logged."""
    members: dict[str, str] = {}
    for member in filter(None, (part.strip(" \t") for part in header.split(","))):
        match = _STATE_MEMBER.fullmatch(member)
        if match is None or match["key"] in members or len(members) == MAX_STATE_MEMBERS:
            return None
        members[match["key"]] = match["value"]
    return TraceState(list(members.items()))


def bounded_text(value: str) -> str:
    """Returns at most `MAX_TEXT` characters that any encoding can hold: a lone surrogate becomes "?"."""
    return value[:MAX_TEXT].encode("utf-8", "replace").decode()


def _bounded(value: AttributeValue) -> AttributeValue:
    return bounded_text(value) if isinstance(value, str) else value
