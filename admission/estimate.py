"""Estimates when a newcomer's first and last token will come, as far as the present state tells.

    first token = steps in flight + max(prefill, place) + half a step           seconds from now
    prefill     = (prefill in progress + waiting ahead in policy order + its own) / tokens a step * step
    place       = steps until it has a slot and memory * step of decodes + that prefill beside them + its own prefill
    last token  = first token + full * step + (output quantile - full) * min(step, max(own step, recent steps))
    full        = steps until all that waits is prefilled, at most the output quantile

A step carries what the decodes and the promised intervals leave of the token budget. Ahead of a newcomer is what its
order serves before it (`surroundings`), and of the prompts that are being computed those that would not let it go
first, or for which something before it waits. Adding to the backlog never lowers an estimate.

Each request ahead takes a slot, and so does the newcomer. Where they are more than the slots that are free, or that a
lower class would give up for it, or than the free memory holds of typical requests, answers have to end first
(`departures`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf

from admission.backlog import Backlog, WorkAhead
from admission.departures import Departures
from admission.orderings.fair_queue import FairQueue
from admission.orderings.ordering import Line, ListedOrdering
from admission.output_length import OutputLengths
from admission.step_times.step_time import Pipeline, StepTimeModel, StepWork
from admission.surroundings import NOTHING, InFairOrder, InListedOrder, Later, Surroundings, Typical
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence

OUTPUT_QUANTILE = 0.9


Delayed = tuple[Sequence, float]
"""A sequence that comes behind a newcomer and has a promise to keep, and the seconds from now until its first token is
expected, with the newcomer before it.
"""


@dataclass(slots=True)  # one is made for each newcomer, and frozen ones cost three times as much
class Estimate:
    """The estimate for one newcomer, in seconds; the first two are from now."""

    first_token: float
    last_token: float
    wait: float  # until its own prefill
    others_wait: Callable[[], float]  # how long it would be without its tenant's waiting work: for refusals, at once
    prefill: float  # its own
    a_token: float  # of any prefill
    behind: list[Delayed]  # those who would have to wait for it, in their order

    @property
    def own_wait(self) -> float:
        """The part of the wait that its tenant's waiting work causes, as long as nothing has changed."""
        return self.wait - self.others_wait()


@dataclass(slots=True)
class _CurrentStep:
    """The step that a prefill would share at present."""

    prefill_tokens: int  # that it has left beside the decodes
    seconds: float
    decodes: int
    decode_context: int
    in_progress: int  # prefill tokens of those running that go before the newcomer
    behind: Later  # of those running with pressing deadlines that do not
    priority_class: int  # of whose estimate it is
    giving_way: int | None = None  # those running that would give their slots to its class; counted when asked for


class Estimator:
    """Reads the scheduler, the backlog and the fair queue; changes none of them. O(running + `TENANTS_EXAMINED`)."""

    def __init__(
        self,
        scheduler: Scheduler,
        ordering: FairQueue | ListedOrdering,
        backlog: Backlog,
        pipeline: Pipeline,
        model: StepTimeModel,
        lengths: OutputLengths,
        prepaid: Callable[[int, float, int], float],
    ) -> None:
        """`prepaid` returns the amount that a request prepays, by the tokens of its prompt, of its expected output, and
        those of its prompt that are cached.
        """
        self._scheduler, self._backlog, self._pipeline = scheduler, backlog, pipeline
        self._model, self._lengths = model, lengths
        self._ordering, self._prepaid = ordering, prepaid
        self.typical = Typical(lengths)
        self.a_token = 0.0  # seconds of a token of prefill, as last estimated
        config = scheduler.config
        self._departures = Departures(lengths, config.max_num_seqs, config.max_num_batched_tokens)
        self._step_number = 0

    def arrived(self, sequence: Sequence, output: float) -> None:
        """Learn from a newcomer, whose answer is expected to have so many tokens."""
        prompt, cached = len(sequence.prompt), self._backlog.num_cached_tokens(sequence)
        price = self._prepaid(prompt, output, cached)
        self.typical.observe(sequence.tenant, prompt - cached, output, price)

    def of(self, sequence: Sequence, now: float) -> Estimate:
        """Returns the estimate for a sequence that arrives now."""
        cached = self._backlog.num_cached_tokens(sequence)
        around = self._around(sequence)
        own, others = around.ahead() if self._backlog.total.count else (NOTHING, NOTHING)
        step = self._step(sequence, cached, own, others, around)
        self.a_token = a_token = step.seconds / step.prefill_tokens
        prompt = (len(sequence.prompt) - cached) * a_token
        wait = self._wait(own, others, step)
        soonest = self._pipeline.remaining(now) + step.seconds / 2
        first = soonest + wait + prompt
        output = self._lengths.quantile(sequence.tenant, sequence.max_tokens, OUTPUT_QUANTILE)
        last = first + self._decoding(output - 1, sequence, step)
        others_wait = partial(self._wait, NOTHING, others, step)
        ahead = step.in_progress + own.tokens + others.tokens + len(sequence.prompt) - cached
        behind: list[Delayed] = []
        for _, _, one, tokens in around.behind(step.behind):
            ahead += tokens
            behind.append((one, soonest + ahead * a_token))
        return Estimate(first, last, wait, others_wait, prompt, a_token, behind)

    def alone(self, sequence: Sequence) -> float:
        """Returns the seconds of prefill on a machine that does nothing else: no schedule is faster."""
        config, model = self._scheduler.config, self._model.fitted
        cached = self._scheduler.num_cached_tokens(sequence)
        steps, rest = divmod(sequence.num_tokens - cached, config.max_num_batched_tokens)
        whole = model.seconds(StepWork(prefill_tokens=config.max_num_batched_tokens))
        return steps * whole + (model.seconds(StepWork(prefill_tokens=rest)) if rest else 0.0)

    def _around(self, sequence: Sequence) -> Surroundings:
        ordering, backlog, typical = self._ordering, self._backlog, self.typical
        if isinstance(ordering, FairQueue):
            return InFairOrder(sequence, backlog, typical, ordering)
        line, held = ordering.around(sequence), self._scheduler.held_tenants
        if held:
            line = Line(*([one for one in part if one.tenant not in held] for part in line))
        return InListedOrder(sequence, backlog, typical, line, sequence.tenant in held)

    def _step(
        self, sequence: Sequence, cached: int, own: WorkAhead, others: WorkAhead, around: Surroundings
    ) -> _CurrentStep:
        scheduler = self._scheduler
        scheduled = scheduler.in_flight[-1] if scheduler.in_flight else None
        decodes, context = (scheduled.batch.num_decodes, scheduled.decode_context) if scheduled else (0, 0)
        running = scheduler.running.values()
        interval = min([s.token_interval for s in running if s.token_interval is not None], default=None)
        budget = scheduler.token_budget - decodes
        mean_context = (len(sequence.prompt) + cached) // 2
        prefill = max(1, scheduler.prefill_budget(decodes, context, interval).fits(mean_context, budget))
        work = StepWork(prefill, decodes, context, mean_context, prefill * mean_context)
        seconds = self._model.fitted.seconds(work)
        beside = around.tokens_beside(own.tokens + others.tokens)
        before = scheduler.prefilling_before(sequence, beside + len(sequence.prompt) - cached, prefill)
        prefilling = [one for one in running if one.num_computed_tokens < one.num_admitted_tokens]
        before += around.blocking([one for one in prefilling if one not in before])
        due = self._backlog.aging.due
        behind = [
            (due(one), 0, one, one.num_admitted_tokens - one.num_computed_tokens)
            for one in prefilling
            if one.is_pressing and one not in before
        ]
        in_progress = sum([one.num_admitted_tokens - one.num_computed_tokens for one in before])
        return _CurrentStep(prefill, seconds, decodes, context, in_progress, behind, sequence.priority_class)

    def _decoding(self, tokens: float, sequence: Sequence, step: _CurrentStep) -> float:
        """Returns the seconds of so many steps: full ones while prompts wait, then such as lately, or its own alone."""
        full = min(tokens, (step.in_progress + self._backlog.total.tokens) / step.prefill_tokens)
        alone = self._model.fitted.seconds(StepWork(decode_tokens=1, decode_context=sequence.num_tokens))
        return full * step.seconds + (tokens - full) * min(step.seconds, max(alone, self._pipeline.typical))

    def _wait(self, own: WorkAhead, others: WorkAhead, step: _CurrentStep) -> float:
        """Returns the seconds until the newcomer's own prefill: that of others, or a slot and memory if they take
        longer.
        """
        tokens = step.in_progress + own.tokens + others.tokens
        steps, of_decodes = self._until_place(own.requests + others.requests, own.steps + others.steps, step)
        if not steps:
            return tokens * step.seconds / step.prefill_tokens
        decodes = StepWork(0, step.decodes, step.decode_context)
        a_token = (step.seconds - self._model.fitted.seconds(decodes)) / step.prefill_tokens
        return max(tokens * step.seconds / step.prefill_tokens, steps * of_decodes + tokens * a_token)

    def _until_place(self, requests: float, work: float, step: _CurrentStep) -> tuple[int, float]:
        """Returns the steps until it has a slot and memory, with so many requests before it whose answers take so many
        steps; and the seconds of a step without prefill.
        """
        scheduler, typical = self._scheduler, self.typical
        running, config = scheduler.running, scheduler.config
        free = config.max_num_seqs - len(running)
        memory = scheduler.kv_manager.num_available * config.block_size / typical.total if typical.total else inf
        places = min(free, memory)
        lacking = requests + 1 - places
        if lacking <= 0:
            return 0, 0.0
        if running and memory > free:
            if step.giving_way is None:
                step.giving_way = self._would_give_way(step.priority_class)
            lacking -= min(step.giving_way, memory - free)
        free = int(places)
        if lacking <= 0 or not (running or free):
            return 0, 0.0
        if scheduler.in_flight:
            self._step_number = scheduler.in_flight[-1].batch.step
        self._departures.follow(running, self._step_number, scheduler.counters.admissions)
        output = typical.answer
        joining = max(0, len(running) + free - step.decodes)
        context = step.decode_context + round(joining * (typical.prompt + output / 2))
        decodes = StepWork(0, step.decodes + joining, context)
        return self._departures.steps_until(lacking, work, free, output), self._model.fitted.seconds(decodes)

    def _would_give_way(self, priority_class: int) -> int:
        """Returns the number of those running that would give their slots to a sequence of this class."""
        most = self._scheduler.config.max_preemptions
        lower = [s for s in self._scheduler.running.values() if s.priority_class > priority_class]
        return sum(s.num_preemptions < most for s in lower)
