"""A core and its telemetry on a virtual clock, without a device."""

from collections.abc import Iterable
from time import perf_counter

from admission.core import CoreConfig, make_core
from backend.config import EngineConfig
from backend.paged_kv.block_names import BlockName
from backend.scheduler.batch import StepOutput
from backend.scheduler.sequence import FinishReason
from gateway.telemetry.core_observer import CoreTelemetry
from gateway.telemetry.request_record import SequenceTimeline
from tests.backend.sequences import make_sequence

STEP = 0.01  # seconds


class CoreRun:
    def __init__(self, config: CoreConfig, engine: EngineConfig) -> None:
        self.core = make_core(config, engine)
        self.core_telemetry = CoreTelemetry(self.core)
        self.now = 100.0

    def arrive(
        self,
        name: str,
        prompt: int = 6,
        max_tokens: int = 4,
        tenant: str = "acme",
        level: int = 0,
        names: Iterable[BlockName] = (),  # of the prompt's full blocks
    ) -> SequenceTimeline:
        sequence = make_sequence(
            name, tenant, [1] * prompt, max_tokens, (), priority_class=level, block_names=list(names)
        )
        self.core.arrive(sequence, self.now)
        return self.core_telemetry.timeline(sequence)

    def plan(self) -> bool:
        began = perf_counter()
        if self.core.schedule(self.now) is None:
            return False
        self.core.in_flight[-1].planning = perf_counter() - began
        return True

    def complete(self) -> None:
        self.now += STEP
        batch = self.core.scheduler.in_flight[0].batch
        forced = {index: [5] * len(draft) for index, draft in batch.drafts}  # which was looked up among such tokens
        output = StepOutput(batch.step, [5] * len(batch.sampled), STEP, forced=forced or None)
        self.core.update_from_output(output, self.now)

    def step(self) -> bool:
        planned = self.plan()
        if planned:
            self.complete()
        return planned

    def run(self) -> None:
        while self.step():
            pass

    def cancel(self, timeline: SequenceTimeline) -> None:
        self.core.finish_sequence(timeline.sequence, FinishReason.CANCELLED, self.now)
