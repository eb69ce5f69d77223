"""Drafted tokens leave the same texts and no trace: the lookup, the length of a draft, and every event around it."""

from math import isclose
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from admission.core import CoreConfig, make_core
from admission.ledger import work_of
from admission.step_times.step_time import StepTime, StepTimeModel
from backend.config import EngineConfig, Speculate
from backend.scheduler.batch import StepOutput
from backend.scheduler.drafting import (
    FIRST_RATES,
    MAX_PLACES,
    MAX_RUN,
    STEP_GAP_S,
    TOKENS_READ_PER_PLAN,
    Drafting,
    PromptLookup,
    draft_length,
    expected_tokens,
    rate_of,
)
from backend.scheduler.hooks import DefaultHooks
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed
from tests.admission.clocked_core import ClockedCore
from tests.backend.paper_device import next_token
from tests.backend.scheduler.bench import Bench, LossyMachine, expected
from tests.backend.sequences import TOKEN, make_sequence
from tests.examples import examples


class Guesses(Drafting):
    """Drafts of random lengths, whose tokens are mostly those that come."""

    def __init__(self, bench: Bench, seed: int) -> None:
        super().__init__(bench.config, bench.hooks, bench.scheduler.kv_manager.texts)
        self.random = Random(seed)

    def _worth(self, sequence: Sequence, room: int) -> int:
        return self.random.choice((0, 1, 2, 5))

    def _tokens(self, sequence: Sequence, length: int) -> list[int]:
        known, first = [*sequence.request.prompt, *sequence.output], sequence.num_tokens - 1
        assert len(known) == first, "a draft follows a token that is not known"
        for _ in range(length):
            known.append(next_token(known) if self.random.random() < 0.8 else 51)
        return known[first:]


def drafting_bench(seed: int = 0, make_hooks: type[DefaultHooks] = DefaultHooks, **changes: object) -> Bench:
    bench = Bench(make_hooks=make_hooks, speculate="lookup", **changes)
    guesses = Guesses(bench, seed)
    bench.scheduler.drafting = bench.scheduler._rows._drafting = guesses
    return bench


class DraftingMachine(LossyMachine):
    """Drafts beside arrivals that share beginnings, cancellations, preemptions, copies to the host and lost steps."""

    @initialize(
        num_blocks=st.integers(5, 16),
        depth=st.integers(1, 2),
        host=st.sampled_from([0, 6]),
        size=st.sampled_from([1, 4, 8]),
        seed=st.integers(0, 99),
    )
    def start(self, num_blocks: int, depth: int, host: int, size: int, seed: int) -> None:
        changes = dict(
            num_blocks=num_blocks * max(1, 8 // size), max_model_len=20, block_size=size, num_host_blocks=host
        )
        self.bench = drafting_bench(seed, steps_in_flight=depth, max_num_batched_tokens=12, **changes)
        self.sequences, self.cancelled = [], {}

    @rule(prompt=st.integers(1, 12), output=st.integers(1, 8), shares=st.booleans())
    def arrive(self, prompt: int, output: int, shares: bool) -> None:
        if shares:
            self.sequences.append(self.bench.say(list(range(100, 100 + prompt)), output))
        else:
            self.sequences.append(self.bench.add(prompt, output))

    @rule()
    def plan(self) -> None:
        batch = self.bench.plan()
        assert batch is None or batch.num_tokens <= self.bench.config.max_num_batched_tokens


TestDrafting = DraftingMachine.TestCase
TestDrafting.settings = settings(max_examples=examples(25), stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_take_fewer_steps_for_the_same_output(depth: int) -> None:
    plain, drafted = Bench(steps_in_flight=depth), drafting_bench(steps_in_flight=depth)
    for bench in (plain, drafted):
        sequence = bench.add(5, 30)
        bench.drain()
        assert sequence.output == expected(sequence)
    assert len(drafted.batches) < len(plain.batches) / 1.3
    counts, drafting = drafted.scheduler.counters, drafted.scheduler.drafting
    assert drafting is not None
    offered, accepted = drafting.counts["t"]
    assert 0 < accepted < offered
    assert counts.jump_forward_tokens == 0 and counts.generation_tokens == len(sequence.output)


def test_a_draft_takes_no_block() -> None:
    bench = drafting_bench(num_blocks=10)
    sequence = bench.add(5, 30)
    while bench.scheduler.has_work:
        bench.step()
        if sequence.slot >= 0 and not bench.in_flight:
            assert len(sequence.block_table.blocks) <= -(-sequence.num_tokens // 4)


def naive(tokens: list[int], place: int, run: int) -> tuple[int, int]:
    """The place that a text of these tokens is followed at, which was at `place` before the last."""
    if place and tokens[place] == tokens[-1]:
        return place + 1, run + 1
    end, best = len(tokens), (0, 1)
    places = [at for at in range(end - 1, 1, -1) if tokens[at - 2 : at] == tokens[end - 2 :]][:MAX_PLACES]
    for at in places:
        run = next((n for n in range(min(MAX_RUN, at)) if tokens[at - 1 - n] != tokens[end - 1 - n]), min(MAX_RUN, at))
        if run > best[1]:
            best = at, run
        if run == MAX_RUN:
            break
    return best


@given(st.lists(st.integers(0, 3), min_size=1, max_size=120), st.integers(0, 20))
def test_the_index_finds_what_a_search_through_the_text_finds(tokens: list[int], prompt: int) -> None:
    lookup, place, run, rates = PromptLookup(len(tokens)), 0, 0, list(FIRST_RATES)
    lookup.read(tokens[:prompt])
    for end in range(prompt + 1, len(tokens) + 1):
        lookup.follow(tokens[end - 1 : end], rates)
        place, run = naive(tokens[:end], place, run)
        assert lookup.place == place and (not place or lookup.run == run)
        if place:
            text = tokens[:end]
            for token in lookup.draft(9):
                text.append(text[place])
                place += 1
                assert token == text[-1]
            place = lookup.place
    assert all(0 <= rate <= 1 for rate in rates)


@given(
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.floats(1e-4, 1),
    st.floats(0, 0.5),
    st.integers(1, 64),
    st.integers(1, 2),
    st.integers(0, 15),
)
def test_a_draft_is_as_long_as_brings_most_tokens_a_second(
    rates: tuple[float, float], fixed: float, each: float, rows: int, steps: int, most: int
) -> None:
    seconds, (rate, chance) = [fixed * (1 + each * n) for n in range(most + 1)], rates

    def brought(drafted: int) -> float:
        tokens = steps * (rows - 1) + 1 + chance * sum(rate**n for n in range(1, drafted + 1))
        return tokens / ((steps - 1) * seconds[0] + seconds[drafted] + STEP_GAP_S)

    length = draft_length(rate, chance, seconds, rows, steps)
    assert 0 <= length <= most
    if length:
        assert brought(length) > rows / seconds[0]
        assert all(brought(n) <= brought(length) * (1 + 1e-9) for n in range(1, most + 1))
    assert isclose(expected_tokens(rate, most), sum(rate**n for n in range(most + 1)))


def test_nothing_is_drafted_where_each_token_costs_as_much_or_none_comes() -> None:
    assert draft_length(0.9, 1, [0.01 * (1 + n) for n in range(16)], 1, 1) == 0
    assert draft_length(0.0, 1, [0.01] * 16, 1, 1) == 0
    assert draft_length(0.9, 1, [0.01] * 16, 1, 1) == 15


def test_rates_are_kept_by_the_length_of_the_run() -> None:
    assert [rate_of(run) for run in (2, 3, 4, 7, 8, 15, 16, 200)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_tenant_whose_looked_up_tokens_never_come_is_drafted_for_no_more() -> None:
    """The second token of each pair is another every time."""
    lookup, rates = PromptLookup(4096), list(FIRST_RATES)
    for token in [token for n in range(600) for token in (1, 2, 100 + n)]:
        lookup.follow((token,), rates)
    assert rates[0] < 0.01
    assert draft_length(rates[0], 1, [0.01 * (1 + 0.05 * n) for n in range(16)], 1, 1) == 0


class Priced(DefaultHooks):
    """Each row of a step costs as much as the next."""

    def decode_seconds(self, num_decodes: int, decode_context: int, model: int = 0) -> float:
        return 0.01 * num_decodes


def test_texts_are_not_read_where_no_draft_could_pay() -> None:
    bench = Bench(make_hooks=Priced, speculate="lookup")
    for _ in range(4):
        bench.add(8, 12)
    bench.drain()
    drafting = bench.scheduler.drafting
    assert drafting is not None and not drafting.rates and not drafting.counts


class Timed(DefaultHooks):
    """A step takes 10 ms, and one more for each row."""

    def decode_seconds(self, num_decodes: int, decode_context: int, model: int = 0) -> float:
        return 0.01 + 0.001 * num_decodes


def test_a_promised_interval_is_kept_as_prompts_arrive_beside_drafts() -> None:
    """Every token of both answers is certain to be drafted; a step with a whole chunk takes 106 ms."""
    engine = EngineConfig(4000, max_model_len=9000, max_num_seqs=8, max_num_batched_tokens=2048, speculate="lookup")
    model = StepTimeModel(StepTime((4e-3, 5e-5, 2e-5, 1e-8, 1e-8, 1e-10, 0.0)), 64.0)
    stage = ClockedCore(
        make_core(CoreConfig(), engine, model), lambda step: stage.core.step_time.fitted.seconds(work_of(step))
    )
    promised = stage.add(make_sequence("promised", "a", 78, 4000, token_interval=0.03))
    stage.add(make_sequence("beside", "b", 78, 4000))
    known, last, gaps = 0, 0.0, []
    for n in range(150):
        if n > 60 and n % 8 == 0:
            stage.add(make_sequence(f"prompt{n}", "c", [n * 9000 + each for each in range(8900)], 1))
        stage.step()
        if len(promised.output) > known:
            gaps += [stage.now - last] if known else []
            known, last = len(promised.output), stage.now
    assert known > 400 and max(gaps) < 0.03 < 1.1 * max(gaps)


class Flat(DefaultHooks):
    """Rows cost next to nothing."""

    def decode_seconds(self, num_decodes: int, decode_context: int, model: int = 0) -> float:
        return 0.01 + 1e-5 * num_decodes


def answered(speculate: Speculate) -> list[int]:
    """The tokens of forty answers after 200 steps, of which every one is certain to be drafted."""
    engine = EngineConfig(4000, max_model_len=4000, max_num_seqs=64, max_num_batched_tokens=256, speculate=speculate)
    scheduler = Scheduler(engine, FirstComeFirstServed(), Flat(engine))
    answers = [make_sequence(f"s{n}", f"t{n}", 60, 3000) for n in range(40)]
    for sequence in answers:
        scheduler.add(sequence)
    for _ in range(200):
        while scheduler.schedule() is not None:
            pass
        batch = scheduler.in_flight[0].batch
        forced = {index: [TOKEN] * len(draft) for index, draft in batch.drafts}
        scheduler.update_from_output(StepOutput(batch.step, [TOKEN] * len(batch.sampled), 0.01, forced=forced or None))
    return [len(sequence.output) for sequence in answers]


def test_answers_take_turns_where_a_step_has_too_few_places_for_drafts() -> None:
    plain, drafted = answered("off"), answered("lookup")
    assert all(more > few for more, few in zip(drafted, plain, strict=True))
    assert max(drafted) < 2 * min(drafted)


def test_a_plan_reads_a_bounded_part_of_all_texts_and_a_finished_one_is_forgotten() -> None:
    engine = EngineConfig(4000, max_model_len=4000, max_num_seqs=8, max_num_batched_tokens=4096, speculate="lookup")
    scheduler = Scheduler(engine, FirstComeFirstServed(), Flat(engine))
    answers = [make_sequence(f"s{n}", "t", 1000, 9) for n in range(4)]
    for sequence in answers:
        scheduler.add(sequence)
    texts, read = scheduler.kv_manager.texts, 0
    while scheduler.has_work:
        while scheduler.schedule() is not None:
            now_read = sum(len(text.tokens) for text in texts.values())
            assert now_read - read <= TOKENS_READ_PER_PLAN
            read = now_read
        batch = scheduler.in_flight[0].batch
        scheduler.update_from_output(StepOutput(batch.step, [TOKEN] * len(batch.sampled), 0.01))
    assert read > TOKENS_READ_PER_PLAN and not texts


def test_drafts_keep_a_promised_interval_and_leave_prompts_most_of_a_step() -> None:
    lengths = []
    for interval, budget in ((None, 128), (0.015, 128), (None, 8)):
        bench = drafting_bench(make_hooks=Timed, block_size=16, max_num_batched_tokens=budget, prefill_chunk=8)
        bench.add(5, 30, token_interval=interval)
        bench.drain()
        lengths.append(max(len(draft) for batch in bench.batches for _, draft in batch.drafts))
    assert lengths == [5, 4, 2]
