"""Sends spans to a collector from a thread of its own. Its queue is bounded, and every lost span is counted.

The SDK's exporters speak OTLP; its batch processor is not used, for it tears traces apart when its queue is full, logs
on the caller's thread, and counts neither what an exporter failed to deliver nor what it delivered.
"""

import asyncio
import logging
import threading
from queue import Empty, SimpleQueue

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gateway.settings import otel_variables
from gateway.telemetry.otlp import Collector, export_errors
from gateway.telemetry.tracing.span_encoding import encode_for_exporters
from gateway.telemetry.tracing.span_tree import FinishedSpan

log = logging.getLogger(__name__)

MAX_WAITING = 8192  # spans
BATCH = 512  # spans in one export, or one trace more
INTERVAL = 1.0  # seconds between exports of less than a batch
FLUSH_SECONDS = 2.0  # within which a stopping gateway sends the spans that are left


def otlp_exporter(collector: Collector) -> SpanExporter:
    encode_for_exporters()
    return collector.exporter("traces", GrpcExporter, HttpExporter)


def background_exporter(collector: Collector) -> "BackgroundExporter":
    """Returns an exporter to the collector with the bounds that OpenTelemetry's variables set."""
    max_waiting = max(1, int(otel_variables.positive("OTEL_BSP_MAX_QUEUE_SIZE", MAX_WAITING)))
    batch = max(1, int(otel_variables.positive("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH)))
    interval = otel_variables.milliseconds("OTEL_BSP_SCHEDULE_DELAY", INTERVAL)
    return BackgroundExporter(otlp_exporter(collector), max_waiting, interval, batch)


class BackgroundExporter:
    """Exports spans in batches. Each counter is written by one thread and read by any, so nothing is locked."""

    def __init__(
        self, exporter: SpanExporter, max_waiting: int = MAX_WAITING, interval: float = INTERVAL, batch: int = BATCH
    ) -> None:
        """At most `max_waiting` spans wait; `batch` of them, or all after `interval` seconds, are one export."""
        self.num_exported = 0
        self._num_put = 0
        self._num_overflowed = 0  # the queue was full
        self._num_taken = 0
        self._num_failed = 0  # the collector did not take them

        self._exporter = exporter
        self._max_waiting = max_waiting
        self._interval = interval
        self._batch = min(batch, max_waiting)
        self._queue: SimpleQueue[list[FinishedSpan]] = SimpleQueue()
        self._due = threading.Event()
        self._closing = False
        self._abandoned = False  # there is no more time
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="span-exporter", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return self._num_put - self._num_taken

    @property
    def num_dropped(self) -> int:
        lost = self._num_put - self.num_exported if self._abandoned else self._num_failed
        return self._num_overflowed + lost

    def put(self, spans: list[FinishedSpan]) -> None:
        """Queue these spans to be sent together; all of them are dropped if they do not fit into the queue."""
        waiting = self.num_waiting + len(spans)
        if self._closing or waiting > self._max_waiting:
            self._num_overflowed += len(spans)
            return
        self._num_put += len(spans)
        self._queue.put(spans)
        if waiting >= self._batch and not self._due.is_set():
            self._due.set()

    async def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Send the spans that are left within so many seconds and drop the others. Nothing may be put afterwards."""
        await asyncio.to_thread(self._close, seconds)

    def _close(self, seconds: float) -> None:
        self._closing = True
        self._due.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._abandoned = True
            left = self._num_put - self.num_exported - self._num_failed
            log.warning("%d spans were dropped: the collector did not take them in %g s", left, seconds)
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._closing:
            self._due.wait(self._interval)
            self._due.clear()
            self._export_all()
        self._export_all()

    def _export_all(self) -> None:
        while not self._abandoned and (batch := self._take_batch()):
            self._export(batch)

    def _take_batch(self) -> list[FinishedSpan]:
        batch: list[FinishedSpan] = []
        try:
            while len(batch) < self._batch:
                batch += self._queue.get_nowait()
        except Empty:
            pass
        self._num_taken += len(batch)
        return batch

    def _export(self, batch: list[FinishedSpan]) -> None:
        try:
            delivered = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:
            log.exception("spans could not be exported")
            delivered = False
        if delivered:
            self.num_exported += len(batch)
        else:
            self._num_failed += len(batch)
        self._log_change(delivered, export_errors.take())

    def _log_change(self, delivered: bool, reason: str) -> None:
        """Log the first failure and the recovery, not each failure between."""
        if delivered and self._failing:
            log.info("the collector takes spans again; %d were dropped meanwhile", self.num_dropped)
        elif not delivered and not self._failing:
            log.warning("spans are dropped and counted until the collector takes them: %s", reason)
        self._failing = not delivered
