"""Sends the log lines of ended requests to a collector as OTLP log records, which belong to the requests' traces."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as HttpExporter
from opentelemetry.sdk._logs import ReadWriteLogRecord
from opentelemetry.sdk._logs.export import LogRecordExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, set_span_in_context

from gateway.key_mask import masked
from gateway.settings.settings import Settings
from gateway.telemetry.otlp import SCOPE, Collector, resource
from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.tracing.exporter import BackgroundExporter

SEVERITIES = {
    logging.DEBUG: SeverityNumber.DEBUG,
    logging.INFO: SeverityNumber.INFO,
    logging.WARNING: SeverityNumber.WARN,
}


class OtlpLog:
    """Queues a record for each line. Its attributes are the fields of the line that have a value."""

    def __init__(self, exporter: BackgroundExporter) -> None:
        self.exporter = exporter

    def put(self, request: RequestRecord, line: logging.LogRecord, fields: dict[str, Any]) -> None:
        span = SpanContext(request.trace.trace_id, request.trace.span_id, is_remote=False)
        record = LogRecord(
            timestamp=request.unix_ns(request.began if request.ended is None else request.ended),
            context=set_span_in_context(NonRecordingSpan(span)),
            severity_text=line.levelname,
            severity_number=SEVERITIES[line.levelno],
            body=line.getMessage(),
            attributes={
                name: masked(value) if isinstance(value, str) else value
                for name, value in fields.items()
                if value is not None
            },
        )
        self.exporter.put([ReadWriteLogRecord(record, resource(), SCOPE)])


@asynccontextmanager
async def open_otlp_log(settings: Settings) -> AsyncIterator[OtlpLog | None]:
    """Yield the log while the block runs, and then send the remaining records; None if it is off or there is no
    collector.
    """
    collector = Collector.of(settings)
    if collector is None or settings.otlp_logs == "off":
        yield None
        return
    exporter: LogRecordExporter = collector.exporter("logs", GrpcExporter, HttpExporter)
    log = OtlpLog(BackgroundExporter(exporter))
    try:
        yield log
    finally:
        await log.exporter.close()
