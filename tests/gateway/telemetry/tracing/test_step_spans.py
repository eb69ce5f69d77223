from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from backend.scheduler.batch import Batch
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence
from gateway.telemetry.core_observer import CompletedStep
from gateway.telemetry.request_record import RequestRecord, trace_context
from gateway.telemetry.tracing.step_spans import MAX_LINKED_STEPS, MAX_LINKS, MAX_WAIT_SECONDS, StepSpans
from tests.gateway.telemetry.records import BEGAN_NS, a_record, a_sequence, a_timeline


class Run:
    def __init__(self, per_second: float = 1000.0) -> None:
        self.live: set[RequestRecord] = set()
        self.sent: list[ReadableSpan] = []
        self.spans = StepSpans(Resource({}), per_second, self.live, self.sent.extend)
        self.now = 100.0
        self.number = 0

    def begin(self, sequences: int = 1) -> RequestRecord:
        timelines = [a_timeline(sequence=a_sequence()) for _ in range(sequences)]
        record = a_record(timelines=timelines, trace=trace_context(None, None))
        self.live.add(record)
        return record

    def step(self, *records: RequestRecord) -> None:
        sequences: list[Sequence] = [timeline.sequence for record in records for timeline in record.engine.timelines]
        size = len(sequences)
        batch = Batch(self.number, 0, list(range(size)), [0] * size, [10] * size)
        scheduled = ScheduledStep(batch, sequences, planned_at=self.now, planning=0.0002)
        self.now += 0.01
        self.number += 1
        self.spans.completed(CompletedStep(scheduled, self.now, 0.008))

    def end(self, record: RequestRecord, is_traced: bool = True) -> None:
        self.live.discard(record)
        self.spans.ended(record, is_traced)


@pytest.fixture
def run() -> Run:
    return Run()


def links(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def ids(*records: RequestRecord) -> list[tuple[int, int]]:
    return [(record.trace.trace_id, record.trace.span_id) for record in records]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_step_links_to_the_traced_requests_that_it_served(run: Run) -> None:
    one, two, untraced, other = (run.begin() for _ in range(4))
    run.step(one, two, untraced)
    run.end(one)
    run.end(other)
    run.end(untraced, is_traced=False)
    assert not run.sent
    run.end(two)
    (span,) = run.sent
    assert links(span) == ids(one, two)
    assert attributes(span)["sluice.step.traces"] == [one.trace.trace, two.trace.trace]
    assert span.name == "sluice.engine.step" and span.parent is None


def test_a_step_says_when_and_what_it_did(run: Run) -> None:
    record = run.begin()
    run.step(record)
    run.end(record)
    (span,) = run.sent
    assert span.start_time == pytest.approx(BEGAN_NS, abs=1e3)
    assert span.end_time == pytest.approx(BEGAN_NS + 10e6, abs=1e3)
    said = attributes(span)
    del said["sluice.step.traces"]
    assert said == {
        "sluice.step.number": 0,
        "sluice.step.sequences": 1,
        "sluice.step.decodes": 0,
        "sluice.step.prefill_tokens": 10,
        "sluice.step.admitted": 0,
        "sluice.step.device_us": 8000,
        "sluice.step.planning_us": 200,
    }


def test_a_step_that_served_no_traced_request_is_not_sent(run: Run) -> None:
    record = run.begin()
    run.step(record)
    run.end(record, is_traced=False)
    run.spans.close()
    assert not run.sent


def test_steps_are_capped_in_a_second() -> None:
    run = Run(per_second=5)
    record = run.begin()
    for _ in range(300):
        run.step(record)
    run.end(record)
    assert len(run.sent) == 15


def test_no_steps_are_kept_where_none_are_wanted() -> None:
    run = Run(per_second=0)
    record = run.begin()
    run.step(record)
    run.end(record)
    assert not run.sent


def test_a_request_of_several_sequences_is_linked_to_once(run: Run) -> None:
    record = run.begin(sequences=3)
    run.step(record)
    run.end(record)
    assert links(run.sent[0]) == ids(record)


def test_a_step_does_not_wait_for_ever_for_a_long_request(run: Run) -> None:
    long, short = run.begin(), run.begin()
    run.step(long, short)
    run.end(short)
    run.now += MAX_WAIT_SECONDS
    run.step(long)
    assert [links(span) for span in run.sent] == [ids(short)]
    run.end(long)
    assert [links(span) for span in run.sent] == [ids(short), ids(long)]


def test_waiting_spans_are_sent_at_the_end(run: Run) -> None:
    cut, short = run.begin(), run.begin()
    run.step(cut, short)
    run.end(short)
    run.spans.close()
    assert [links(span) for span in run.sent] == [ids(short)]


def test_neither_a_long_request_nor_a_crowd_grows_without_bound(run: Run) -> None:
    crowd = [run.begin() for _ in range(MAX_LINKS + 10)]
    for _ in range(MAX_LINKED_STEPS + 10):
        run.step(*crowd)
    for record in crowd:
        run.end(record)
    assert len(run.sent) == MAX_LINKED_STEPS
    assert all(len(span.links) == MAX_LINKS for span in run.sent)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["begin", "step", "end", "untraced"])), max_size=60))
def test_every_step_is_sent_once_at_most_and_nothing_is_kept(moves: list[tuple[int, str]]) -> None:
    run = Run()
    records: list[RequestRecord] = []
    for which, move in moves:
        if move == "begin":
            records.append(run.begin())
        elif move == "step":
            run.step(*records[:which])
        elif which < len(records):
            run.end(records.pop(which), is_traced=move == "end")
    for record in records:
        run.end(record)
    run.spans.close()
    numbers = [attributes(span)["sluice.step.number"] for span in run.sent]
    assert len(set(numbers)) == len(numbers)
    assert not run.spans._of and not run.spans._kept
