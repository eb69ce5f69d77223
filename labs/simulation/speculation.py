"""Several tokens a row: the worth of drafted tokens of any acceptance on any device. The engine's own drafts need texts
(`backend.scheduler.drafting`), which a simulation has not.

In each step every answer has `tokens` tokens drafted, and verified together with the token before them: its row is
longer by that number, and reads its context once; verified tokens cost as much arithmetic as tokens of a prompt. Of the
drafted tokens the first are accepted, each with the same probability, the tenant's `acceptance`, up to the first that
is not (Leviathan, Kalman and Matias, 2023). A drafted token costs `draft` of the time of a step without drafting:
nothing if it is looked up in the text, a twentieth with a small model.

A fixed number of tokens pays while steps are bound by memory, and costs where they are bound by arithmetic. SmartSpec
(Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput", arXiv 2406.14066)
chooses for each step the number that brings the most accepted tokens a second, of up to `tokens`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from admission.step_times.step_time import StepWork, prefill_pairs
from backend.scheduler.batch import StepOutput
from backend.scheduler.drafting import expected_tokens
from backend.scheduler.scheduled_step import ScheduledStep
from labs.simulation.loop import Loop
from labs.simulation.recorder import PlannedWork, StepInFlight
from labs.simulation.sampled_tokens import END, TOKEN

MOST_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Speculation:
    """The settings of drafting. Raises `ValueError` that names the field."""

    tokens: int  # for each row of an answer, at most
    is_smart: bool = False  # fewer if that yields more accepted tokens a second
    acceptance: Mapping[str, float] = field(default_factory=lambda: {"": 0.7})  # by tenant; "" is for all others
    draft: float = 0.0  # of a step's time, for each drafted token

    def __post_init__(self) -> None:
        if not 0 <= self.tokens <= MOST_TOKENS:
            raise ValueError(f"speculate must be from 0 to {MOST_TOKENS} tokens, got {self.tokens}")
        if not all(0 <= rate <= 1 for rate in self.acceptance.values()):
            raise ValueError("acceptance must be from 0 to 1")
        if not 0 <= self.draft < 1:
            raise ValueError(f"draft must be at least 0 and below 1, got {self.draft}")

    def acceptance_of(self, tenant: str) -> float:
        return self.acceptance.get(tenant, self.acceptance.get("", 0.0))

    def expected(self, tenant: str, drafted: int) -> float:
        """Return the mean number of tokens of a row: one, and the accepted ones of `drafted`."""
        return expected_tokens(self.acceptance_of(tenant), drafted)


class SpeculatingLoop(Loop):
    """A loop whose steps draft tokens. The core only sees that several tokens come of one row."""

    def __init__(self, speculation: Speculation, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._speculation, self._random = speculation, Random(0)
        self._drafted: dict[int, int] = {}  # by step

    def _seconds(self, scheduled: ScheduledStep) -> float:
        drafted = self._choose(scheduled)
        self._drafted[scheduled.batch.step] = drafted
        return self._seconds_with(scheduled, drafted)

    def _work(self, scheduled: ScheduledStep, now: float) -> PlannedWork:
        """Divides a step among tenants by all tokens of their rows, drafted ones included."""
        drafted, works, prefill = self._drafted[scheduled.batch.step], dict[str, StepWork](), StepWork()
        super()._work(scheduled, now)
        for row, sequence in enumerate(scheduled.sequences):
            work = self._work_of(scheduled, row, drafted)
            works[sequence.tenant] = works.get(sequence.tenant, StepWork()) + work
            prefill += StepWork() if work.decode_tokens else work
        return PlannedWork(works, prefill if prefill.prefill_tokens else None)

    def _output(self, step: StepInFlight) -> StepOutput:
        """The tokens of a step, with the accepted ones behind them, up to each answer's end."""
        batch, scheduled = step.batch, self._core.in_flight[0]
        drafted, tokens, forced = self._drafted.pop(batch.step), list[int](), dict[int, list[int]]()
        for index, (row, sequence) in enumerate(zip(batch.sampled, scheduled.sampled, strict=True)):
            left = sequence.num_prompt_tokens + sequence.request.seed - batch.starts[row] - batch.lengths[row]
            accepted = self._accept(sequence.tenant, drafted) if self._is_answer(scheduled, row) else 0
            brought = [TOKEN] * min(1 + accepted, left)
            if len(brought) == left and sequence.request.end_tokens:
                brought[-1] = END
            tokens.append(brought[0])
            if len(brought) > 1:
                forced[index] = brought[1:]
        return StepOutput(batch.step, tokens, step.elapsed, forced=forced or None)

    def _choose(self, scheduled: ScheduledStep) -> int:
        most = self._speculation.tokens
        rows = [one.tenant for row, one in enumerate(scheduled.sequences) if self._is_answer(scheduled, row)]
        if not rows or not self._speculation.is_smart:
            return most if rows else 0

        def rate(drafted: int) -> float:
            brought = sum(self._speculation.expected(tenant, drafted) for tenant in rows)
            return brought / self._seconds_with(scheduled, drafted)

        return max(range(most + 1), key=rate)

    def _seconds_with(self, scheduled: ScheduledStep, drafted: int) -> float:
        plain = StepWork()
        for row in range(len(scheduled.sequences)):
            plain += self._work_of(scheduled, row, 0)
        work = replace(plain, prefill_tokens=plain.prefill_tokens + drafted * plain.decode_tokens)
        return self._device.seconds(work) + drafted * self._speculation.draft * self._device.seconds(plain)

    def _work_of(self, scheduled: ScheduledStep, row: int, drafted: int) -> StepWork:
        start, length = scheduled.batch.starts[row], scheduled.batch.lengths[row]
        if self._is_answer(scheduled, row):
            return StepWork(drafted, 1, start + length)
        return StepWork(length, 0, 0, start, prefill_pairs(start, length))

    def _is_answer(self, scheduled: ScheduledStep, row: int) -> bool:
        """True if a row continues an answer, even with several tokens: they were verified. A longer row recomputes
        preempted tokens.
        """
        start, length = scheduled.batch.starts[row], scheduled.batch.lengths[row]
        goes_on = start >= scheduled.sequences[row].num_prompt_tokens and length <= 1 + self._speculation.tokens
        return row < scheduled.batch.num_decodes or goes_on

    def _accept(self, tenant: str, drafted: int) -> int:
        rate, accepted = self._speculation.acceptance_of(tenant), 0
        while accepted < drafted and self._random.random() < rate:
            accepted += 1
        return accepted
