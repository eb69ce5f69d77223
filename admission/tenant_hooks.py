"""The scheduler's questions, answered by who knows tenants and time."""

from collections.abc import Iterable
from math import inf

from admission.kv.memory import FuturePeak, Gate
from admission.kv.predicted_length import PredictedLength
from admission.kv.swap_choice import SwapChoice
from admission.ledger import Ledger
from admission.orderings.fair_queue import FairQueue
from admission.orderings.ordering import Ordering
from admission.output_length import OutputLengths
from admission.prefill_sizer import PrefillSizer
from admission.step_times.step_time import Pipeline, StepTimeModel, StepWork
from backend.scheduler.retention import Retention
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence

RESERVE = 1 / 3
"""Of the time that a deadline leaves for a first token, the last share, in which a prompt waits for nobody that comes
later: where the queue is as long as deadlines allow, all are as late, and what comes too late was computed for nothing.
"""


class TenantHooks:
    """The `SchedulerHooks` that know tenants and time: prefill by latency targets, memory by forecast, victims
    by debt.
    """

    def __init__(
        self,
        ordering: Ordering,
        ledger: Ledger,
        sizer: PrefillSizer,
        gate: Gate,
        forecast: FuturePeak,
        lengths: OutputLengths,
        swap_choice: SwapChoice,
        retention: Retention,
        model: StepTimeModel,
        pipeline: Pipeline,
    ) -> None:
        self.prefill_budget = sizer.prefill_budget
        self.swaps = swap_choice.swaps
        self.retention = retention
        self._ordering = ordering
        self._ledger = ledger
        self._gate = gate
        self._forecast = forecast
        self._lengths = lengths
        self._model, self._pipeline = model, pipeline
        self._fair = ordering if isinstance(ordering, FairQueue) else None
        self._predicted = gate if isinstance(gate, PredictedLength) else None

    def outranks(self, sequence: Sequence, other: Sequence) -> bool:
        return self._fair is not None and self._fair.outranks(sequence, other)

    def served(self, tenant: str) -> float:
        return self._fair.account(tenant).served if self._fair is not None else 0.0

    def prefill_cost(self, sequence: Sequence, tokens: int) -> float:
        """Only the fair queue divides prefill among tenants."""
        if self._fair is None:
            return inf
        return self._ledger.prepaid(tokens, 0.0) / self._fair.account(sequence.tenant).weight

    def prefill_in_time(self, sequence: Sequence, due: float, scheduled: ScheduledStep, room: int) -> float:
        """As many as such steps can compute behind those in flight, with `RESERVE` of its time left."""
        seconds = self._model.fitted.seconds(StepWork(room, scheduled.batch.num_decodes, scheduled.decode_context))
        now = scheduled.planned_at + self._pipeline.remaining(scheduled.planned_at)
        return (due - RESERVE * (due - sequence.arrival) - now) / seconds * room

    def admits(
        self, sequence: Sequence, running: Iterable[Sequence], num_free: int, num_held: int, num_kept: int
    ) -> bool:
        return self._gate(sequence, running, num_free, num_held, num_kept)

    def peak(self, sequences: Iterable[Sequence]) -> int:
        return self._forecast.blocks(sequences)

    def admitted(self, sequence: Sequence, *, follows: bool) -> None:
        """A newcomer pays ahead, once: what was preempted is still paid for. One that follows another pays for no
        prompt ahead, which would come back to its tenant as credit; what it computes all the same is charged as ever.

        Of an answer whose length nothing has shown it pays nothing ahead: a tenant alone would be granted what it
        declares, and have it back as credit once others are there.
        """
        if sequence.is_newcomer:
            tenant, declared = sequence.tenant, sequence.max_tokens
            output = self._lengths.mean(tenant, declared) if self._lengths.knows(tenant, declared) else 0.0
            self._ledger.prepay(sequence, output, len(sequence.prompt) - 1 if follows else sequence.num_computed_tokens)

    def victim_rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Rank victims by their tenants' debt, the deepest first; then by the work lost, the least first; then
        by age. Where memory was given by predicted lengths, who has outgrown its part goes before all others.
        """
        outgrew = self._predicted is not None and self._predicted.outgrew(sequence)
        return (outgrew, -self._ordering.credit(sequence.tenant), -sequence.num_computed_tokens, sequence.arrival)
