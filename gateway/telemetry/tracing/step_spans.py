"""Makes spans of engine steps.

A step serves many requests, so its span is in a trace of its own and links to theirs. Whether a request is traced is
known at its end, so a step is kept until all its requests have ended. Most steps are not kept at all.
"""

from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from random import getrandbits

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, SpanContext

from gateway.telemetry.core_observer import CompletedStep
from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.tracing.attributes import of_step
from gateway.telemetry.tracing.span_tree import SAMPLED, Attributes, SpanTree

MAX_WAIT_SECONDS = 60.0  # for the requests of a step to end
MAX_LINKED_STEPS = 32  # linked to one request, the first ones
MAX_LINKS = 64  # of one step


@dataclass(slots=True, eq=False)
class StepRecord:
    """A step whose span is not made yet, because requests that it served go on."""

    completed: float
    elapsed: float  # since it was planned
    attributes: dict[str, int]
    num_open: int = 0  # its unfinished requests
    links: list[Link] = field(default_factory=list)
    ended_ns: int = 0  # Unix nanoseconds, by the calendar of the first request that it links to
    is_done: bool = False


class StepSpans:
    """Keeps at most `per_second` steps. `live` are the requests being served; `ended` is called once for each."""

    def __init__(
        self,
        resource: Resource,
        per_second: float,
        live: Set[RequestRecord],
        emit: Callable[[list[ReadableSpan]], object],
    ) -> None:
        self._resource = resource
        self._live = live
        self._emit = emit
        self._interval = 1 / per_second if per_second else float("inf")
        self._due = float("-inf") if per_second else float("inf")  # when the next step may be kept
        self._kept: deque[StepRecord] = deque()  # in the order of their completion
        self._of: dict[RequestRecord, list[StepRecord]] = {}

    def completed(self, step: CompletedStep) -> None:
        """Keep a completed step, if one is due."""
        if step.completed < self._due:
            return
        self._due = step.completed + self._interval
        record = StepRecord(step.completed, step.completed - step.scheduled.planned_at, of_step(step))
        served = set(step.scheduled.sequences)
        for request_record in self._live:
            if any(timeline.sequence in served for timeline in request_record.engine.timelines):
                self._wait(request_record, record)
        if record.num_open:
            self._kept.append(record)
        self._finish_until(step.completed - MAX_WAIT_SECONDS)

    def ended(self, request_record: RequestRecord, is_traced: bool) -> None:
        """Record the end of a request. Steps that waited for it alone are sent, if any of their requests is traced."""
        for record in self._of.pop(request_record, ()):
            record.num_open -= 1
            if is_traced and not record.is_done and len(record.links) < MAX_LINKS:
                _link(record, request_record)
            if not record.num_open:
                self._finish(record)

    def close(self) -> None:
        """Send the steps that still wait for requests."""
        self._finish_until(float("inf"))

    def _wait(self, request_record: RequestRecord, record: StepRecord) -> None:
        records = self._of.setdefault(request_record, [])
        if len(records) < MAX_LINKED_STEPS:
            records.append(record)
            record.num_open += 1

    def _finish_until(self, moment: float) -> None:
        """Finish the oldest steps without unfinished requests, and steps completed before `moment`."""
        while self._kept and (self._kept[0].is_done or self._kept[0].completed < moment):
            self._finish(self._kept.popleft())

    def _finish(self, record: StepRecord) -> None:
        """Send a step once, if it has requests to link to."""
        if record.links and not record.is_done:
            tree = SpanTree(self._resource, getrandbits(128) or 1)
            began_ns = record.ended_ns - round(record.elapsed * 1e9)
            traces = [f"{link.context.trace_id:032x}" for link in record.links]
            attributes: Attributes = {**record.attributes, "sluice.step.traces": traces}
            tree.add("sluice.engine.step", began_ns, record.ended_ns, None, attributes, links=record.links)
            self._emit(tree.spans)
        record.is_done = True


def _link(record: StepRecord, request_record: RequestRecord) -> None:
    record.ended_ns = record.ended_ns or request_record.unix_ns(record.completed)
    record.links.append(Link(SpanContext(request_record.trace.trace_id, request_record.trace.span_id, False, SAMPLED)))
