"""Drafting: which tokens are likely to follow a text, and how many of them are worth a place in a step.

A draft is looked up in the text itself (prompt lookup: Saxena, 2023): answers copy from their prompts. Its row computes
the newest token and the drafted ones together, and the device draws at each of them: a draw that equals the drafted
token proves the next one (Leviathan, Kalman and Matias, 2023). A draw depends on the seed, the position and the logits
alone, so the text is the same as without drafts.

The length of a draft is the one that brings most tokens a second (SmartSpec: Liu et al., arXiv 2406.14066).
"""

from array import array
from collections.abc import Iterable, Mapping
from math import inf

from backend.config import DRAFTED_TOKENS_PER_STEP, EngineConfig
from backend.scheduler.hooks import SchedulerHooks
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence

DRAFT_TOKENS = 15  # the most of a row: with its newest token a block of 16
MIN_GAIN = 1.05  # of tokens a second: a draft is expected to bring more
STEP_GAP_S = 1e-3  # between two steps, for a step that is planned only once the one before it has ended
MAX_PLACES = 16  # that are compared in a search
MAX_RUN = 16  # tokens before a place that are compared
MAX_BUCKETS = 1 << 16  # of the last two tokens
TOKENS_READ_AT_ONCE = 2048  # of one text, in one plan: half a millisecond of the event loop
FIRST_RATES = (0.3, 0.5, 0.7, 0.85)
"""The share of looked-up tokens that come, behind runs of 2, 4, 8 and 16 tokens, before a tenant's own are known."""
RATE_MEMORY_TOKENS = 64  # after which a token counts 1/e


def expected_tokens(rate: float, drafted: int) -> float:
    """Return the mean number of tokens that a row brings: one, and the accepted ones of `drafted`, of which each is
    accepted with the same probability, up to the first that is not (Leviathan et al., 2023).
    """
    expected = power = 1.0
    for _ in range(drafted):
        power *= rate
        expected += power
    return expected


def draft_length(rate: float, chance: float, seconds: list[float], num_decodes: int, steps: int) -> int:
    """Return how many tokens to draft for one of `num_decodes` rows; 0 where none brings `MIN_GAIN` times the tokens a
    second. `seconds[n]` is the time of a step with n drafted tokens, `chance` the probability that they can be drafted:
    that the newest token, if it is in flight, is the one that was looked up.

    The row takes part in one of `steps` steps, because the step behind it is planned before its tokens are known; the
    other rows take part in all.
    """
    others = steps * (num_decodes - 1)
    least, best = MIN_GAIN * num_decodes / seconds[0], 0
    waits = (steps - 1) * seconds[0] + STEP_GAP_S
    for drafted in range(1, len(seconds)):
        own = 1.0 + chance * (expected_tokens(rate, drafted) - 1.0)
        brought = (others + own) / (waits + seconds[drafted])
        if brought > least:
            least, best = brought, drafted
    return best


class PromptLookup:
    """One sequence's text, and an earlier place where it went on as it does now.

    The place is followed as long as it tells each next token. Then another is searched among the `MAX_PLACES` newest
    places of the last two tokens: the one with the longest run of equal tokens before it, the newest of equals. A token
    takes constant time, and 12 bytes of memory.
    """

    def __init__(self, owner: int, most_tokens: int) -> None:
        self.owner = owner
        self.tokens: list[int] = []
        self.place = 0  # of the token that comes next if the text goes on as there; 0: there is none
        self.run = 0  # equal tokens before the place and at the end of the text, as far as they were compared
        self._buckets = min(MAX_BUCKETS, 1 << most_tokens.bit_length())  # a power of two
        self._newest = array("i", bytes(4 * self._buckets))  # by bucket, the place behind the newest pair
        self._earlier = array("i", bytes(8))  # by place, the place before it in its bucket

    def read(self, tokens: Iterable[int]) -> None:
        """Append tokens of which none is to be told."""
        self.place = 0
        for token in tokens:
            self._append(token)

    def follow(self, tokens: Iterable[int], rates: list[float]) -> None:
        """Append tokens, look up what follows, and learn in `rates`, by `rate_of`, how often that comes."""
        for token in tokens:
            if self.place:
                kind, comes = rate_of(self.run), self.tokens[self.place] == token
                rates[kind] += ((1.0 if comes else 0.0) - rates[kind]) / RATE_MEMORY_TOKENS
                self.place = self.place + 1 if comes else 0
                self.run += 1
            self._append(token)
            if not self.place:
                self._search()

    def draft(self, count: int) -> list[int]:
        """Return what followed the place, and again what follows that where the place is within the last tokens."""
        period = len(self.tokens) - self.place
        return [self.tokens[self.place + each % period] for each in range(count)]

    def _append(self, token: int) -> None:
        tokens = self.tokens
        tokens.append(token)
        place = len(tokens)
        if place > 1:
            bucket = (tokens[place - 2] * 31_337 + token) & (self._buckets - 1)
            self._earlier.append(self._newest[bucket])
            self._newest[bucket] = place

    def _search(self) -> None:
        tokens, end = self.tokens, len(self.tokens)
        self.run = 1
        place = self._earlier[end] if end > 1 else 0
        for _ in range(MAX_PLACES):
            if not place or self.run >= MAX_RUN:
                return
            run, most = 0, min(MAX_RUN, place)
            while run < most and tokens[place - 1 - run] == tokens[end - 1 - run]:
                run += 1
            if run > self.run:
                self.place, self.run = place, run
            place = self._earlier[place]


def rate_of(run: int) -> int:
    """Return the index of the rate that is learned behind runs of that many equal tokens, at least two."""
    return min(run, MAX_RUN).bit_length() - 2


class Drafting:
    """Decides which decodes are drafted for, and keeps their texts, by slot. The scheduler is its only caller.

    The decision is made once in a plan. A row with a draft is planned once the newest token is known; until its step
    has completed the sequence has no other row. A draft stays within the block of the row's last token, and counts for
    nothing in its sequence until its tokens are accepted.

    Decisions depend on tokens, which an event log has not: a replay is told them (`told`).
    """

    def __init__(self, config: EngineConfig, hooks: SchedulerHooks) -> None:
        self.told: Mapping[str, int] | None = None  # by sequence id, as `drafted`; None: drafts are looked up
        self.drafted: dict[Sequence, int] = {}  # in this plan, of each that is drafted for; 0: it waits for its token
        self.counts: dict[str, tuple[int, int]] = {}  # tokens drafted and accepted since the start, by tenant
        self.rates: dict[str, list[float]] = {}  # of accepted tokens, by tenant and `rate_of`
        self._config, self._hooks = config, hooks
        self._lookups: list[PromptLookup | None] = [None] * config.max_num_seqs
        # of this plan
        self._lengths: dict[Sequence, int] = {}
        self._open: Mapping[Sequence, int] = {}  # rows with drafts in flight
        self._loads: dict[int, tuple[int, int]] = {}  # by model, decodes and their contexts
        self._seconds: dict[int, list[float]] = {}  # by model, of a step with each number of drafted tokens
        self._interval = inf  # seconds between tokens, the shortest that was promised to a running sequence
        self._left = 0  # tokens that the step may draft

    def begin_plan(self, running: Iterable[Sequence], in_flight: Mapping[Sequence, int]) -> None:
        """Begin a plan beside the drafts of the step in flight."""
        self.drafted.clear()
        self._lengths.clear()
        self._seconds.clear()
        self._left = min(DRAFTED_TOKENS_PER_STEP, self._config.max_num_batched_tokens // 4)  # prompts have the rest
        self._open, self._loads, self._interval = in_flight, {}, inf
        for sequence in running if self.told is None else ():
            request = sequence.request
            if not sequence.is_prefilling or sequence.jumps:
                rows, context = self._loads.get(request.model, (0, 0))
                self._loads[request.model] = rows + 1, context + sequence.num_tokens
            if request.token_interval is not None and request.token_interval < self._interval:
                self._interval = request.token_interval

    def may_take(self, model: int) -> bool:
        """Return False if no row of a model is drafted for in this plan."""
        return bool(self._open or self._prices(model)) if self.told is None else bool(self.told)

    def takes(self, sequence: Sequence) -> bool:
        """Return True if the next row of a decode waits for its newest token, to have a draft behind it."""
        length = self._lengths.get(sequence)
        if length is None:
            if self.told is not None:
                length = DRAFT_TOKENS if sequence.id in self.told else 0
            else:
                length = 1 if self._open.get(sequence) else self._worth(sequence)
            self._lengths[sequence] = length
            if length:
                self.drafted[sequence] = 0
        return length > 0

    def draft(self, sequence: Sequence, room: int) -> list[int]:
        """Return a draft of at most `room` tokens behind the row just planned."""
        if not self.takes(sequence):
            return []
        in_block = len(sequence.block_table.blocks) * self._config.block_size - sequence.num_computed_tokens
        room = min(room, in_block, sequence.token_limit - sequence.num_tokens, self._left)
        length = max(0, min(self._lengths[sequence], room))
        if self.told is not None:
            tokens = [0] * min(length, self.told[sequence.id])
        else:
            tokens = self._tokens(sequence, length)
        self.drafted[sequence] = len(tokens)
        self._left -= len(tokens)
        return tokens

    def completed(self, scheduled: ScheduledStep) -> None:
        """Count the drafts of a step that was accounted for."""
        for sequence, count in scheduled.drafts.items():
            drafted, accepted = self.counts.get(sequence.tenant, (0, 0))
            accepted += scheduled.jumped.get(sequence, 0)
            self.counts[sequence.tenant] = drafted + count, accepted

    def _tokens(self, sequence: Sequence, length: int) -> list[int]:
        lookup = self._lookups[sequence.slot]
        assert lookup is not None
        return lookup.draft(length)

    def _worth(self, sequence: Sequence) -> int:
        """Return how many tokens to draft for a sequence; 0: none."""
        if sequence.is_spare or sequence.request.sampling.depends_on_output:
            return 0
        model = sequence.request.model
        if not (seconds := self._prices(model)):
            return 0
        rates = self.rates.get(sequence.tenant)
        if rates is None:
            rates = self.rates[sequence.tenant] = list(FIRST_RATES)
        lookup, known = self._read(sequence, rates), sequence.num_prompt_tokens + len(sequence.output)
        if not lookup.place or len(lookup.tokens) < known:
            return 0
        rate, rows, size = rates[rate_of(lookup.run)], self._loads[model][0], self._config.block_size
        seconds = seconds[: size - (sequence.num_tokens - 1) % size]  # with the newest token within one block
        return draft_length(rate, 1.0 if sequence.num_tokens == known else rate, seconds, rows, self._steps(rows))

    def _prices(self, model: int) -> list[float]:
        """Return the seconds of a model's step with each number of drafted tokens; none where even certain ones would
        not pay, and texts need not be read.
        """
        seconds = self._seconds.get(model)
        if seconds is None:
            rows, context = self._loads.get(model, (0, 0))
            predict = self._hooks.decode_seconds
            seconds = [
                predict(rows + count, context + count, model) for count in range(DRAFT_TOKENS + 1 if rows else 0)
            ]
            if rows and not draft_length(1.0, 1.0, seconds, rows, self._steps(rows)):
                seconds = []
            while seconds and self._left and predict(rows + self._left, context, model) > self._interval:
                self._left //= 2
            self._seconds[model] = seconds
        return seconds

    def _steps(self, rows: int) -> int:
        return 1 if rows == 1 else self._config.steps_in_flight

    def _read(self, sequence: Sequence, rates: list[float]) -> PromptLookup:
        """Return the sequence's text, up to its newest known token or as far as one plan reads it."""
        request, lookup = sequence.request, self._lookups[sequence.slot]
        if lookup is None or lookup.owner != sequence.admission_number:
            lookup = PromptLookup(sequence.admission_number, request.most_tokens)
            self._lookups[sequence.slot] = lookup
        known, num_prompt = len(lookup.tokens), len(request.prompt)
        if known < num_prompt:
            lookup.read(request.prompt[known : known + TOKENS_READ_AT_ONCE])
        if len(lookup.tokens) >= num_prompt:
            first = len(lookup.tokens) - num_prompt
            lookup.follow(sequence.output[first : first + TOKENS_READ_AT_ONCE], rates)
        return lookup
