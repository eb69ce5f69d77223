"""Traces requests, and the steps that served them, and sends the spans to a collector."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from opentelemetry.sdk.resources import Resource

from gateway.settings.settings import Settings
from gateway.telemetry.core_observer import CoreTelemetry
from gateway.telemetry.otlp import Collector, resource
from gateway.telemetry.request_record import RequestRecord, Telemetry
from gateway.telemetry.tracing.exporter import BackgroundExporter, background_exporter
from gateway.telemetry.tracing.sampler import SamplingReason, TraceSampler
from gateway.telemetry.tracing.spans import spans_of
from gateway.telemetry.tracing.step_spans import StepSpans
from gateway.tenants.effective_policy import KVShape
from quotas.store.scripts import Script


class Tracing:
    """Makes the spans of a sampled request once it has ended and its quota is settled. An unsampled request costs the
    decision alone.
    """

    def __init__(
        self,
        resource: Resource,
        kv: KVShape,
        sampler: TraceSampler,
        steps: StepSpans,
        exporter: BackgroundExporter,
        clock: Callable[[], float],
    ) -> None:
        self.sampler = sampler
        self.exporter = exporter
        self.steps = steps
        self._resource = resource
        self._kv = kv
        self._clock = clock

    def request_ended(self, record: RequestRecord) -> None:
        reason = self.sampler.reason_to_trace(record)
        self.steps.ended(record, reason is not None)
        if reason is None:
            return
        settlement = None if record.engine.grant is None else record.engine.grant.settlement
        if settlement is None or settlement.done():
            self._emit(record, reason)
        else:
            settlement.add_done_callback(lambda _: self._emit(record, reason))

    def _emit(self, record: RequestRecord, reason: SamplingReason) -> None:
        self.exporter.put(spans_of(record, self._resource, self._kv, reason, self._settled(record)))

    def _settled(self, record: RequestRecord) -> float | None:
        """The moment of the quota's settlement: the store's answer, or else now; None without a quota."""
        if record.engine.grant is None or record.engine.grant.settlement is None:
            return None
        answers = [call.ended for call in record.engine.store_calls if call.name == Script.SETTLE]
        return answers[-1] if answers else self._clock()


@asynccontextmanager
async def open_tracing(
    settings: Settings, telemetry: Telemetry, core_telemetry: CoreTelemetry, kv: KVShape
) -> AsyncIterator[Tracing | None]:
    """Trace requests and steps while the block runs, and then send the remaining spans. Yields None without a
    collector.
    """
    collector = Collector.of(settings)
    if collector is None:
        yield None
        return
    origin = resource()
    exporter = background_exporter(collector)
    sampler = TraceSampler(settings.trace_sample_ratio, settings.trace_slow_seconds, settings.trace_max_per_second)
    steps = StepSpans(origin, settings.trace_steps_per_second, telemetry.live, exporter.put)
    tracing = Tracing(origin, kv, sampler, steps, exporter, telemetry.clock)
    telemetry.on_end.append(tracing.request_ended)
    core_telemetry.on_step.append(steps.completed)
    try:
        yield tracing
    finally:
        steps.close()
        await exporter.close()
