"""Estimates when a newcomer's first and last token will come, as far as the present state tells.

    first token = steps in flight + max(prefill, place) + half a step           seconds from now
    prefill     = (prefill in progress + waiting ahead in policy order + its own) / tokens a step * step
    place       = steps until it has a slot and memory * step of decodes + that prefill beside them + its own prefill
    last token  = first token + full * step + (output quantile - full) * min(step, max(own step, recent steps))
    full        = steps until all that waits is prefilled, at most the output quantile

A step carries what the decodes and the promised intervals leave of the token budget. Under the fair queue, what is
ahead of a newcomer is its tenant's own waiting work before it and, of every other tenant, no more than its credit lets
pass meanwhile. `TENANTS_EXAMINED` of the others are looked at, those that have waited longest; any beyond them count
as having the mean credit of these, and as coming before the newcomer whatever their age. Adding to the backlog never
lowers an estimate.

Each request ahead takes a slot, and so does the newcomer. Where they are more than the slots that are free, or that a
lower class would give up for it, or than the free memory holds of typical requests, answers have to end first
(`departures`).
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate, count, islice
from math import ceil, inf

from admission.aging import Aging
from admission.backlog import Backlog, QueuePosition, TokenCaps, WorkAhead
from admission.orderings.fair_queue import FairQueue
from admission.output_length import OutputLengths
from admission.step_time import Pipeline, StepTimeModel, StepWork, plain_sum
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence

MOST = 8  # quantiles that one sequence stands for
ENOUGH = 128  # quantiles of all together, from which each has fewer
COARSE = 8  # of what it has generated, a share that a sequence which outlived its end is expected to last at least
_GOLDEN = 0.6180339887498949  # multiples of it, less their whole parts, are spread evenly


class Departures:
    """Expects the ends of those running. Each change since the last call costs O(log running), each call O(running)."""

    def __init__(self, lengths: OutputLengths, most_running: int, token_budget: int) -> None:
        self._lengths, self._token_budget = lengths, token_budget
        self._each = max(1, min(MOST, ENOUGH // most_running))
        self._ends: list[int] = []  # sorted numbers of steps, `_each` of each sequence
        self._of: dict[Sequence, list[int]] = {}
        self._first: list[tuple[int, int, Sequence]] = []  # heap of each one's first; those that ended leave it lazily
        self._numbers = count()
        self._sums = [0]  # of the first n ends
        self._step = 0
        self._admissions = 0

    def follow(self, running: Mapping[str, Sequence], step: int, admissions: int) -> None:
        """Note who runs now, the number of the newest step, and how many sequences were admitted until now."""
        if step == self._step and len(running) == len(self._of):
            return
        self._step = step
        joined = []
        if admissions != self._admissions:
            self._admissions = admissions
            joined = [sequence for sequence in running.values() if sequence not in self._of]
        if len(self._of) + len(joined) != len(running):
            for sequence in [one for one in self._of if one.id not in running]:
                self._drop(sequence)
        for sequence in joined:
            self._expect(sequence)
        while self._first and self._first[0][0] <= step:
            end, _, sequence = heappop(self._first)
            if sequence in self._of and self._of[sequence][0] == end:  # it outlived its first: it is like the rest
                self._drop(sequence)
                self._expect(sequence)
        self._sums = list(accumulate(self._ends, initial=0))

    def steps_until(self, lacking: float, work: float, free: int, length: float) -> int:
        """Returns the steps until a newcomer has a slot, where so many more have to end for it and those ahead to have
        one each, whose answers take `work` steps together; `free` slots more are taken now, and `length` is the typical
        answer's. Monotone: neither more that is lacking nor more work ever makes it sooner.
        """
        ends, now, each = self._ends, self._step, self._each
        first, last = int(each / 2), max(0, int((lacking - 0.5) * each))
        slots = len(ends) / each + free
        share = ceil(self._until_served(each * (work - min(work, slots * length) / 2), each * free))
        if not free:
            share = max(share, ends[first] - now)
        return max(0, share if last >= len(ends) else min(share, ends[last] - now))

    def _until_served(self, work: float, free: int) -> float:
        """Returns the steps until `free` slots, and those that come free, have given so many to those that wait."""
        ends, sums, now = self._ends, self._sums, self._step
        low, high = 0, len(ends)
        while low < high:
            middle = (low + high) // 2
            if (middle + free) * ends[middle] - sums[middle] - free * now < work:
                low = middle + 1
            else:
                high = middle
        return (work + sums[low] + free * now) / (low + free) - now if low + free else 0.0

    def _expect(self, sequence: Sequence) -> None:
        number, generated, each = next(self._numbers), len(sequence.output), self._each
        offset = number * _GOLDEN % 1.0
        shares = [(n + offset) / each for n in range(each)]
        longer = min(generated + 1 + generated // COARSE, max(sequence.max_tokens, generated + 1))
        lengths = self._lengths.quantiles(sequence.tenant, sequence.max_tokens, shares, generated, longer)
        begun = self._step - generated + max(0, sequence.num_uncomputed_tokens - 1) // self._token_budget
        self._of[sequence] = expected = [begun + length for length in lengths]
        for end in expected:
            insort(self._ends, end)
        heappush(self._first, (expected[0], number, sequence))

    def _drop(self, sequence: Sequence) -> None:
        for end in self._of.pop(sequence):
            del self._ends[bisect_left(self._ends, end)]


OUTPUT_QUANTILE = 0.9
AGE_BONUS = 0.4  # of the prefill time beyond the typical prompt's
TENANTS_EXAMINED = 64  # other tenants, in one estimate
_FORGET = 0.02  # share of a running mean that each newcomer replaces


@dataclass(slots=True)  # one is made for each newcomer, and frozen ones cost three times as much
class Estimate:
    """The estimate for one newcomer, in seconds; the first two are from now."""

    first_token: float
    last_token: float
    wait: float  # until its own prefill
    others_wait: Callable[[], float]  # how long it would be without its tenant's waiting work: for refusals, at once
    prefill: float  # its own
    typical_prefill: float  # what the typical prompt would take in its place
    age_bonus: float  # that it gets for having to start sooner, if it has a deadline

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
    in_progress: int  # prefill tokens of those running that go before it
    priority_class: int  # of whose estimate it is
    giving_way: int | None = None  # those running that would give their slots to its class; counted when asked for


_NOTHING = WorkAhead(0, 0, 0)


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
        self._fair = scheduler.waiting if isinstance(scheduler.waiting, FairQueue) else None
        self.typical = Typical()
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
        step = self._step(sequence, cached)
        a_token = step.seconds / step.prefill_tokens
        prompt, typical = (len(sequence.prompt) - cached) * a_token, self.typical.prompt * a_token
        age_bonus = AGE_BONUS * max(0.0, prompt - typical) if sequence.is_pressing else 0.0
        own, others = self._ahead(sequence, now, age_bonus) if self._backlog.total.count else (_NOTHING, _NOTHING)
        wait = self._wait(own, others, step)
        first = self._pipeline.remaining(now) + wait + prompt + step.seconds / 2
        output = self._lengths.quantile(sequence.tenant, sequence.max_tokens, OUTPUT_QUANTILE)
        last = first + self._decoding(output - 1, sequence, step)
        others_wait = partial(self._wait, _NOTHING, others, step)
        return Estimate(first, last, wait, others_wait, prompt, typical, age_bonus)

    def alone(self, sequence: Sequence) -> float:
        """Returns the seconds of prefill on a machine that does nothing else: no schedule is faster."""
        config, model = self._scheduler.config, self._model.fitted
        cached = self._scheduler.num_cached_tokens(sequence)
        steps, rest = divmod(sequence.num_tokens - cached, config.max_num_batched_tokens)
        whole = model.seconds(StepWork(prefill_tokens=config.max_num_batched_tokens))
        return steps * whole + (model.seconds(StepWork(prefill_tokens=rest)) if rest else 0.0)

    def _step(self, sequence: Sequence, cached: int) -> _CurrentStep:
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
        left = self._backlog.total.tokens + len(sequence.prompt) - cached
        in_progress = scheduler.num_prefill_tokens_before(sequence, left, prefill)
        return _CurrentStep(prefill, seconds, decodes, context, in_progress, sequence.priority_class)

    def _decoding(self, tokens: float, sequence: Sequence, step: _CurrentStep) -> float:
        """Returns the seconds of so many steps: full ones while prompts wait, then such as lately, or its own alone."""
        full = min(tokens, (step.in_progress + self._backlog.total.tokens) / step.prefill_tokens)
        alone = self._model.fitted.seconds(StepWork(decode_tokens=1, decode_context=sequence.num_tokens))
        return full * step.seconds + (tokens - full) * min(step.seconds, max(alone, self._pipeline.typical))

    def _ahead(self, sequence: Sequence, now: float, age_bonus: float) -> tuple[WorkAhead, WorkAhead]:
        """Returns the waiting work that is served before the newcomer: of its own tenant, and of others."""
        backlog, tenant = self._backlog, sequence.tenant
        position = QueuePosition.of(sequence, now, age_bonus, self.aging)
        tokens, requests = backlog.before(tenant, position)
        own = _NOTHING
        if requests:
            own = WorkAhead(tokens, requests, requests * self._lengths.mean(tenant, sequence.max_tokens))
        if self._fair is None:
            others = backlog.total.count - requests
            return own, WorkAhead(backlog.total.tokens - tokens, others, others * self.typical.answer)
        return own, self._of_others(self._fair, tenant, tokens, position)

    def _of_others(self, fair: FairQueue, tenant: str, own_tokens: int, position: QueuePosition) -> WorkAhead:
        """Returns the work of other tenants that goes first: of each that is examined, what its credit lets pass, or
        what its debt limit lets pass where it is older; and of the rest by their mean.
        """
        seen = dict(islice(self._backlog.tenants(), TENANTS_EXAMINED))
        seen.pop(tenant, None)
        if not seen:
            return _NOTHING
        tokens_of = self.typical.tokens_a_price
        rounds = fair.rounds_before(tenant, own_tokens / tokens_of if tokens_of else 0.0)
        after = fair.credits_after(seen, rounds)
        in_turn = self._tokens_for(after)
        early = self._tokens_for([credit + fair.deadline_debt_limit for credit in after])
        a_request = 1 / self.typical.prompt if self.typical.prompt else 0.0
        answers, answer = self._answers, self.typical.answer
        tokens = requests = steps = 0.0
        for (name, waiting), reach, reach_early in zip(seen.items(), in_turn, early, strict=True):
            load, passing = waiting.load, float(waiting.load.count)
            if reach >= load.tokens and reach * a_request >= passing:  # all of it passes, whatever is older
                tokens += load.tokens
            else:
                tokens_before, requests_before = waiting.before(position)
                tokens += _reached(load.tokens, reach, tokens_before, reach_early)
                passing = _reached(passing, reach * a_request, requests_before, reach_early * a_request)
            requests += passing
            steps += passing * answers.get(name, answer)
        if self._backlog.num_tenants > TENANTS_EXAMINED:
            mean = TokenCaps(position.priority_class, plain_sum(early) / len(seen), plain_sum(in_turn) / len(seen))
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


def _reached(load: float, reach: float, before: float, reach_early: float) -> float:
    """Returns the part of a load that its tenant's credit lets pass, or that is older and its debt limit lets pass."""
    in_turn = reach if reach < load else load  # noqa: FURB136 - twice for each of 64 tenants at every arrival
    early = reach_early if reach_early < before else before  # noqa: FURB136
    return early if early > in_turn else in_turn  # noqa: FURB136
