"""The trace of one request, made from its story when it has ended:

    POST /v1/chat/completions           SERVER
    ├── sluice.auth
    ├── sluice.quota.reserve
    │   └── EVALSHA reserve             CLIENT
    ├── sluice.queue
    ├── chat {model}
    │   ├── sluice.prefill              an event for each chunk
    │   └── sluice.decode               first_token, preempted, resumed, cancelled
    └── sluice.quota.settle             the answer does not wait for it, so it may end last
        └── EVALSHA settle              CLIENT

No prompt, no output, no stop string and no message of an error is in it: they are what clients wrote.
"""

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind

from backend.scheduler.sequence import FinishReason
from gateway.telemetry import semconv
from gateway.telemetry.request_record import Chunk, StoreCall, Story, Trail
from gateway.telemetry.tracing import attributes
from gateway.telemetry.tracing.sampler import Because
from gateway.telemetry.tracing.span_tree import MAX_EVENTS, Attributes, Moment, SpanTree, text
from gateway.tenants.effective_policy import KvShape
from quotas.store.scripts import Script

MAX_SEQUENCES = 16  # of one request, whose prefill and decode are shown
FEWEST_EVENTS = 4  # of a kind, that each of them may have; all together have about as many as one alone
_ASKED_BESIDE = frozenset({Script.EXTEND, Script.STATES})  # by requests, outside of the phases of their quota
ROUTES = frozenset(
    {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/v1/limits", "/tokenize",
        "/detokenize", "/startupz", "/livez", "/readyz", "/health", "/ping", "/version",
        "/metrics",
    }
)  # fmt: skip
UNKNOWN = "{unknown}"  # route of what no endpoint answers
_CUT_SHORT = {
    FinishReason.CANCELLED: semconv.EVENT_CANCELLED,
    FinishReason.EXPIRED: semconv.EVENT_EXPIRED,
    FinishReason.PREEMPTED: semconv.EVENT_PREEMPTED,
}


def spans_of(
    story: Story, resource: Resource, kv: KvShape, because: Because, settled: float | None
) -> list[ReadableSpan]:
    """The spans of a request that has ended; the store knew what it used at the moment `settled`, if it had to know."""
    return RequestTrace(story, resource, kv).spans(because, settled)


class RequestTrace:
    def __init__(self, story: Story, resource: Resource, kv: KvShape) -> None:
        self._story = story
        self._kv = kv
        self._tree = SpanTree(resource, story.trace.trace_id, story.trace.state)
        self._root = self._tree.context(story.trace.span_id)
        self._began = story.began
        self._ended = story.began if story.ended is None else story.ended
        self._calls = story.store_calls  # those that are not in a span yet
        self._served = [trail for trail in story.trails if trail.admitted is not None]
        self._max_moments = max(FEWEST_EVENTS, MAX_EVENTS // max(1, len(self._served)))

    def spans(self, because: Because, settled: float | None) -> list[ReadableSpan]:
        self._add_root(because)
        self._add_auth()
        self._add_reserve()
        self._add_queue()
        self._add_generation()
        self._add_settle(settled)
        self._calls = [call for call in self._calls if call.name in _ASKED_BESIDE]
        self._add_store_calls(self._root, self._began, self._ended)
        return self._tree.spans

    def _add_root(self, because: Because) -> None:
        story, parent = self._story, self._story.trace.parent_id
        route = _route(story.path)
        body_read = [] if story.body_read is None else [self._moment(story.body_read, semconv.EVENT_BODY_READ)]
        self._tree.add(
            f"{story.method} {route}",
            self._ns(self._began),
            self._ns(self._ended),
            None if parent is None else self._tree.context(parent, is_remote=True),
            {**attributes.of_request(story, route, self._kv, self._ended), semconv.SAMPLED_BECAUSE: because.value},
            kind=SpanKind.SERVER,
            failed=story.has_failed,
            moments=body_read,
            span_id=story.trace.span_id,
        )

    def _add_auth(self) -> None:
        story = self._story
        if story.authenticated is not None:
            self._add(semconv.SPAN_AUTH, self._began, story.authenticated, {})
        elif story.error is not None:
            self._add(semconv.SPAN_AUTH, self._began, self._ended, attributes.of_failure(story))

    def _add_reserve(self) -> None:
        story = self._story
        if story.reserving is None:
            return
        if story.reserved is not None:
            span = self._add(semconv.SPAN_RESERVE, story.reserving, story.reserved, {})
            self._add_store_calls(span, story.reserving, story.reserved)
        else:
            span = self._add_last(semconv.SPAN_RESERVE, story.reserving, self._ended, {})
            self._add_store_calls(span, story.reserving, self._ended)

    def _add_queue(self) -> None:
        story, queued = self._story, self._story.queued
        if queued is None:
            if story.reserved is not None and story.error is not None:  # it was not let in
                self._add_last(semconv.SPAN_QUEUE, story.reserved, self._ended, {})
            return
        admitted = story.admitted
        left = max(trail.ended or self._ended for trail in story.trails) if admitted is None else admitted
        values = attributes.of_queue(story, self._kv, left - queued)
        if self._served:
            self._add(semconv.SPAN_QUEUE, queued, left, values)
        else:
            self._add_last(semconv.SPAN_QUEUE, queued, left, values, self._cut_short(story.trails[0], left))

    def _add_generation(self) -> None:
        if not self._served:
            return
        story = self._story
        began = min(trail.admitted for trail in self._served if trail.admitted is not None)
        name = f"{story.operation} {text(story.model or '')}"
        span = self._add_last(name, began, self._generated, attributes.of_generation(story))
        several = len(story.trails) > 1
        for trail in self._served[:MAX_SEQUENCES]:
            self._add_sequence(span, trail, {semconv.SEQUENCE_INDEX: story.trails.index(trail)} if several else {})

    def _add_sequence(self, parent: SpanContext, trail: Trail, which: Attributes) -> None:
        assert trail.admitted is not None
        first, ended = trail.first_token, trail.ended or self._ended
        moments = self._moments(trail, ended)
        until = ended if first is None else first
        before = [moment for moment in moments if first is None or moment.at < self._ns(first)]
        self._add(
            semconv.SPAN_PREFILL,
            trail.admitted,
            until,
            {**which, **attributes.of_prefill(trail)},
            parent,
            before,
        )
        if first is not None:
            rest = [self._moment(first, semconv.EVENT_FIRST_TOKEN), *moments[len(before) :]]
            self._add(semconv.SPAN_DECODE, first, ended, {**which, **attributes.of_decode(trail)}, parent, rest)

    def _moments(self, trail: Trail, ended: float) -> list[Moment]:
        """What befell a sequence, in the order of time."""
        most = self._max_moments
        moments = [self._chunk(chunk) for chunk in trail.chunks[:most]]
        moments += [self._moment(at, semconv.EVENT_PREEMPTED) for at in trail.preempted[:most]]
        moments += [self._moment(at, semconv.EVENT_RESUMED) for at in trail.resumed[:most]]
        if trail.preempted:
            moments.sort(key=lambda moment: moment.at)
        return moments + self._cut_short(trail, ended)

    def _cut_short(self, trail: Trail, ended: float) -> list[Moment]:
        """Why it ended early, if it did."""
        reason = trail.sequence.finish_reason
        return [self._moment(ended, _CUT_SHORT[reason])] if reason in _CUT_SHORT else []

    def _add_settle(self, settled: float | None) -> None:
        if self._story.grant is None:
            return
        began = self._generated if self._story.settling is None else self._story.settling
        ended = began if settled is None else settled
        span = self._add(semconv.SPAN_SETTLE, began, ended, {})
        self._add_store_calls(span, began, ended)

    def _add_store_calls(self, parent: SpanContext, began: float, ended: float) -> None:
        inside = [call for call in self._calls if began <= call.began and call.ended <= ended]
        self._calls = [call for call in self._calls if call not in inside]
        for call in inside:
            self._add_store_call(parent, call)

    def _add_store_call(self, parent: SpanContext, call: StoreCall) -> None:
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
        """When the last of its tokens was with the client, or nobody waited for one any more."""
        story = self._story
        ended = max((trail.ended or self._ended for trail in story.trails), default=self._ended)
        return ended if story.settling is None else max(ended, story.settling)

    def _add_last(
        self, name: str, began: float, ended: float, values: Attributes, moments: list[Moment] | None = None
    ) -> SpanContext:
        """The phase in which a request ended: what it failed of, it failed of there."""
        failure = attributes.of_failure(self._story)
        return self._add(name, began, ended, {**values, **failure}, None, moments, failed=self._story.has_failed)

    def _add(
        self,
        name: str,
        began: float,
        ended: float,
        values: Attributes,
        parent: SpanContext | None = None,
        moments: list[Moment] | None = None,
        *,
        failed: bool = False,
    ) -> SpanContext:
        return self._tree.add(
            name,
            self._ns(began),
            self._ns(ended),
            self._root if parent is None else parent,
            values,
            failed=failed,
            moments=moments or (),
        )

    def _chunk(self, chunk: Chunk) -> Moment:
        return Moment(self._ns(chunk.planned), semconv.EVENT_CHUNK, attributes.of_chunk(chunk))

    def _moment(self, at: float, name: str) -> Moment:
        return Moment(self._ns(at), name)

    def _ns(self, moment: float) -> int:
        return self._story.unix_ns(moment)


def _route(path: str) -> str:
    """The path with what varies in it left open, so that names of spans are few, whatever a stranger asks for."""
    route = "/v1/models/{model}" if path.startswith("/v1/models/") else path
    return route if route in ROUTES else UNKNOWN
