"""Makes spans of one trace with given times; every string in them is bounded."""

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


@dataclass(slots=True)
class SpanEvent:
    """An event of a span at a time in Unix nanoseconds."""

    at: int
    name: str
    attributes: Mapping[str, AttributeValue] | None = None


class FinishedSpan(ReadableSpan):
    """A span as it is encoded. What only the SDK's own encoder asks for is made when it asks."""

    __slots__ = (
        "attributes", "end_time", "happened", "is_failed", "is_parent_remote", "kind", "links", "name", "parent_id",
        "resource", "span_id", "start_time", "trace_id", "trace_state",
    )  # fmt: skip
    instrumentation_scope = SCOPE
    dropped_attributes = dropped_events = dropped_links = 0

    def __init__(
        self,
        name: str,
        trace_id: int,
        span_id: int,
        state: TraceState | None,
        parent_id: int | None,
        is_parent_remote: bool,
        times: tuple[int, int],
        attributes: dict[str, AttributeValue],
        happened: Sequence[SpanEvent],
        links: Sequence[Link],
        kind: SpanKind,
        is_failed: bool,
        resource: Resource,
    ) -> None:
        self.trace_id, self.span_id, self.trace_state = trace_id, span_id, state
        self.parent_id, self.is_parent_remote = parent_id, is_parent_remote
        self.happened, self.is_failed = happened, is_failed
        self.name, self.kind, self.resource = name, kind, resource  # type: ignore[misc] # properties of its base
        self.start_time, self.end_time = times  # type: ignore[misc]
        self.attributes, self.links = attributes, links  # type: ignore[misc]

    @property
    def context(self) -> SpanContext:
        return SpanContext(self.trace_id, self.span_id, False, SAMPLED, self.trace_state)

    def get_span_context(self) -> SpanContext:
        return self.context

    @property
    def parent(self) -> SpanContext | None:
        if self.parent_id is None:
            return None
        return SpanContext(self.trace_id, self.parent_id, self.is_parent_remote, SAMPLED, self.trace_state)

    @property
    def events(self) -> Sequence[Event]:
        return [Event(event.name, event.attributes, event.at) for event in self.happened]

    @property
    def status(self) -> Status:
        return FAILED if self.is_failed else UNSET


class SpanTree:
    """Collects the spans of one trace; times are in Unix nanoseconds."""

    def __init__(self, resource: Resource, trace_id: int, state: str = "") -> None:
        self.spans: list[FinishedSpan] = []
        self._resource = resource
        self._trace_id = trace_id
        self._state = trace_state(state) if state else None

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
        events: Sequence[SpanEvent] = (),
        links: Sequence[Link] = (),
        span_id: int = 0,
    ) -> int:
        """Add a span below `parent` and return its id. Attributes that are None are left out; `span_id` 0 is for a new
        one.
        """
        span_id = span_id or getrandbits(64) or 1
        bounded: dict[str, AttributeValue] = {
            key: bounded_text(value) if isinstance(value, str) else value
            for key, value in attributes.items()
            if value is not None
        }
        self.spans.append(
            FinishedSpan(
                name[:MAX_TEXT],
                self._trace_id,
                span_id,
                self._state,
                parent,
                is_parent_remote,
                (began, max(began, ended)),
                bounded,
                events[:MAX_EVENTS],
                links,
                kind,
                failed,
                self._resource,
            )
        )
        return span_id


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
    if len(value) <= MAX_TEXT and value.isascii():
        return value
    return value[:MAX_TEXT].encode("utf-8", "replace").decode()
