"""When a newcomer's first and last token will come, as far as the present state tells.

    first token = steps in flight + max(prefill, places) + half a step          seconds from now
    prefill     = (prefill in progress + waiting ahead in policy order + its own) / tokens a step * step
    last token  = first token + full * step + (output quantile - full) * min(step, max(own step, recent steps))
    full        = steps until all that waits is prefilled, at most the output quantile

A step carries what the decodes and the promised intervals leave of the token budget. Under the fair queue, what is
ahead of a newcomer is its tenant's own waiting work before it and, of every other tenant, no more than its credit lets
pass meanwhile. `LOOKED_AT` of the others are looked at, those that have waited longest; any beyond them count as having
the mean credit of these, and as coming before the newcomer whatever their age. Adding to the backlog never lowers an
estimate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from admission.aging import Aging
from admission.backlog import Backlog, Caps, Turn
from admission.lenient_queue import LenientFairQueue
from admission.output_length import OutputLengths
from admission.pace import Pace
from admission.pipeline import Pipeline
from admission.step_time import StepTimeModel, StepWork
from backend.scheduler import Scheduler
from backend.sequence import Sequence

OUTPUT_QUANTILE = 0.9
HEAD_START = 0.4  # of the prefill time beyond the typical prompt's
LOOKED_AT = 64  # other tenants, in one estimate
_FORGET = 0.02  # share of a running mean that each newcomer replaces

Price = Callable[[Sequence], float]
"""What a newcomer prepays, in the unit of account."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """In seconds; the first two from now."""

    first_token: float
    last_token: float
    own_wait: float  # the part of it that its tenant's waiting work causes
    prefill: float  # its own
    typical_prefill: float  # what the typical prompt would take in its place
    head_start: float  # that it gets for having to start sooner, if it has a deadline


@dataclass(frozen=True, slots=True)
class _Step:
    """The step that a prefill meets now."""

    room: int  # prefill tokens
    seconds: float
    in_progress: int  # prefill tokens of those running, of classes as urgent


class Typical:
    """Running means over newcomers, by which work in tokens is turned into work in other units."""

    def __init__(self) -> None:
        self.prompt = 0.0  # tokens
        self.total = 0.0  # tokens of prompt and expected output
        self.price = 0.0  # prepaid, in the unit of account

    def observe(self, prompt: int, total: float, price: float) -> None:
        weight = _FORGET if self.prompt else 1.0
        self.prompt += weight * (prompt - self.prompt)
        self.total += weight * (total - self.total)
        self.price += weight * (price - self.price)


class Estimator:
    """Reads the scheduler, the backlog and the fair queue; changes none of them. O(running + `LOOKED_AT`)."""

    def __init__(
        self,
        scheduler: Scheduler,
        backlog: Backlog,
        pipeline: Pipeline,
        model: StepTimeModel,
        lengths: OutputLengths,
        pace: Pace,
        aging: Aging,
        price: Price,
    ) -> None:
        self._scheduler, self._backlog, self._pipeline = scheduler, backlog, pipeline
        self._model, self._lengths, self._pace = model, lengths, pace
        self.aging, self._price = aging, price
        self._fair = scheduler.waiting if isinstance(scheduler.waiting, LenientFairQueue) else None
        self.typical = Typical()

    def arrived(self, sequence: Sequence) -> None:
        """Learn from a newcomer."""
        prompt = len(sequence.prompt)
        expected = self._lengths.mean(sequence.tenant, sequence.max_tokens)
        self.typical.observe(prompt, prompt + expected, self._price(sequence))

    def of(self, sequence: Sequence, now: float) -> Estimate:
        """For a sequence that arrives now."""
        step = self._step(sequence)
        a_token = step.seconds / step.room
        prompt, typical = len(sequence.prompt) * a_token, self.typical.prompt * a_token
        head_start = HEAD_START * max(0.0, prompt - typical) if sequence.is_pressing else 0.0
        own, others = self._ahead(sequence, now, head_start)
        prefill = (step.in_progress + own + others) * a_token + prompt
        wait = max(prefill, self._wait_for_place(sequence, own + others, step) + prompt)
        first = self._pipeline.remaining(now) + wait + step.seconds / 2
        output = self._lengths.quantile(sequence.tenant, sequence.max_tokens, OUTPUT_QUANTILE)
        last = first + self._decoding(output - 1, sequence, step)
        return Estimate(first, last, own * a_token, prompt, typical, head_start)

    def alone(self, sequence: Sequence) -> float:
        """Seconds of prefill on a machine that does nothing else: no schedule is faster."""
        config, model = self._scheduler.config, self._model.fitted
        steps, rest = divmod(sequence.num_tokens, config.max_num_batched_tokens)
        whole = model.seconds(StepWork(prefill_tokens=config.max_num_batched_tokens))
        return steps * whole + (model.seconds(StepWork(prefill_tokens=rest)) if rest else 0.0)

    def _step(self, sequence: Sequence) -> _Step:
        scheduler = self._scheduler
        flight = scheduler.in_flight[-1] if scheduler.in_flight else None
        decodes, context = (flight.batch.num_decodes, flight.decode_context) if flight else (0, 0)
        in_progress, interval = 0, None
        for running in scheduler.running.values():
            left = running.num_admitted_tokens - running.num_computed_tokens
            if left > 0 and running.priority_class <= sequence.priority_class:
                in_progress += left
            if running.token_interval is not None and (interval is None or running.token_interval < interval):
                interval = running.token_interval
        budget, mean_context = scheduler.token_budget - decodes, len(sequence.prompt) // 2
        room = max(1, self._pace.prefill_room(decodes, context, interval, budget).fits(mean_context, budget))
        work = StepWork(room, decodes, context, mean_context, room * mean_context)
        return _Step(room, self._model.fitted.seconds(work), in_progress)

    def _decoding(self, tokens: float, sequence: Sequence, step: _Step) -> float:
        """Seconds of so many steps: full ones while prompts wait, then such as there were lately, or its own alone."""
        full = min(tokens, (step.in_progress + self._backlog.total.tokens) / step.room)
        alone = self._model.fitted.seconds(StepWork(decode_tokens=1, decode_context=sequence.num_tokens))
        return full * step.seconds + (tokens - full) * min(step.seconds, max(alone, self._pipeline.typical))

    def _ahead(self, sequence: Sequence, now: float, head_start: float) -> tuple[float, float]:
        """Waiting tokens that are computed before the newcomer's: of its own tenant, and of others."""
        backlog, tenant = self._backlog, sequence.tenant
        turn = Turn.of(sequence, now, head_start, self.aging)
        own = backlog.tokens_before(tenant, turn)
        if self._fair is None:
            return own, backlog.total.tokens - own
        tokens_of = self._tokens_a_price
        rounds = self._fair.rounds_before(tenant, own / tokens_of if tokens_of else 0.0)
        return own, self._of_others(self._fair, tenant, rounds, turn)

    def _of_others(self, fair: LenientFairQueue, tenant: str, rounds: int, turn: Turn) -> float:
        """Of each that is looked at, what its credit lets pass, and where it is older its leeway; and of the rest."""
        seen = dict(islice(self._backlog.tenants(), LOOKED_AT))
        seen.pop(tenant, None)
        after = [fair.credit_after(name, rounds) for name in seen]
        in_turn = self._tokens_for(after)
        early = self._tokens_for([credit + fair.leeway for credit in after])
        ahead = sum(
            max(min(waiting.load.tokens, reach), min(waiting.tokens_before(turn), reach_early))
            for waiting, reach, reach_early in zip(seen.values(), in_turn, early, strict=True)
        )
        if self._backlog.num_tenants > LOOKED_AT:
            mean = Caps(turn.priority_class, sum(early) / len(seen), sum(in_turn) / len(seen))
            ahead += self._backlog.within(mean, besides=(tenant, *seen))
        return ahead

    def _tokens_for(self, amounts: list[float]) -> list[float]:
        """That such credits let pass. Whoever may be served at all is served a whole prompt."""
        tokens_of, more = self._tokens_a_price, self.typical.prompt / 2
        return [credit * tokens_of + more if credit > 0 else 0.0 for credit in amounts]

    @property
    def _tokens_a_price(self) -> float:
        """Prefill tokens for each unit of account that newcomers prepay."""
        return self.typical.prompt / self.typical.price if self.typical.price else 0.0

    def _wait_for_place(self, sequence: Sequence, ahead: float, step: _Step) -> float:
        """Seconds until those ahead and the newcomer have a slot and memory each, at the rate at which answers end."""
        scheduler = self._scheduler
        running = len(scheduler.running)
        tokens = scheduler.pool.num_free * scheduler.config.block_size
        by_memory = tokens / self.typical.total if self.typical.total else float("inf")
        places = min(scheduler.config.max_num_seqs - running, by_memory)
        lacking = (ahead / self.typical.prompt if self.typical.prompt else 0.0) + 1 - places
        if lacking <= 0 or not running:
            return 0.0
        length = self._lengths.mean(sequence.tenant, sequence.max_tokens)
        return lacking * length / running * step.seconds
