"""Traces of requests and of the steps that served them, on their way to a collector."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from opentelemetry.sdk.resources import Resource

from gateway.settings.settings import Settings
from gateway.telemetry.core_observer import CoreTelemetry
from gateway.telemetry.otlp import Collector, resource
from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.telemetry import Telemetry
from gateway.telemetry.tracing.exporter import BackgroundExporter, background_exporter
from gateway.telemetry.tracing.sampler import Because, TraceSampler
from gateway.telemetry.tracing.spans import spans_of
from gateway.telemetry.tracing.step_spans import StepSpans
from gateway.tenants.effective_policy import KVShape
from quotas.store.scripts import Script


class Tracing:
    """A request that is not traced costs the decision; one that is, its spans, made when it is over and settled."""

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
        because = self.sampler.because(record)
        self.steps.ended(record, because is not None)
        if because is None:
            return
        settlement = None if record.grant is None else record.grant.settlement
        if settlement is None or settlement.done():
            self._emit(record, because)
        else:
            settlement.add_done_callback(lambda _: self._emit(record, because))

    def _emit(self, record: RequestRecord, because: Because) -> None:
        self.exporter.put(spans_of(record, self._resource, self._kv, because, self._settled(record)))

    def _settled(self, record: RequestRecord) -> float | None:
        """When its quota was: with the store's answer, or by now."""
        if record.grant is None or record.grant.settlement is None:
            return None
        answers = [call.ended for call in record.store_calls if call.name == Script.SETTLE]
        return answers[-1] if answers else self._clock()


@asynccontextmanager
async def open_tracing(
    settings: Settings, telemetry: Telemetry, core_telemetry: CoreTelemetry, kv: KVShape
) -> AsyncIterator[Tracing | None]:
    """Trace what `telemetry` and `core` tell of, until the block is left and what is left of it is sent; None where no
    collector is set.
    """
    collector = Collector.of(settings)
    if collector is None:
        yield None
        return
    us = resource()
    exporter = background_exporter(collector)
    sampler = TraceSampler(settings.trace_sample_ratio, settings.trace_slow_seconds, settings.trace_max_per_second)
    steps = StepSpans(us, settings.trace_steps_per_second, telemetry.live, exporter.put)
    tracing = Tracing(us, kv, sampler, steps, exporter, telemetry.clock)
    telemetry.on_end.append(tracing.request_ended)
    core_telemetry.on_step.append(steps.completed)
    try:
        yield tracing
    finally:
        steps.close()
        await exporter.close()
