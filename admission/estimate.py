"""Estimates when a newcomer's first and last token will come, as far as the present state tells.

    first token = steps in flight + max(prefill, place) + half a step           seconds from now
    prefill     = (prefill in progress + waiting ahead in policy order + its own) / tokens a step * step
    place       = steps until it has a slot and memory * step of decodes + that prefill beside them + its own prefill
    last token  = first token + full * step + (output quantile - full) * min(step, max(own step, recent steps))
    full        = steps until all that waits is prefilled, at most the output quantile

A step carries what the decodes and the promised intervals leave of the token budget. Ahead of a newcomer is what its
order lists before it (`ListedOrdering`), and of the prompts that are being computed those that would not let it go
first, or for which something before it waits. Under the fair queue, which is not listed whole, what is
ahead of a newcomer is its tenant's own waiting work before it and, of every other tenant, no more than its credit lets
pass meanwhile. `TENANTS_EXAMINED` of the others are looked at, those that have waited longest; any beyond them count
as having the mean credit of these, and as coming before the newcomer whatever their age. Adding to the backlog never
lowers an estimate.

Each request ahead takes a slot, and so does the newcomer. Where they are more than the slots that are free, or that a
lower class would give up for it, or than the free memory holds of typical requests, answers have to end first
(`departures`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf
from operator import itemgetter
from typing import NamedTuple

from admission.aging import Aging
from admission.backlog import Backlog, QueuePosition, TokenCaps, WorkAhead
from admission.departures import Departures
from admission.orderings.fair_queue import FairQueue
from admission.orderings.ordering import Line, ListedOrdering
from admission.output_length import OutputLengths
from admission.step_time import Pipeline, StepTimeModel, StepWork, plain_sum
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence

OUTPUT_QUANTILE = 0.9
TENANTS_EXAMINED = 64  # other tenants, in one estimate
_FORGET = 0.02  # share of a running mean that each newcomer replaces


class Delayed(NamedTuple):
    """A sequence that comes behind a newcomer and has a promise to keep."""

    sequence: Sequence
    first_token: float  # seconds from now until its first token is expected, with the newcomer before it


@dataclass(slots=True)  # one is made for each newcomer, and frozen ones cost three times as much
class Estimate:
    """The estimate for one newcomer, in seconds; the first two are from now."""

    first_token: float
    last_token: float
    wait: float  # until its own prefill
    others_wait: Callable[[], float]  # how long it would be without its tenant's waiting work: for refusals, at once
    prefill: float  # its own
    a_token: float  # of any prefill
    behind: Callable[[], list[Delayed]]  # those who would have to wait for it: before anything changes

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
    behind: list[tuple[float, int, Sequence]]  # of those running with pressing deadlines that do not: keys, tokens
    priority_class: int  # of whose estimate it is
    giving_way: int | None = None  # those running that would give their slots to its class; counted when asked for


_NOTHING = WorkAhead(0, 0, 0)
_KEY = itemgetter(0)


class Typical:
    """Running means over newcomers, by which work in tokens is turned into work in other units."""

    def __init__(self) -> None:
        self.prompt = 0.0  # tokens
        self.total = 0.0  # tokens of prompt and expected output
        self.price = 0.0  # prepaid, in the unit of account
        self.answer = 1.0  # expected tokens of the output; at least one
        self.tokens_a_price = 0.0  # prefill tokens for each unit of account that newcomers prepay

    def observe(self, prompt: int, total: float, price: float) -> None:
        weight = _FORGET if self.prompt else 1.0
        self.prompt += weight * (prompt - self.prompt)
        self.total += weight * (total - self.total)
        self.price += weight * (price - self.price)
        self.answer = max(1.0, self.total - self.prompt)
        self.tokens_a_price = self.prompt / self.price if self.price else 0.0


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
        aging: Aging,
        prepaid: Callable[[int, float, int], float],
    ) -> None:
        """`prepaid` returns the amount that a request prepays, by the tokens of its prompt, of its expected output, and
        those of its prompt that are cached.
        """
        self._scheduler, self._backlog, self._pipeline = scheduler, backlog, pipeline
        self._model, self._lengths = model, lengths
        self.aging, self._prepaid = aging, prepaid
        self._ordering = ordering
        self.typical = Typical()
        self.a_token = 0.0  # seconds of a token of prefill, as last estimated
        config = scheduler.config
        self._departures = Departures(lengths, config.max_num_seqs, config.max_num_batched_tokens)
        self._step_number = 0
        self._answers: dict[str, float] = {}  # by tenant, running means of the expected lengths

    def arrived(self, sequence: Sequence, output: float) -> None:
        """Learn from a newcomer, whose answer is expected to have so many tokens."""
        prompt, cached = len(sequence.prompt), self._backlog.num_cached_tokens(sequence)
        self.typical.observe(prompt - cached, prompt - cached + output, self._prepaid(prompt, output, cached))
        answer = self._answers.get(sequence.tenant, output)
        self._answers[sequence.tenant] = answer + _FORGET * (output - answer)

    def of(self, sequence: Sequence, now: float) -> Estimate:
        """Returns the estimate for a sequence that arrives now."""
        cached = self._backlog.num_cached_tokens(sequence)
        position = QueuePosition.of(sequence, self.aging)
        line = self._line(self._ordering, sequence) if not isinstance(self._ordering, FairQueue) else None
        own, others = self._ahead(sequence, position, line) if self._backlog.total.count else (_NOTHING, _NOTHING)
        step = self._step(sequence, cached, own, others, line)
        self.a_token = a_token = step.seconds / step.prefill_tokens
        prompt = (len(sequence.prompt) - cached) * a_token
        wait = self._wait(own, others, step)
        soonest = self._pipeline.remaining(now) + step.seconds / 2
        first = soonest + wait + prompt
        output = self._lengths.quantile(sequence.tenant, sequence.max_tokens, OUTPUT_QUANTILE)
        last = first + self._decoding(output - 1, sequence, step)
        others_wait = partial(self._wait, _NOTHING, others, step)
        ahead = step.in_progress + own.tokens + others.tokens + len(sequence.prompt) - cached
        behind = partial(self._behind, position, line, step, soonest, ahead)
        return Estimate(first, last, wait, others_wait, prompt, a_token, behind)

    def alone(self, sequence: Sequence) -> float:
        """Returns the seconds of prefill on a machine that does nothing else: no schedule is faster."""
        config, model = self._scheduler.config, self._model.fitted
        cached = self._scheduler.num_cached_tokens(sequence)
        steps, rest = divmod(sequence.num_tokens - cached, config.max_num_batched_tokens)
        whole = model.seconds(StepWork(prefill_tokens=config.max_num_batched_tokens))
        return steps * whole + (model.seconds(StepWork(prefill_tokens=rest)) if rest else 0.0)

    def _behind(
        self, position: QueuePosition, line: Line | None, step: _CurrentStep, soonest: float, ahead: float
    ) -> list[Delayed]:
        """Returns those that come behind a newcomer, in their order, if so many tokens with its own come before them:
        under the fair queue those with pressing deadlines alone. O(all of them).
        """
        if line is not None:
            later = self._merged(step, line)
        elif position.is_pressing:
            later = [(key, tokens, one) for key, _, one, tokens in self._backlog.pressing.due_after(position.key)]
            if step.behind:
                later = sorted(step.behind + later, key=_KEY)
        else:
            return []
        a_token, delayed = step.seconds / step.prefill_tokens, []
        for _, tokens, sequence in later:
            ahead += tokens
            delayed.append(Delayed(sequence, soonest + ahead * a_token))
        return delayed

    def _merged(self, step: _CurrentStep, line: Line) -> list[tuple[float, int, Sequence]]:
        """Returns all behind a newcomer: those running, which let go first who is due earlier, and those waiting."""
        running, later = sorted(step.behind, key=_KEY, reverse=True), []
        for one in line.behind:
            key = self.aging.due(one)
            while running and running[-1][0] <= key:
                later.append(running.pop())
            later.append((key, self._backlog.tokens_of(one), one))
        return later + running[::-1]

    def _step(
        self, sequence: Sequence, cached: int, own: WorkAhead, others: WorkAhead, line: Line | None
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
        ahead = self._backlog.total.tokens if line is None else int(own.tokens + others.tokens)
        before = scheduler.prefilling_before(sequence, ahead + len(sequence.prompt) - cached, prefill)
        if line is not None and line.before:
            before = self._with_blocking(before, max(map(self.aging.due, line.before)))
        behind = [
            (self.aging.due(one), one.num_admitted_tokens - one.num_computed_tokens, one)
            for one in running
            if one.num_computed_tokens < one.num_admitted_tokens and one.is_pressing and one not in before
        ]
        in_progress = sum([one.num_admitted_tokens - one.num_computed_tokens for one in before])
        return _CurrentStep(prefill, seconds, decodes, context, in_progress, behind, sequence.priority_class)

    def _with_blocking(self, before: list[Sequence], last: float) -> list[Sequence]:
        """Returns those running that go before a newcomer, and those that it could go before if it did not come behind
        one that waits for them: due no later than the last of those before it.
        """
        due = self.aging.due
        blocking = [
            one
            for one in self._scheduler.running.values()
            if one.num_computed_tokens < one.num_admitted_tokens and due(one) <= last and one not in before
        ]
        return before + blocking

    def _decoding(self, tokens: float, sequence: Sequence, step: _CurrentStep) -> float:
        """Returns the seconds of so many steps: full ones while prompts wait, then such as lately, or its own alone."""
        full = min(tokens, (step.in_progress + self._backlog.total.tokens) / step.prefill_tokens)
        alone = self._model.fitted.seconds(StepWork(decode_tokens=1, decode_context=sequence.num_tokens))
        return full * step.seconds + (tokens - full) * min(step.seconds, max(alone, self._pipeline.typical))

    def _line(self, ordering: ListedOrdering, sequence: Sequence) -> Line:
        """Returns those that wait around a newcomer, without those of tenants that are held."""
        line, held = ordering.around(sequence), self._scheduler.held_tenants
        if not held:
            return line
        return Line(*([one for one in part if one.tenant not in held] for part in line))

    def _ahead(self, sequence: Sequence, position: QueuePosition, line: Line | None) -> tuple[WorkAhead, WorkAhead]:
        """Returns the waiting work that is served before the newcomer: of its own tenant, and of others."""
        backlog, tenant, fair = self._backlog, sequence.tenant, self._ordering
        if line is not None or not isinstance(fair, FairQueue):
            return self._ahead_in(line or Line([], []), sequence)
        tokens, requests = backlog.before(tenant, position)
        patient = self._of_others(fair, tenant, tokens, position)
        pressing_tokens = pressing = 0
        for _, _, other, left in backlog.pressing.due_by(position.key):
            if other.tenant == tenant:
                tokens += left
                requests += 1
            elif position.is_pressing or not fair.outranks(sequence, other):
                pressing_tokens += left
                pressing += 1
        steps = patient.steps + pressing * self.typical.answer
        others_ahead = WorkAhead(patient.tokens + pressing_tokens, patient.requests + pressing, steps)
        return self._of_own(sequence, tokens, requests), others_ahead

    def _ahead_in(self, line: Line, sequence: Sequence) -> tuple[WorkAhead, WorkAhead]:
        tenant, tokens_of = sequence.tenant, self._backlog.tokens_of
        own = [tokens_of(one) for one in line.before if one.tenant == tenant]
        others = [tokens_of(one) for one in line.before if one.tenant != tenant]
        tokens, requests = sum(own), len(own)
        if tenant in self._scheduler.held_tenants:
            load = self._backlog.of(tenant)
            tokens, requests = load.tokens, load.count
        steps = len(others) * self.typical.answer
        return self._of_own(sequence, tokens, requests), WorkAhead(sum(others), len(others), steps)

    def _of_own(self, sequence: Sequence, tokens: int, requests: int) -> WorkAhead:
        if not requests:
            return _NOTHING
        return WorkAhead(tokens, requests, requests * self._lengths.mean(sequence.tenant, sequence.max_tokens))

    def _of_others(self, fair: FairQueue, tenant: str, own_tokens: int, position: QueuePosition) -> WorkAhead:
        """Returns the work of other tenants without pressing deadlines that goes first: of each that is examined, what
        its credit lets pass, and before what is pressing no more than is due earlier; nothing of those that the tenant
        outranks; of the rest by their mean.
        """
        seen = dict(islice(self._backlog.tenants(), TENANTS_EXAMINED))
        seen.pop(tenant, None)
        if not seen:
            return _NOTHING
        tokens_of = self.typical.tokens_a_price
        rounds = fair.rounds_before(tenant, own_tokens / tokens_of if tokens_of else 0.0)
        reaches = self._tokens_for(fair.credits_after(seen, rounds))
        is_pressing = position.is_pressing and fair.credit(tenant) > -fair.deadline_debt_limit
        a_request = 1 / self.typical.prompt if self.typical.prompt else 0.0
        answers, answer = self._answers, self.typical.answer
        tokens = requests = steps = 0.0
        for (name, waiting), reach in zip(seen.items(), reaches, strict=True):
            if fair.shares.is_beyond(name) and fair.shares.is_within(tenant):
                continue
            is_overtaken = is_pressing and not (fair.shares.is_within(name) and fair.shares.is_beyond(tenant))
            most, most_requests = waiting.before(position) if is_overtaken else waiting.patient
            passing = float(most_requests)
            if reach < most:
                tokens += reach
                passing = min(passing, reach * a_request)
            else:
                tokens += most
            requests += passing
            steps += passing * answers.get(name, answer)
        if self._backlog.num_tenants > TENANTS_EXAMINED:
            mean = TokenCaps(position.priority_class, *2 * [plain_sum(reaches) / len(seen)])
            rest = self._backlog.within(mean, besides=(tenant, *seen))
            tokens, requests = tokens + rest, requests + rest * a_request
            steps += rest * a_request * answer
        return WorkAhead(tokens, requests, steps)

    def _tokens_for(self, amounts: list[float]) -> list[float]:
        """Returns the tokens that such credits let pass. A tenant that may be served at all is served a whole
        prompt.
        """
        tokens_of, more = self.typical.tokens_a_price, self.typical.prompt / 2
        return [credit * tokens_of + more if credit > 0 else 0.0 for credit in amounts]

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
