"""Counts what telemetry itself has yet to deliver, and what it could not."""

from gateway.telemetry.logs.logs import num_lines_dropped
from gateway.telemetry.metrics.process import ProcessMetrics
from gateway.telemetry.tracing.tracing import Tracing


def count_losses(metrics: ProcessMetrics, tracing: Tracing | None) -> None:
    metrics.bind("sluice.log_lines.dropped", num_lines_dropped)
    if tracing is not None:
        exporter, sampler = tracing.exporter, tracing.sampler
        metrics.bind("sluice.spans.waiting", lambda: exporter.num_waiting)
        metrics.bind("sluice.spans.exported", lambda: exporter.num_exported)
        metrics.bind("sluice.spans.dropped", lambda: exporter.num_dropped)
        metrics.bind("sluice.traces.capped", lambda: sampler.num_capped)
