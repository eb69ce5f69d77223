"""Forecasts when a newcomer's first and last token come, by the order that is in force.

    first token = steps in flight + half a step + max(tokens before it * seconds a token, until it has a place)
                  + its own prompt * seconds a token
    last token  = first token + its expected answer, in steps as they are while prompts are computed, then as lately

A token takes what a step takes that carries, beside the decodes of now, as much prefill as steps may. Before a newcomer
come the prompts that run and are due earlier, and what waits and is due earlier (`Foreseen.ahead`). It has a place once
it has a slot and memory: where those before it need more than there are, answers have to end first (`departures`).
"""

from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import NamedTuple, Protocol

from admission.backlog import Backlog
from admission.departures import Departures
from admission.output_length import OutputLengths
from admission.step_times.step_time import Pipeline, StepTimeModel, StepWork
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence

OUTPUT_QUANTILE = 0.9  # of the answer's length, that the last token is forecast for
TYPICAL_WEIGHT = 0.02  # of each newcomer in the running means of what is asked for


class Ahead(NamedTuple):
    """What waits and goes before a newcomer."""

    tokens: float = 0.0
    requests: float = 0.0
    own_tokens: float = 0.0  # of the newcomer's tenant


class Due(NamedTuple):
    """A request in the order in which requests are due."""

    due: float
    number: int  # the order among those due at once
    sequence: Sequence
    tokens: int  # of its prompt, that are to be computed


@dataclass(slots=True)
class Delayed:
    """Requests with deadlines that go after a newcomer, in their order, and the seconds from now until the first token
    of each comes.
    """

    sequences: list[Sequence]
    first_tokens: list[float]


class Foreseen(Protocol):
    """What the forecast asks of an order."""

    def due(self, sequence: Sequence) -> float: ...

    def ahead(self, sequence: Sequence) -> Ahead:
        """Return what waits and is due before a newcomer that does not wait yet."""
        ...

    def behind(self, sequence: Sequence) -> list[Due]:
        """Return the waiting requests with deadlines that are due later, in order; the caller may change the list."""
        ...


@dataclass(slots=True)
class Forecast:
    """The forecast for one newcomer, in seconds; the first two are from now."""

    first_token: float
    last_token: float
    wait: float  # until its own prefill
    own_wait: float  # the part of it that its tenant's waiting requests cause
    each: float  # seconds of the wait for each token before it
    prefill: float  # its own
    behind: Delayed


class _Step(NamedTuple):
    """The step that a prefill would share at present."""

    prefill_tokens: int
    seconds: float
    decodes: int
    decode_context: int


class Forecaster:
    """Reads the scheduler and the order; changes neither. O(running + what `Foreseen` says)."""

    def __init__(
        self,
        scheduler: Scheduler,
        order: Foreseen,
        backlog: Backlog,
        pipeline: Pipeline,
        model: StepTimeModel,
        lengths: OutputLengths,
    ) -> None:
        self._scheduler, self._order, self._backlog, self._pipeline = scheduler, order, backlog, pipeline
        self._model, self._lengths = model, lengths
        config = scheduler.config
        self._departures = Departures(lengths, config.max_num_seqs, config.max_num_batched_tokens)
        self._step_number = 0
        self.typical_prompt = self.typical_answer = 0.0  # tokens, running means over newcomers

    def arrived(self, prompt: int, answer: float) -> None:
        """Learn from a newcomer, by the tokens of its prompt to compute and of its answer as expected."""
        weight = TYPICAL_WEIGHT if self.typical_prompt else 1.0
        self.typical_prompt += weight * (prompt - self.typical_prompt)
        self.typical_answer += weight * (max(1.0, answer) - self.typical_answer)

    def of(self, sequence: Sequence, cached: int, now: float) -> Forecast:
        """Return the forecast for a sequence that arrives now, with `cached` prompt tokens that need no computing."""
        order, due = self._order, self._order.due(sequence)
        step = self._step(sequence, cached)
        a_token = step.seconds / step.prefill_tokens
        prompt = len(sequence.prompt) - cached
        in_progress, later = 0, order.behind(sequence)
        for running, left in self.prefilling():
            running_due = order.due(running)
            if running_due <= due:
                in_progress += left
            else:
                later.append(Due(running_due, 0, running, left))
        ahead = order.ahead(sequence)
        wait = self._wait(in_progress + ahead.tokens, ahead.requests, sequence, step)
        soonest = self._pipeline.remaining(now) + step.seconds / 2
        first = soonest + wait + prompt * a_token
        output = self._lengths.quantile(sequence.tenant, sequence.max_tokens, OUTPUT_QUANTILE)
        last = first + self._decoding(output - 1, in_progress + self._backlog.total.tokens, sequence, step)
        total, behind = in_progress + ahead.tokens + prompt, Delayed([], [])
        later.sort(key=itemgetter(0))
        for _, _, other, tokens in later:
            total += tokens
            if other.first_token_by is not None:
                behind.sequences.append(other)
                behind.first_tokens.append(soonest + total * a_token)
        each = wait / max(1.0, in_progress + ahead.tokens)
        return Forecast(first, last, wait, ahead.own_tokens * each, each, prompt * a_token, behind)

    def prefilling(self) -> list[tuple[Sequence, int]]:
        """Return the running sequences whose prompts are not computed yet, each with the tokens that are left of it."""
        running = self._scheduler.running.values()
        return [(s, left) for s in running if (left := s.num_admitted_tokens - s.num_computed_tokens) > 0]

    def alone(self, sequence: Sequence) -> float:
        """Return the seconds of prefill on a machine that does nothing else: no schedule is faster."""
        config, model = self._scheduler.config, self._model.fitted
        cached = self._scheduler.num_cached_tokens(sequence)
        steps, rest = divmod(sequence.num_tokens - cached, config.max_num_batched_tokens)
        whole = model.seconds(StepWork(prefill_tokens=config.max_num_batched_tokens))
        return steps * whole + (model.seconds(StepWork(prefill_tokens=rest)) if rest else 0.0)

    def _step(self, sequence: Sequence, cached: int) -> _Step:
        scheduler = self._scheduler
        scheduled = scheduler.in_flight[-1] if scheduler.in_flight else None
        decodes, context = (scheduled.batch.num_decodes, scheduled.decode_context) if scheduled else (0, 0)
        running = scheduler.running.values()
        interval = min([s.token_interval for s in running if s.token_interval is not None], default=None)
        mean_context = (len(sequence.prompt) + cached) // 2
        budget = scheduler.prefill_budget(decodes, context, interval)
        prefill = max(1, budget.fits(mean_context, scheduler.token_budget - decodes))
        work = StepWork(prefill, decodes, context, mean_context, prefill * mean_context)
        return _Step(prefill, self._model.fitted.seconds(work), decodes, context)

    def _decoding(self, tokens: float, waiting: float, sequence: Sequence, step: _Step) -> float:
        """Return the seconds of an answer's tokens, in full steps until the waiting tokens of prompts are computed."""
        full = min(tokens, waiting / step.prefill_tokens)
        alone = self._model.fitted.seconds(StepWork(decode_tokens=1, decode_context=sequence.num_tokens))
        return full * step.seconds + (tokens - full) * min(step.seconds, max(alone, self._pipeline.typical))

    def _wait(self, tokens: float, requests: float, sequence: Sequence, step: _Step) -> float:
        """Return the seconds until the newcomer's own prefill, behind these tokens of these requests."""
        computing = tokens * step.seconds / step.prefill_tokens
        steps, of_decodes = self._until_place(requests, sequence, step)
        if not steps:
            return computing
        decodes = self._model.fitted.seconds(StepWork(0, step.decodes, step.decode_context))
        return max(computing, steps * of_decodes + tokens * (step.seconds - decodes) / step.prefill_tokens)

    def _until_place(self, requests: float, sequence: Sequence, step: _Step) -> tuple[int, float]:
        """Return the steps until it has a slot and memory behind these requests, and the seconds of a step without
        prefill.
        """
        scheduler, running = self._scheduler, self._scheduler.running
        config, typical = scheduler.config, self.typical_prompt + self.typical_answer
        free = config.max_num_seqs - len(running)
        memory = scheduler.kv_manager.num_available * config.block_size / typical if typical else inf
        lacking, places = requests + 1 - min(free, memory), int(min(free, memory))
        if lacking <= 0 or not (running or places):
            return 0, 0.0
        if memory > requests + 1 and scheduler.takes_a_slot(sequence):
            return 0, 0.0
        if scheduler.in_flight:
            self._step_number = scheduler.in_flight[-1].batch.step
        self._departures.follow(running, self._step_number, scheduler.counters.admissions)
        joining = max(0, len(running) + places - step.decodes)
        context = step.decode_context + round(joining * (self.typical_prompt + self.typical_answer / 2))
        decodes = StepWork(0, step.decodes + joining, context)
        steps = self._departures.steps_until(lacking, requests * self.typical_answer, places, self.typical_answer)
        return steps, self._model.fitted.seconds(decodes)
