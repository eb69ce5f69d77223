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
TOKENS_READ_PER_PLAN = 2048  # of all texts: half a millisecond of the event loop
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
    takes constant time and 8 bytes of memory, beside a table of 4 to 8 bytes for each that the text may come to have,
    at most 256 KiB.
    """

    def __init__(self, most_tokens: int) -> None:
        self.tokens = array("i")
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
        """Append tokens, look up what follows the last, and learn in `rates`, by `rate_of`, how often that comes."""
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
            if most <= self.run or tokens[place - 1 - self.run] != tokens[end - 1 - self.run]:
                most = 0  # its run is no longer, which most texts of few symbols need not be compared for
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

    A plan decides for all decodes of a model at once, each time beginning with another, and reserves the places of
    their drafts: of a row that waits for its token, for the next plan too. An answer with a promised interval has
    drafts only while no prompt runs or waits, and if the steps between its tokens are expected to fit the interval.

    Decisions depend on tokens, which an event log has not: a replay is told them (`told`).
    """

    def __init__(self, config: EngineConfig, hooks: SchedulerHooks, texts: dict[int, PromptLookup]) -> None:
        self.told: Mapping[str, int] | None = None  # by sequence id, as `drafted`; None: drafts are looked up
        self.drafted: dict[Sequence, int] = {}  # in this plan, of each that is drafted for; 0: it waits for its token
        self.counts: dict[str, tuple[int, int]] = {}  # tokens drafted and accepted since the start, by tenant
        self.rates: dict[str, list[float]] = {}  # of accepted tokens, by tenant and `rate_of`
        self._config, self._hooks = config, hooks
        self._texts = texts  # by slot: the KV manager drops each with its slot
        self._num_plans = 0
        self._left = 0  # tokens that the step may draft
        # of this plan
        self._decodes: list[Sequence] = []
        self._is_alone = self._has_prompts = False
        self._lengths: dict[Sequence, int] = {}  # of drafts, and 1 of rows with drafts in flight
        self._reserved: dict[Sequence, int] = {}  # by the last plan, for rows that waited
        self._late: set[Sequence] = set()  # with a promised interval, and without a row in the last step
        self._loads: dict[int, tuple[int, int]] = {}  # by model, decodes and their contexts
        self._seconds: dict[int, list[float]] = {}  # by model, of a step with each number of drafted tokens
        self._interval = inf  # seconds between tokens, the shortest that was promised to a running sequence
        self._slack = inf  # seconds that drafts may add to the step within that interval
        self._unread = 0  # tokens that the plan may read

    def begin_plan(self, running: list[Sequence], is_asked: bool, step: int, in_flight: Mapping[Sequence, int]) -> None:
        """Begin the plan of a step beside the drafts of the one in flight. `is_asked`: other sequences wait."""
        waited = [sequence for sequence, count in self.drafted.items() if not count]
        self._reserved = {sequence: self._lengths.get(sequence, 0) for sequence in waited}
        self.drafted.clear()
        self._decodes = [s for s in running if not s.is_prefilling or s.jumps]
        promised = [s for s in self._decodes if s.request.token_interval is not None]
        self._late = {s for s in promised if s.last_step < step - 1}
        self._lengths = {sequence: 1 for sequence, count in in_flight.items() if count}
        if self.told is not None:
            return
        self._num_plans += 1
        self._unread = TOKENS_READ_PER_PLAN
        self._is_alone = len(running) == 1 and not is_asked
        self._has_prompts = is_asked or len(self._decodes) < len(running)
        self._interval = min(self._intervals(promised), default=inf)
        self._seconds, self._loads = {}, {}
        self._left = min(DRAFTED_TOKENS_PER_STEP, self._config.max_num_batched_tokens // 4)  # prompts have the rest
        self._decodes = [s for s in self._decodes if not s.is_spare]
        for sequence in self._decodes:
            rows, context = self._loads.get(sequence.request.model, (0, 0))
            self._loads[sequence.request.model] = rows + 1, context + sequence.num_tokens

    def may_take(self, model: int) -> bool:
        """Return False if no row of a model is drafted for in this plan."""
        if self.told is not None:
            return bool(self.told)
        if model not in self._seconds and self._prices(model):
            rows = [s for s in self._decodes if s.request.model == model]
            self._left -= sum([self._reserved.get(sequence, 0) for sequence in rows])
            first = self._num_plans % len(rows)
            for sequence in (*rows[first:], *rows[:first]):
                if sequence not in self._lengths:
                    self._decide(sequence)
        return bool(self._lengths)

    def _decide(self, sequence: Sequence) -> None:
        self._left += self._reserved.pop(sequence, 0)
        room = min(self._left, sequence.token_limit - sequence.num_tokens - 1)
        if room > 0 and (length := min(room, self._worth(sequence, room))):
            self._lengths[sequence] = length
            self._left -= length

    def takes(self, sequence: Sequence) -> bool:
        """Return True if the next row of a decode waits for its newest token, to have a draft behind it."""
        if (sequence in self._lengths) if self.told is None else (sequence.id in self.told):
            self.drafted.setdefault(sequence, 0)
            return True
        return False

    def intervals(self, rows: Iterable[Sequence]) -> list[float]:
        """Return the intervals promised to these rows and to those that wait for a draft, in which the step has to end:
        half of one if two steps have to fit, because its row waits in this one or waited in the last.
        """
        waiting = self.drafted.keys() - set(rows)
        return self._intervals(rows) + [each / 2 for s in waiting if (each := s.request.token_interval) is not None]

    def _intervals(self, rows: Iterable[Sequence]) -> list[float]:
        promised = [(s, each) for s in rows if (each := s.request.token_interval) is not None]
        return [each / 2 if s in self._late else each for s, each in promised]

    def draft(self, sequence: Sequence, room: int) -> list[int]:
        """Return a draft of at most `room` tokens behind the row just planned."""
        if not self.takes(sequence):
            return []
        in_block = len(sequence.block_table.blocks) * self._config.block_size - sequence.num_computed_tokens
        room = max(0, min(room, in_block, sequence.token_limit - sequence.num_tokens))
        if self.told is not None:
            tokens = [0] * min(room, self.told[sequence.id])
        else:
            tokens = self._tokens(sequence, min(room, self._lengths[sequence]))
        self.drafted[sequence] = len(tokens)
        return tokens

    def completed(self, scheduled: ScheduledStep) -> None:
        """Count the drafts of a step that was accounted for."""
        for sequence, count in scheduled.drafts.items():
            drafted, accepted = self.counts.get(sequence.tenant, (0, 0))
            accepted += scheduled.jumped.get(sequence, 0)
            self.counts[sequence.tenant] = drafted + count, accepted

    def _tokens(self, sequence: Sequence, length: int) -> list[int]:
        return self._texts[sequence.slot].draft(length)

    def _worth(self, sequence: Sequence, room: int) -> int:
        """Return how many tokens to draft for a sequence, where there is room; 0: none."""
        request, size, steps = sequence.request, self._config.block_size, self._steps
        if request.sampling.depends_on_output:
            return 0
        room = min(room, size - 1 - (sequence.num_tokens - 1) % size)
        if not room or self._unread <= 0 or (request.token_interval is not None and self._has_prompts):
            return 0
        rates = self.rates.get(sequence.tenant)
        if rates is None:
            rates = self.rates[sequence.tenant] = list(FIRST_RATES)
        lookup, known = self._read(sequence, rates), sequence.num_prompt_tokens + len(sequence.output)
        if not lookup.place or len(lookup.tokens) < known:
            return 0
        rate, (rows, _) = rates[rate_of(lookup.run)], self._loads[request.model]
        alone, *seconds = self._prices(request.model)[: 1 + room]
        reading, start = self._hooks.draft_seconds, sequence.num_tokens - 1
        most = alone + self._slack
        if request.token_interval is not None:
            most = min(most, request.token_interval - (steps - 1) * alone)
        seconds = [each + reading(start, length, request.model) for length, each in enumerate(seconds, 2)]
        seconds = [alone, *[each for each in seconds if each <= most]]
        length = draft_length(rate, 1.0 if sequence.num_tokens == known else rate, seconds, rows, steps)
        self._slack -= max(0.0, seconds[length] - alone)
        return length

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
            if rows and not draft_length(1.0, 1.0, seconds, rows, self._steps):
                seconds = []
            if seconds:
                self._slack = self._interval - seconds[0]
            while seconds and self._left > 0 and predict(rows + self._left, context, model) > self._interval:
                self._left //= 2
            self._seconds[model] = seconds
        return seconds

    @property
    def _steps(self) -> int:
        """One of how many steps has a row of a sequence that is drafted for."""
        return 1 if self._is_alone else self._config.steps_in_flight

    def _read(self, sequence: Sequence, rates: list[float]) -> PromptLookup:
        """Return the sequence's text, up to its newest known token or as far as the plan may read."""
        request, lookup = sequence.request, self._texts.get(sequence.slot)
        if lookup is None:
            lookup = self._texts[sequence.slot] = PromptLookup(request.most_tokens)
        known, num_prompt = len(lookup.tokens), len(request.prompt)
        if known < num_prompt:
            lookup.read(request.prompt[known : known + self._unread])
            self._unread -= len(lookup.tokens) - known
        known = len(lookup.tokens)
        if known >= num_prompt and self._unread > 0:
            lookup.follow(sequence.output[known - num_prompt : known - num_prompt + self._unread], rates)
            self._unread -= len(lookup.tokens) - known + (0 if lookup.place else MAX_PLACES)
        return lookup
