import logging
import threading
from collections.abc import AsyncIterator, Sequence

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gateway.telemetry.otlp import Collector
from gateway.telemetry.tracing.exporter import BATCH_SPANS, BackgroundExporter, otlp_exporter
from gateway.telemetry.tracing.sampler import SamplingReason
from gateway.telemetry.tracing.spans import spans_of
from gateway.tenants.effective_policy import KVShape
from tests.gateway.telemetry.otlp_receiver import Manner, Receiver
from tests.gateway.telemetry.records import a_record

RESOURCE = Resource({"service.name": "sluice"})


@pytest.fixture
def trace() -> list[ReadableSpan]:
    return a_trace()


def a_trace() -> list[ReadableSpan]:
    return spans_of(a_record(), RESOURCE, KVShape(16, 1000), SamplingReason.RATIO, None)


def own(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What reaches the log; what the SDK says itself does not."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("gateway.")]


class Held(SpanExporter):
    def __init__(self, result: SpanExportResult | Exception = SpanExportResult.SUCCESS) -> None:
        self.result = result
        self.batches: list[int] = []
        self.asked = threading.Event()
        self.let = threading.Event()
        self.is_shut_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.let.wait()
        self.batches.append(len(spans))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def shutdown(self) -> None:
        self.is_shut_down = True
        self.let.set()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_spans_reach_a_collector(receiver: Receiver, protocol: str, trace: list[ReadableSpan]) -> None:
    collector = Collector(receiver.endpoint(protocol), protocol, {"authorization": "Bearer abc"})
    exporter = BackgroundExporter(otlp_exporter(collector))
    exporter.put(trace)
    await exporter.close()
    assert [span.name for span in receiver.spans] == [span.name for span in trace]
    assert receiver.resources == [{"service.name": "sluice"}]
    assert receiver.metadata[0]["authorization"] == "Bearer abc"
    assert (exporter.num_exported, exporter.num_dropped, exporter.num_waiting) == (len(trace), 0, 0)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_spans_refused_by_a_collector_are_counted(
    receiver: Receiver, protocol: str, trace: list[ReadableSpan], caplog: pytest.LogCaptureFixture
) -> None:
    receiver.manner = Manner.REFUSE
    exporter = BackgroundExporter(otlp_exporter(Collector(receiver.endpoint(protocol), protocol)))
    exporter.put(trace)
    await exporter.close()
    assert (exporter.num_exported, exporter.num_dropped) == (0, len(trace))
    (said,) = own(caplog)
    assert said.startswith("the collector does not take spans, and is tried again every 1 s: Failed to export")


async def test_every_exporter_says_why_however_lately_another_said_the_same(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.manner = Manner.REFUSE
    for _ in range(2):
        exporter = BackgroundExporter(otlp_exporter(Collector(receiver.grpc_endpoint, "grpc")))
        exporter.put(a_trace())
        await exporter.close()
    assert ["Failed to export" in line for line in own(caplog)] == [True, True]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_collector_that_hangs_holds_nothing_up(receiver: Receiver, protocol: str) -> None:
    receiver.manner = Manner.HANG
    exporter = BackgroundExporter(otlp_exporter(Collector(receiver.endpoint(protocol), protocol)), max_waiting=20)
    traces = [a_trace() for _ in range(10)]
    for trace in traces:
        exporter.put(trace)
    await exporter.close(0.05)
    assert (exporter.num_exported, exporter.num_dropped) == (0, sum(map(len, traces)))


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_collector_that_is_not_there_holds_nothing_up(protocol: str, trace: list[ReadableSpan]) -> None:
    exporter = BackgroundExporter(otlp_exporter(Collector("http://127.0.0.1:1", protocol)))
    exporter.put(trace)
    await exporter.close(0.05)
    assert (exporter.num_exported, exporter.num_dropped) == (0, len(trace))


async def test_traces_are_dropped_whole_when_the_queue_is_full(trace: list[ReadableSpan]) -> None:
    held = Held()
    exporter = BackgroundExporter(held, max_waiting=3 * len(trace), interval=0.001)
    exporter.put(trace)
    held.asked.wait()
    for _ in range(5):
        exporter.put(trace)
    assert (exporter.num_waiting, exporter.num_dropped) == (3 * len(trace), 2 * len(trace))
    held.let.set()
    await exporter.close()
    assert (exporter.num_exported, exporter.num_dropped) == (4 * len(trace), 2 * len(trace))


async def test_a_full_batch_does_not_wait_for_the_interval(trace: list[ReadableSpan]) -> None:
    held = Held()
    exporter = BackgroundExporter(held, interval=3600)
    for _ in range(BATCH_SPANS // len(trace) + 1):
        exporter.put(trace)
    assert held.asked.wait(240)
    held.let.set()
    await exporter.close()
    assert exporter.num_waiting == exporter.num_dropped == 0
    assert max(held.batches) < BATCH_SPANS + len(trace)


async def test_an_exporter_that_raises_is_survived(trace: list[ReadableSpan]) -> None:
    held = Held(RuntimeError("no"))
    held.let.set()
    exporter = BackgroundExporter(held, interval=0.001)
    exporter.put(trace)
    exporter.put(trace)
    await exporter.close()
    assert exporter.num_dropped == 2 * len(trace)


async def test_failures_are_logged_once_and_so_is_the_recovery(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.telemetry.otlp")
    held, trace = Held(SpanExportResult.FAILURE), [a_trace()[0]] * BATCH_SPANS
    held.let.set()
    exporter = BackgroundExporter(held)
    for _ in range(3):
        exporter.put(trace)
    exporter._processor.force_flush()
    assert exporter.num_dropped == 3 * BATCH_SPANS
    held.result = SpanExportResult.SUCCESS
    exporter.put(trace)
    await exporter.close()
    assert own(caplog) == [
        "the collector does not take spans, and is tried again every 1 s: it gave no reason",
        "the collector takes spans again",
    ]


async def test_nothing_is_taken_after_the_end(trace: list[ReadableSpan]) -> None:
    held = Held()
    exporter = BackgroundExporter(held)
    await exporter.close()
    exporter.put(trace)
    assert held.is_shut_down and exporter.num_dropped == len(trace)


async def test_spans_not_sent_in_time_are_counted_once(trace: list[ReadableSpan]) -> None:
    held = Held()
    exporter = BackgroundExporter(held, interval=0.001)
    exporter.put(trace)
    held.asked.wait()
    exporter.put(trace)
    await exporter.close(0.01)
    assert exporter.num_exported + exporter.num_dropped == 2 * len(trace)


@pytest.fixture(autouse=True)
async def no_thread_is_left() -> AsyncIterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name in ("OtelBatchSpanRecordProcessor", "span-flush"):
            thread.join(240)
            assert not thread.is_alive()
