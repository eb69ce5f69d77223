"""Sends spans, and log records, to a collector by the SDK's batch processors. Each queue is bounded, and every loss is
counted.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk._logs import ReadWriteLogRecord
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor, LogRecordExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from gateway.settings import otel_variables
from gateway.telemetry.otlp import Collector, DeliveryLog

log = logging.getLogger(__name__)

MAX_WAITING_SPANS = 8192
BATCH_SPANS = 512  # in one export
EXPORT_INTERVAL_SECONDS = 1.0  # between exports of less than a batch
FLUSH_SECONDS = 2.0  # for a stopping gateway to send the remaining spans


def otlp_exporter(collector: Collector) -> SpanExporter:
    return collector.exporter("traces", GrpcExporter, HttpExporter)


def background_exporter(collector: Collector) -> "BackgroundExporter":
    """Returns an exporter to the collector with the bounds that OpenTelemetry's variables set."""
    max_waiting = max(1, int(otel_variables.positive("OTEL_BSP_MAX_QUEUE_SIZE", MAX_WAITING_SPANS)))
    batch = max(1, int(otel_variables.positive("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH_SPANS)))
    interval = otel_variables.milliseconds("OTEL_BSP_SCHEDULE_DELAY", EXPORT_INTERVAL_SECONDS)
    return BackgroundExporter(otlp_exporter(collector), max_waiting, interval, batch)


class BackgroundExporter(SpanExporter):
    """Wraps the SDK's processor, which counts no loss and would tear a trace apart when its queue is full. What is said
    of spans here holds for log records, where it has their exporter.

    Each counter is written by one thread and read by any, so nothing is locked.
    """

    def __init__(
        self,
        exporter: SpanExporter | LogRecordExporter,
        max_waiting: int = MAX_WAITING_SPANS,
        interval: float = EXPORT_INTERVAL_SECONDS,
        batch: int = BATCH_SPANS,
    ) -> None:
        """At most `max_waiting` spans wait; `batch` of them, or all after `interval` seconds, are one export."""
        self.num_exported = 0
        self._num_put = 0
        self._num_overflowed = 0  # the queue was full
        self._num_taken = 0
        self._num_failed = 0  # the collector did not take them

        self._exporter = exporter
        self._max_waiting = max_waiting
        self._closing = False
        self._abandoned = False  # the time to flush is over
        self._what = "log records" if isinstance(exporter, LogRecordExporter) else "spans"
        self._delivery = DeliveryLog(self._what, interval)
        bounds: dict[str, Any] = {
            "max_queue_size": max_waiting,
            "schedule_delay_millis": 1000 * interval,
            "max_export_batch_size": min(batch, max_waiting),
        }
        self._processor: BatchSpanProcessor | BatchLogRecordProcessor
        self._queue: Callable[[Any], object]
        if isinstance(exporter, LogRecordExporter):
            self._processor = logs = BatchLogRecordProcessor(cast(LogRecordExporter, self), **bounds)
            self._queue = logs.on_emit
        else:
            self._processor = spans = BatchSpanProcessor(self, **bounds)
            self._queue = spans.on_end

    @property
    def num_waiting(self) -> int:
        return self._num_put - self._num_taken

    @property
    def num_dropped(self) -> int:
        lost = self._num_put - self.num_exported if self._abandoned else self._num_failed
        return self._num_overflowed + lost

    def put(self, spans: Sequence[ReadableSpan | ReadWriteLogRecord]) -> None:
        """Queue the spans of a trace; all of them are dropped if they do not fit into the queue."""
        if self._closing or self.num_waiting + len(spans) > self._max_waiting:
            self._num_overflowed += len(spans)
            return
        self._num_put += len(spans)
        for span in spans:
            self._queue(span)

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Export a batch, on the processor's thread."""
        self._num_taken += len(spans)
        delivered = False
        try:
            if not self._abandoned:
                delivered = self._exporter.export(spans).name == SpanExportResult.SUCCESS.name
        finally:
            self.num_exported += len(spans) * delivered
            self._num_failed += len(spans) * (not delivered)
            self._delivery.log(delivered)
        return SpanExportResult.SUCCESS if delivered else SpanExportResult.FAILURE

    async def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Send the remaining spans for at most `seconds`, and drop the others. `put` must not be called afterwards."""
        self._closing = True
        await asyncio.to_thread(self._close, seconds)

    def _close(self, seconds: float) -> None:
        flush = threading.Thread(target=self._processor.shutdown, name="span-flush", daemon=True)
        flush.start()
        flush.join(seconds)
        if flush.is_alive():
            self._abandoned = True
            left = self._num_put - self.num_exported - self._num_failed
            log.warning("%d %s were dropped: the collector did not take them in %g s", left, self._what, seconds)
            self._exporter.shutdown()

    def shutdown(self) -> None:
        """Shut the SDK's exporter down when the processor has ended, unless it was abandoned."""
        if not self._abandoned:
            self._exporter.shutdown()
