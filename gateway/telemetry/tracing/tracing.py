"""Traces of requests and of the steps that served them, on their way to a collector."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from opentelemetry.sdk.resources import Resource

from gateway.settings.settings import Settings
from gateway.telemetry.core_observer import WatchedCore
from gateway.telemetry.otlp import Collector, resource
from gateway.telemetry.request_record import Story
from gateway.telemetry.telemetry import Telemetry
from gateway.telemetry.tracing.exporter import BackgroundExporter, background_exporter
from gateway.telemetry.tracing.sampler import Because, Sampler
from gateway.telemetry.tracing.spans import spans_of
from gateway.telemetry.tracing.step_spans import StepSpans
from gateway.tenants.effective_policy import KvShape
from quotas.store.scripts import Script


class Tracing:
    """A request that is not traced costs the decision; one that is, its spans, made when it is over and settled."""

    def __init__(
        self,
        resource: Resource,
        kv: KvShape,
        sampler: Sampler,
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

    def request_ended(self, story: Story) -> None:
        because = self.sampler.because(story)
        self.steps.ended(story, because is not None)
        if because is None:
            return
        settlement = None if story.grant is None else story.grant.settlement
        if settlement is None or settlement.done():
            self._emit(story, because)
        else:
            settlement.add_done_callback(lambda _: self._emit(story, because))

    def _emit(self, story: Story, because: Because) -> None:
        self.exporter.put(spans_of(story, self._resource, self._kv, because, self._settled(story)))

    def _settled(self, story: Story) -> float | None:
        """When its quota was: with the store's answer, or by now."""
        if story.grant is None or story.grant.settlement is None:
            return None
        answers = [call.ended for call in story.store_calls if call.name == Script.SETTLE]
        return answers[-1] if answers else self._clock()


@asynccontextmanager
async def open_tracing(
    settings: Settings, telemetry: Telemetry, core: WatchedCore, kv: KvShape
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
    sampler = Sampler(settings.trace_sample_ratio, settings.trace_slow_seconds, settings.trace_max_per_second)
    steps = StepSpans(us, settings.trace_steps_per_second, telemetry.live, exporter.put)
    tracing = Tracing(us, kv, sampler, steps, exporter, telemetry.clock)
    telemetry.on_end.append(tracing.request_ended)
    core.on_step.append(steps.completed)
    try:
        yield tracing
    finally:
        steps.close()
        await exporter.close()
