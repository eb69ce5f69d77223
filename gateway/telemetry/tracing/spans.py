"""Makes the trace of one request from its record when it has ended:

    POST /v1/chat/completions           SERVER
    ├── sluice.auth
    ├── sluice.guardrail                    CLIENT, for each of the first 16 questions to a guardrail
    ├── sluice.quota.reserve
    │   └── EVALSHA reserve             CLIENT
    ├── sluice.queue
    ├── chat {model}
    │   ├── sluice.prefill              an event for each chunk
    │   └── sluice.decode               first_token, preempted, resumed, cancelled
    └── sluice.quota.settle             the answer does not wait for it, so it may end last
        └── EVALSHA settle              CLIENT

It contains no prompt, output, stop string or message of an error, since clients wrote those or may be quoted in them.
"""

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanKind

from backend.scheduler.sequence import FinishReason
from gateway.telemetry.request_record import Chunk, GuardrailVerdict, RequestRecord, SequenceTimeline, StoreCall
from gateway.telemetry.tracing import attributes
from gateway.telemetry.tracing.http_attributes import route_of
from gateway.telemetry.tracing.sampler import SamplingReason
from gateway.telemetry.tracing.span_tree import MAX_EVENTS, Attributes, SpanTree, bounded_text
from gateway.tenants.effective_policy import KVShape
from quotas.store.scripts import Script

MAX_GUARDRAIL_CALLS = 16  # of one request, with a span
MAX_SEQUENCES = 16  # of one request, with spans of prefill and decode
MIN_EVENTS = 4  # of a kind for each sequence; a trace has about as many in all as one sequence may have
_ASKED_BESIDE = frozenset(
    {Script.EXTEND, Script.STATES}
)  # outside of the phases in which quota is reserved and settled
_CUT_SHORT = {
    FinishReason.CANCELLED: "cancelled",
    FinishReason.EXPIRED: "expired",
    FinishReason.PREEMPTED: "preempted",
}


def spans_of(
    record: RequestRecord, resource: Resource, kv: KVShape, reason: SamplingReason, settled: float | None
) -> list[ReadableSpan]:
    """Returns the spans of a request that has ended; its quota was settled at the moment `settled`, if it had any."""
    return RequestTrace(record, resource, kv).spans(reason, settled)


class RequestTrace:
    """Makes the spans of one request; the attributes of each come from `attributes`."""

    def __init__(self, record: RequestRecord, resource: Resource, kv: KVShape) -> None:
        self._record = record
        self._kv = kv
        self._tree = SpanTree(resource, record.trace.trace_id, record.trace.state)
        self._root = record.trace.span_id
        self._ns = record.unix_ns
        self._began = record.began
        self._ended = record.began if record.ended is None else record.ended
        self._calls = record.engine.store_calls  # not yet in a span
        self._served = [timeline for timeline in record.engine.timelines if timeline.admitted is not None]
        self._max_events = max(MIN_EVENTS, MAX_EVENTS // max(1, len(self._served)))

    def spans(self, reason: SamplingReason, settled: float | None) -> list[ReadableSpan]:
        self._add_root(reason)
        self._add_auth()
        self._add_guardrail()
        self._add_reserve()
        self._add_queue()
        self._add_generation()
        self._add_settle(settled)
        self._calls = [call for call in self._calls if call.name in _ASKED_BESIDE]
        self._add_store_calls(self._root, self._began, self._ended)
        return self._tree.spans

    def _add_root(self, reason: SamplingReason) -> None:
        record, parent = self._record, self._record.trace.parent_id
        body_read = [] if record.body_read is None else [self._event(record.body_read, "body_read")]
        self._tree.add(
            f"{record.method} {route_of(record)}",
            self._ns(self._began),
            self._ns(self._ended),
            parent,
            {**attributes.of_request(record, self._kv, self._ended), "sluice.sampled.because": reason.value},
            is_parent_remote=parent is not None,
            kind=SpanKind.SERVER,
            failed=record.has_failed,
            events=body_read,
            span_id=record.trace.span_id,
        )

    def _add_auth(self) -> None:
        record = self._record
        if record.authenticated is not None:
            self._add("sluice.auth", self._began, record.authenticated, {})
        elif record.error is not None:
            self._add("sluice.auth", self._began, self._ended, attributes.of_failure(record))

    def _add_guardrail(self) -> None:
        for call in self._record.guardrail_calls[:MAX_GUARDRAIL_CALLS]:
            began, ended, values = self._ns(call.began), self._ns(call.ended), attributes.of_guardrail_call(call)
            failed = call.verdict is GuardrailVerdict.FAILED
            self._tree.add("sluice.guardrail", began, ended, self._root, values, kind=SpanKind.CLIENT, failed=failed)

    def _add_reserve(self) -> None:
        record = self._record
        if record.engine.reserving is None:
            return
        if record.engine.reserved is not None:
            span = self._add("sluice.quota.reserve", record.engine.reserving, record.engine.reserved, {})
            self._add_store_calls(span, record.engine.reserving, record.engine.reserved)
        else:
            span = self._add_last("sluice.quota.reserve", record.engine.reserving, self._ended, {})
            self._add_store_calls(span, record.engine.reserving, self._ended)

    def _add_queue(self) -> None:
        record, queued = self._record, self._record.engine.queued
        if queued is None:
            if record.engine.reserved is not None and record.error is not None:  # the queue refused it
                self._add_last("sluice.queue", record.engine.reserved, self._ended, {})
            return
        admitted = record.engine.admitted
        left = max(one.ended or self._ended for one in record.engine.timelines) if admitted is None else admitted
        values = attributes.of_queue(record, self._kv, left - queued)
        if self._served:
            self._add("sluice.queue", queued, left, values)
        else:
            self._add_last("sluice.queue", queued, left, values, self._cut_short(record.engine.timelines[0], left))

    def _add_generation(self) -> None:
        if not self._served:
            return
        record = self._record
        began = min(timeline.admitted for timeline in self._served if timeline.admitted is not None)
        name = f"{record.operation} {bounded_text(record.model or '')}"
        span = self._add_last(name, began, self._generated, attributes.of_generation(record))
        several = len(record.engine.timelines) > 1
        for timeline in self._served[:MAX_SEQUENCES]:
            self._add_sequence(
                span, timeline, {"sluice.sequence.index": record.engine.timelines.index(timeline)} if several else {}
            )

    def _add_sequence(self, parent: int, timeline: SequenceTimeline, which: Attributes) -> None:
        assert timeline.admitted is not None
        first, ended = timeline.first_token, timeline.ended or self._ended
        events = self._events(timeline, ended)
        until = ended if first is None else first
        before = [event for event in events if first is None or event.timestamp < self._ns(first)]
        self._add(
            "sluice.prefill",
            timeline.admitted,
            until,
            {**which, **attributes.of_prefill(timeline)},
            parent,
            before,
        )
        if first is not None:
            rest = [self._event(first, "first_token"), *events[len(before) :]]
            self._add("sluice.decode", first, ended, {**which, **attributes.of_decode(timeline)}, parent, rest)

    def _events(self, timeline: SequenceTimeline, ended: float) -> list[Event]:
        """Returns the events of a sequence in the order of time."""
        most = self._max_events
        events = [self._chunk(chunk) for chunk in timeline.chunks[:most]]
        events += [self._event(at, "preempted") for at in timeline.preempted[:most]]
        events += [self._event(at, "resumed") for at in timeline.resumed[:most]]
        if timeline.preempted:
            events.sort(key=lambda event: event.timestamp)
        return events + self._cut_short(timeline, ended)

    def _cut_short(self, timeline: SequenceTimeline, ended: float) -> list[Event]:
        """The event that cut the sequence short, if one did."""
        reason = timeline.sequence.finish_reason
        return [self._event(ended, _CUT_SHORT[reason])] if reason in _CUT_SHORT else []

    def _add_settle(self, settled: float | None) -> None:
        if self._record.engine.grant is None:
            return
        began = self._generated if self._record.engine.settling is None else self._record.engine.settling
        ended = began if settled is None else settled
        span = self._add("sluice.quota.settle", began, ended, {})
        self._add_store_calls(span, began, ended)

    def _add_store_calls(self, parent: int, began: float, ended: float) -> None:
        if not self._calls:
            return
        inside = [call for call in self._calls if began <= call.began and call.ended <= ended]
        self._calls = [call for call in self._calls if call not in inside]
        for call in inside:
            self._add_store_call(parent, call)

    def _add_store_call(self, parent: int, call: StoreCall) -> None:
        self._tree.add(
            f"EVALSHA {call.name}",
            self._ns(call.began),
            self._ns(call.ended),
            parent,
            attributes.of_store_call(call),
            kind=SpanKind.CLIENT,
            failed=call.error is not None,
        )

    @property
    def _generated(self) -> float:
        """The moment of the last token's delivery, or of the end of the wait for it."""
        record = self._record
        ended = max((timeline.ended or self._ended for timeline in record.engine.timelines), default=self._ended)
        return ended if record.engine.settling is None else max(ended, record.engine.settling)

    def _add_last(
        self, name: str, began: float, ended: float, values: Attributes, events: list[Event] | None = None
    ) -> int:
        """Add the span of the request's last phase, with its failure, if any."""
        failure = attributes.of_failure(self._record)
        return self._add(name, began, ended, {**values, **failure}, None, events, failed=self._record.has_failed)

    def _add(
        self,
        name: str,
        began: float,
        ended: float,
        values: Attributes,
        parent: int | None = None,
        events: list[Event] | None = None,
        *,
        failed: bool = False,
    ) -> int:
        return self._tree.add(
            name,
            self._ns(began),
            self._ns(ended),
            self._root if parent is None else parent,
            values,
            failed=failed,
            events=events or (),
        )

    def _chunk(self, chunk: Chunk) -> Event:
        return Event("chunk", attributes.of_chunk(chunk), self._ns(chunk.planned))

    def _event(self, at: float, name: str) -> Event:
        return Event(name, timestamp=self._ns(at))
