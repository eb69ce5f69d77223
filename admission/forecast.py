"""The forecast of a newcomer's first and last token, by the order in force.

    first token = steps in flight + half a step + max(tokens ahead * seconds a token, until it has a slot and memory)
                  + its own prompt * seconds a token
    last token  = first token + its expected output, in steps as long as now while prompts are computed, then as lately

Seconds a token are those of a step with the present decodes and as much prefill as a step may carry. Ahead of a
newcomer are running prefills and waiting requests that are due earlier (`ForecastOrder.ahead`). If the requests ahead
need more slots or memory than are free, running sequences have to end first (`departures`). The requests due later are
forecast too, in the same way.
"""

from bisect import insort
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import NamedTuple, Protocol

from admission.backlog import Backlog
from admission.departures import Departures
from admission.ledger import AdapterTime
from admission.output_length import OutputLengths
from admission.step_times.step_time import Pipeline, StepTimeModel, StepWork, plain_sum
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence, SequenceStatus

OUTPUT_QUANTILE = 0.9  # of the output length, for which the last token is forecast
NEWCOMER_WEIGHT = 0.02  # of each newcomer in the running means of prompt and output tokens


class WorkAhead(NamedTuple):
    """The waiting work due before a newcomer."""

    tokens: float = 0.0
    requests: float = 0.0
    own_tokens: float = 0.0  # of the newcomer's tenant


class DueRequest(NamedTuple):
    """A waiting request, comparable by the time at which it is due."""

    due: float
    number: int  # the order among requests due at once
    sequence: Sequence
    tokens: int  # uncomputed tokens of its prompt


@dataclass(slots=True)
class Delayed:
    """Requests with deadlines due after a newcomer, in their order."""

    sequences: list[Sequence]
    first_tokens: list[float]  # seconds from now until each one's first token


class ForecastOrder(Protocol):
    """The forecast's view of an order of waiting requests."""

    def due(self, sequence: Sequence) -> float: ...

    def ahead(self, sequence: Sequence, due: float) -> WorkAhead:
        """Return the waiting work due before a newcomer, which is due then and does not wait yet."""
        ...

    def behind(self, sequence: Sequence, due: float) -> list[DueRequest]:
        """Return the waiting requests with deadlines that are due later, in order; the caller may change the list."""
        ...


@dataclass(slots=True)
class Forecast:
    """The forecast for one newcomer, in seconds; the first two are from now."""

    first_token: float
    last_token: float
    wait: float  # until its own prefill
    own_wait: float  # the part of it caused by its tenant's waiting requests
    each: float  # seconds of the wait for each token ahead
    prefill: float  # its own
    behind: Delayed


class _SharedStep(NamedTuple):
    """The step that a prefill would share now."""

    prefill_tokens: int
    seconds: float
    of_prefill: float  # the part of the seconds that is due to prefill
    decodes: int
    decode_context: int
    adapting: float  # the part of the seconds that is due to the adapters of decodes
    others: float = 0.0  # seconds of the other models' steps beside it, which `seconds` hold


class Forecaster:
    """Reads the scheduler and the order; changes neither. O(running + the cost of `ForecastOrder`)."""

    def __init__(
        self,
        scheduler: Scheduler,
        order: ForecastOrder,
        backlog: Backlog,
        pipeline: Pipeline,
        models: Listed[StepTimeModel],
        lengths: OutputLengths,
        adapter_time: AdapterTime,
    ) -> None:
        self._scheduler, self._order, self._backlog, self._pipeline = scheduler, order, backlog, pipeline
        self._models, self._lengths, self._adapter_time = models, lengths, adapter_time
        config = scheduler.config
        self._departures = Departures(lengths, config.max_num_seqs, config.max_num_batched_tokens)
        self._step_number = 0
        self.typical_prompt = self.typical_answer = 0.0  # tokens, running means over newcomers

    def add_newcomer(self, prompt: int, answer: float) -> None:
        """Update the running means by a newcomer's uncomputed prompt tokens and expected output tokens."""
        weight = NEWCOMER_WEIGHT if self.typical_prompt else 1.0
        self.typical_prompt += weight * (prompt - self.typical_prompt)
        self.typical_answer += weight * (max(1.0, answer) - self.typical_answer)

    def of(self, sequence: Sequence, cached: int, now: float) -> Forecast:
        """Return the forecast for a sequence that arrives now with `cached` prompt tokens."""
        order, due = self._order, self._order.due(sequence)
        step = self._step(sequence, cached)
        a_token = step.seconds / step.prefill_tokens
        prompt = sequence.num_prompt_tokens - cached
        prefill = prompt * a_token + self._adapter_time.of_prompt(sequence, prompt)
        in_progress, waiting, begun = 0, order.behind(sequence, due), list[DueRequest]()
        for running, left in self.prefilling():
            running_due = order.due(running)
            if running_due <= due:
                in_progress += left
            else:
                begun.append(DueRequest(running_due, 0, running, left))
        ahead = order.ahead(sequence, due)
        place, decodes = self._until_place(ahead.requests, sequence, step)
        wait = _wait(in_progress + ahead.tokens, place, decodes, step)
        soonest = self._pipeline.remaining(now) + step.seconds / 2
        soonest += self._scheduler.wake_seconds(sequence.request.model)
        first = soonest + wait + prefill
        output = self._lengths.quantile(sequence.tenant, sequence.request.max_tokens, OUTPUT_QUANTILE)
        last = first + self._decoding(output - 1, in_progress + self._backlog.total.tokens, sequence, step)
        behind = self._behind(waiting, begun, in_progress + ahead.tokens + prompt, ahead.requests + 1, soonest, step)
        each = wait / max(1.0, in_progress + ahead.tokens)
        return Forecast(first, last, wait, ahead.own_tokens * each, each, prefill, behind)

    def _behind(
        self,
        later: list[DueRequest],
        begun: list[DueRequest],
        total: float,
        requests: float,
        soonest: float,
        step: _SharedStep,
    ) -> Delayed:
        """Return the times at which requests due later, waiting or `begun`, have their first tokens, behind `total`
        tokens of `requests`.

        If they wait for slots or memory, the first and the last are forecast, and the others are assumed to follow
        evenly in between.
        """
        place = each = decodes = 0.0
        if later:
            last, decodes = self._until_place(requests + len(later) - 1, later[-1].sequence, step)
            if last:
                first, _ = self._until_place(requests, later[0].sequence, step)
                place, each = float(first), max(0.0, float(last - first)) / max(1, len(later) - 1)
        for one in begun:
            insort(later, one, key=itemgetter(0))
        sequences, first_tokens = list[Sequence](), list[float]()
        a_token = step.seconds / step.prefill_tokens
        for entry in later:
            sequence, tokens = entry.sequence, entry.tokens
            waits = sequence.status is SequenceStatus.WAITING
            wait = _wait(total, place if waits else 0.0, decodes, step)
            place += each if waits else 0.0
            total += tokens
            if sequence.request.first_token_by is not None:
                own = tokens * a_token + self._adapter_time.of_prompt(sequence, tokens)
                sequences.append(sequence)
                first_tokens.append(soonest + wait + own)
        return Delayed(sequences, first_tokens)

    def prefilling(self) -> list[tuple[Sequence, int]]:
        """Return the running sequences in prefill, each with its uncomputed tokens: not those of the spare class, which
        wait for others.
        """
        found = [s for s in self._scheduler.running.values() if s.is_prefilling and not s.is_spare]
        return [(s, s.num_admitted_tokens - s.num_computed_tokens) for s in found]

    def alone(self, sequence: Sequence) -> float:
        """Return the prefill seconds on an otherwise idle machine: a lower bound for every schedule."""
        config, model = self._scheduler.config, self._models[sequence.request.model].fitted
        cached = self._scheduler.num_cached_tokens(sequence)
        tokens = sequence.num_tokens - cached
        steps, rest = divmod(tokens, config.max_num_batched_tokens)
        whole = model.seconds(StepWork(prefill_tokens=config.max_num_batched_tokens))
        adapting = self._adapter_time.of_prompt(sequence, tokens)
        return steps * whole + (model.seconds(StepWork(prefill_tokens=rest)) if rest else 0.0) + adapting

    def _step(self, sequence: Sequence, cached: int) -> _SharedStep:
        scheduler, model, others = self._scheduler, sequence.request.model, 0.0
        scheduled = scheduler.in_flight[-1] if scheduler.in_flight else None
        decodes = context = 0
        if len(self._models) > 1:
            decodes, context, others = self._beside(model)
        elif scheduled:
            decodes, context = scheduled.decoding
            decodes, context = decodes - scheduled.spare_decodes, context - scheduled.spare_context
        running = scheduler.running.values()
        interval = min([each for s in running if (each := s.request.token_interval) is not None], default=None)
        mean_context = (sequence.num_prompt_tokens + cached) // 2
        budget = scheduler.prefill_budget(decodes, context, interval, model)
        prefill = max(1, budget.fits(mean_context, scheduler.budget.tokens - decodes))
        work = StepWork(prefill, decodes, context, mean_context, prefill * mean_context)
        times = self._models[model].fitted
        seconds, alone = times.seconds(work), times.seconds(StepWork(0, decodes, context))
        adapting = self._adapter_time.of_decodes(
            scheduled.sequences[: scheduled.batch.num_decodes] if scheduled else ()
        )
        beside = others + adapting
        return _SharedStep(prefill, seconds + beside, seconds - alone, decodes, context, adapting, others)

    def _beside(self, model: int) -> tuple[int, int, float]:
        """Return the decodes of a model, the tokens that they attend to, and the seconds of a step of each other model
        that runs: models take turns.
        """
        works: dict[int, StepWork] = {}
        for one in self._scheduler.running.values():
            if not one.is_prefilling and not one.is_spare:
                works.setdefault(one.request.model, StepWork())
                works[one.request.model] += StepWork(0, 1, one.num_computed_tokens)
        own = works.pop(model, StepWork())
        others = [self._models[other].fitted.seconds(work) for other, work in works.items()]
        return own.decode_tokens, own.decode_context, plain_sum(others)

    def _decoding(self, tokens: float, waiting: float, sequence: Sequence, step: _SharedStep) -> float:
        """Return the seconds of an output of `tokens`, in full steps until `waiting` prompt tokens are computed."""
        full = min(tokens, waiting / step.prefill_tokens)
        times = self._models[sequence.request.model].fitted
        alone = times.seconds(StepWork(decode_tokens=1, decode_context=sequence.num_tokens))
        alone += self._adapter_time.of_decodes((sequence,))
        each = max(alone, self._pipeline.typical) + step.others
        return full * step.seconds + (tokens - full) * min(step.seconds, each)

    def _until_place(self, requests: float, sequence: Sequence, step: _SharedStep) -> tuple[int, float]:
        """Return the steps until it has a slot and memory behind `requests`, and a step's seconds without prefill."""
        scheduler, running = self._scheduler, self._scheduler.running
        if scheduler.kv_manager.num_spare:
            running = {name: one for name, one in running.items() if not one.is_spare}
        config, typical = scheduler.config, self.typical_prompt + self.typical_answer
        free = config.max_num_seqs - len(running)
        has_window = config.windows_of(model := sequence.request.model)[0] > 0
        each = config.need_of(model).tokens(typical, config.block_size) if has_window else typical
        memory = scheduler.kv_manager.num_available_to_others * config.block_size / each if typical else inf
        lacking, places = requests + 1 - min(free, memory), int(min(free, memory))
        if lacking <= 0 or not (running or places):
            return 0, 0.0
        if memory > requests + 1 and scheduler.takes_a_slot(sequence):
            return 0, 0.0
        if scheduler.in_flight:
            self._step_number = scheduler.in_flight[-1].batch.step
        self._departures.follow(running, self._step_number)
        joining = max(0, len(running) + places - step.decodes)
        context = step.decode_context + round(joining * (self.typical_prompt + self.typical_answer / 2))
        decodes = StepWork(0, step.decodes + joining, context)
        steps = self._departures.steps_until(lacking, requests * self.typical_answer, places, self.typical_answer)
        return steps, self._models[sequence.request.model].fitted.seconds(decodes) + step.others + step.adapting


def _wait(tokens: float, place: float, decodes: float, step: _SharedStep) -> float:
    """Return the seconds until a prefill behind `tokens` that has a slot and memory in `place` steps; `decodes` are the
    seconds of each without prefill.
    """
    computing = tokens * step.seconds / step.prefill_tokens
    if not place:
        return computing
    return max(computing, place * decodes + tokens * step.of_prefill / step.prefill_tokens)
