"""Blocks of layers with a window: released behind it, shared, swapped and charged like all others."""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from backend.scheduler.hooks import DefaultHooks
from backend.scheduler.kv_accounts import KVAccounts
from backend.scheduler.scheduled_step import PrefillBudget
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from backend.scheduler.swapping import RETURN_RATE_WEIGHT_PER_BLOCK
from tests.backend.paged_kv.test_prefix_cache import SharingMachine
from tests.backend.scheduler.bench import Bench, expected
from tests.examples import examples

TEXT = [10 + index % 7 for index in range(200)]
BUDGET = {"max_num_batched_tokens": 24, "prefill_chunk": 24}


def windowed(**changes: object) -> Bench:
    """Two groups of layers that see six tokens, in blocks of four."""
    fields = dict(num_blocks=120, max_model_len=120, window_groups=2, window_tokens=6, window_alignment=4)
    return Bench(**(fields | changes))  # type: ignore[arg-type]


def flood(bench: Bench) -> None:
    """Have another tenant's prompts evict what is idle."""
    for first in range(20, 26):
        bench.say([first, *TEXT[:60]], 2, "other")
        bench.drain()


def held(bench: Bench) -> int:
    return bench.scheduler.kv_manager.num_held


def test_a_sequence_holds_the_blocks_of_its_window_and_those_of_its_whole_text() -> None:
    bench = windowed()
    sequence = bench.add(100, 12)
    most = 0
    while sequence.status is not SequenceStatus.FINISHED:
        bench.step()
        most = max(most, held(bench))
        if len(sequence.output) == 4:
            table = sequence.block_table.window
            assert table is not None and (table.first, len(table.blocks)) == (23, 3 * 2)
            assert sequence.num_blocks == held(bench) == bench.scheduler.kv_manager.allowances.held["t"] == 26 + 6
    assert most <= bench.config.kv_blocks(112) < 3 * 28, "never what three groups without a window hold"


def test_what_the_window_has_left_is_charged_no_longer() -> None:
    bench = windowed(steps_in_flight=1)
    sequence = bench.add(100, 12)
    while len(sequence.output) < 4:
        bench.step()
    before = sequence.block_seconds(bench.now)
    assert sequence.block_seconds(bench.now + 10) - before == 10 * sequence.num_blocks == 10 * (26 + 6)


def test_a_hit_ends_where_its_window_is_cached() -> None:
    bench = windowed()
    first = bench.say(TEXT[:64], 2)
    bench.drain()
    second = bench.say([*TEXT[:64], 9, 9], 2)
    bench.drain()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)
    third = bench.say([*TEXT[:32], 9, 9], 2)
    bench.drain()
    assert third.num_cached_tokens == 32, "blocks that the window has left stay cached while there is room"
    bench.scheduler.kv_manager.limit_cache("t", 0, 30, bench.now)
    fourth = bench.say([*TEXT[:64], 8, 8], 2)
    bench.drain()
    assert fourth.num_cached_tokens % 4 == 0 and fourth.output == first_output(fourth.request.prompt, 2)


def first_output(prompt: list[int], count: int) -> list[int]:
    bench = Bench(num_blocks=60, max_model_len=120)
    sequence = bench.say(prompt, count)
    bench.drain()
    return sequence.output


def test_the_next_turn_finds_every_full_block_of_the_last() -> None:
    for length in range(40, 60):
        bench = windowed(window_alignment=16)
        turn = bench.say(TEXT[:length], 6, ends=())
        bench.drain()
        following = bench.say([*turn.request.prompt, *turn.output, 9], 1)
        bench.drain()
        assert following.num_cached_tokens == (length + 5) // 4 * 4


def found_after_a_flood(bench: Bench) -> int:
    """Say a text, flood the memory, and return how many tokens of the text's beginning are found again."""
    bench.say([*TEXT[:32], 1], 2)
    bench.drain()
    flood(bench)
    again = bench.say([*TEXT[:32], 2], 2)
    bench.drain()
    return again.num_cached_tokens


def test_a_pinned_prefix_keeps_its_window() -> None:
    bench = windowed(num_blocks=100, max_model_len=80)
    bench.pin_prefixes("t", TEXT[:32])
    assert found_after_a_flood(bench) == 32


def test_every_pinned_prefix_keeps_its_windows_in_the_order_in_which_it_gives_way() -> None:
    bench = windowed(num_blocks=140, max_model_len=80)
    prompts = TEXT[:32], [9, *TEXT[:27]]
    bench.pin_prefixes("t", *prompts)
    for prompt in prompts:
        bench.say([*prompt, 1], 2)
        bench.drain()
    kv = bench.scheduler.kv_manager
    assert kv.cache.num_pinned == (8 + 7) * 3
    flood(bench)
    again = [bench.say([*prompt, 2], 2) for prompt in prompts]
    bench.drain()
    assert [one.num_cached_tokens for one in again] == [32, 28]
    bench.scheduler.allow("t", kv.allowances.held["t"] - 6)
    flood(bench)
    shorter = [bench.say([*prompt, 3], 2) for prompt in prompts]
    found = [bench.scheduler.num_cached_tokens(one) for one in shorter]
    assert sum(found) >= 32 + 28 - 6 * 4 and min(found) > 0, "each gets shorter at most"
    bench.scheduler.allow("t", None)
    bench.drain()


def test_pins_give_way_to_a_sequence_except_what_it_hits_and_its_window() -> None:
    bench = windowed(num_blocks=140, max_model_len=80)
    bench.pin_prefixes("t", TEXT[:32], [9, *TEXT[:31]])
    for prompt in (TEXT[:32], [9, *TEXT[:31]]):
        bench.say([*prompt, 1], 2)
        bench.drain()
    kv = bench.scheduler.kv_manager
    bench.scheduler.allow("t", 2 * 8 * 3)
    hit = kv.blocks.find(bench.say([*TEXT[:32], 2], 2), 1000)
    assert hit.windows and hit.num_pinned == len(hit.cached)
    assert kv.blocks.permits("t", 20, hit)
    assert all(cached.pinned_for for cached in hit.cached) and kv.cache.num_pinned == 2 * 8 * 3 - 20
    bench.drain()


def test_blocks_of_a_failed_sequence_are_found_no_more_and_stay_pinned_once_computed_again() -> None:
    bench = windowed(num_blocks=160)
    bench.pin_prefixes("t", TEXT[:32])
    bench.say([*TEXT[:32], 1], 2)
    bench.drain()
    failed = bench.say(TEXT[:64], 4)
    while not failed.output:
        bench.step()
    assert failed.block_table.window is not None and failed.block_table.window.first
    bench.scheduler.finish_sequence(failed, FinishReason.FAILED)
    named = bench.scheduler.kv_manager.cache.named
    names = [one for name in failed.block_names for one in (name, *[known() for known in name.windows])]
    assert len(names) > len(failed.block_names) and not any(named(one) for one in names if one is not None)
    bench.drain()
    assert found_after_a_flood(bench) == 32


def test_what_is_found_does_not_depend_on_who_keeps_finished_sequences() -> None:
    """A server's history does, and the replay of its log does not."""

    def found(keeps: bool) -> list[tuple[int, int]]:
        bench, random, seen = windowed(num_blocks=75, max_model_len=80), Random(3), list[tuple[int, int]]()
        kept = list[Sequence]()
        for _ in range(60):
            prompt = [*TEXT[: random.randrange(4, 60)], *(random.randrange(2) for _ in range(random.randrange(1, 9)))]
            sequence = bench.say(prompt, 2, random.choice("abc"), salt="one")
            bench.drain()
            seen.append((sequence.num_cached_tokens, bench.scheduler.kv_manager.cache.evictions))
            kept += [sequence] * keeps
            del sequence
        return seen

    assert found(keeps=True) == found(keeps=False)


def test_who_follows_a_prompt_holds_no_more_than_a_sequence_may() -> None:
    """Another tenant's sequence has no row while the prompt is computed, and its tenant may hold one sequence."""
    bench = windowed(num_blocks=200)
    limit = bench.config.kv_blocks(112)
    bench.scheduler.allow("b", limit)
    leader, follower = [bench.say(TEXT[:100], 12, tenant, salt="one") for tenant in "ab"]
    while bench.scheduler.has_work:
        bench.step()
        assert follower.num_blocks <= limit
    assert (leader.num_cached_tokens, follower.num_cached_tokens) == (0, 96)
    assert [leader.output, follower.output] == [expected(leader), expected(follower)]


def test_a_hit_that_ends_before_what_is_being_computed_is_not_awaited() -> None:
    bench = windowed()
    leader = bench.say(TEXT[:64], 2)
    bench.plan()
    bench.plan()
    cache, table = bench.scheduler.kv_manager.cache, leader.block_table.window
    assert table is not None
    follower = bench.say([*TEXT[:64], 1], 2)
    assert bench.scheduler.kv_manager.blocks.find(follower, 1).is_being_computed
    cache.invalidate([cached for block in table.blocks if (cached := cache.at(block)) is not None])
    assert not bench.scheduler.kv_manager.blocks.find(follower, 1).is_being_computed
    bench.drain()


def test_slots_without_a_token_are_counted_in_every_group() -> None:
    bench = windowed(steps_in_flight=1)
    bench.add(30, 12)
    for _ in range(5):
        bench.step()
        held = sum([len(s.block_table.blocks) * 4 - s.num_computed_tokens for s in bench.scheduler.running.values()])
        assert KVAccounts(bench.scheduler.kv_manager).unused_slots()["t"] == 3 * held


def test_running_sequences_are_left_what_their_windows_lack() -> None:
    bench = windowed(num_blocks=200)
    early, late = bench.add(4, 100), bench.add(80, 20)
    while late.num_computed_tokens < 80:
        bench.step()
    blocks, newcomer = bench.scheduler.kv_manager.blocks, bench.add(8, 20)
    assert blocks.watermark_blocks(newcomer, [early, late]) == 2 * 3
    newcomer.watermark = 8
    places = min(8, 26 - len(early.block_table.blocks)), min(8, 25 - len(late.block_table.blocks))
    wanted = blocks.watermark_blocks(newcomer, [early, late])
    assert sum(places) + 2 * 2 <= wanted < sum(places) * 3
    bench.drain()


def test_answers_to_one_prompt_share_its_window() -> None:
    bench = windowed()
    answers = [bench.say(TEXT[:50], 6, prompt_group="g") for _ in range(3)]
    while any(len(one.output) < 2 for one in answers):
        bench.step()
    tables = [one.block_table.window for one in answers]
    assert all(table is not None and table.num_shared for table in tables)
    assert bench.scheduler.counters.prompt_tokens == 50
    bench.drain()


def test_a_window_is_swapped_and_comes_back() -> None:
    bench = windowed(num_blocks=100, max_model_len=80, num_host_blocks=100, max_num_batched_tokens=24, prefill_chunk=24)
    bench.say(TEXT[:64], 4)
    bench.drain()
    flood(bench)
    before = bench.scheduler.counters.swapped_in
    again = bench.say([*TEXT[:64], 9], 4)
    bench.drain()
    assert again.num_cached_tokens == 64 and bench.scheduler.counters.swapped_in > before


def test_window_blocks_that_come_back_are_not_counted_as_text() -> None:
    ends = list[tuple[int, int]]()

    class Budget(PrefillBudget):
        def fits_back(self, end: int, blocks: int) -> int:
            ends.append((end, blocks))
            return blocks

    class Hooks(DefaultHooks):
        def prefill_budget(self, *_: object) -> PrefillBudget:
            return Budget(24)

    bench = windowed(make_hooks=Hooks, num_blocks=100, max_model_len=80, num_host_blocks=100, **BUDGET)
    bench.say(TEXT[:64], 4)
    bench.drain()
    flood(bench)
    again = bench.say([*TEXT[:64], 9], 4)
    bench.drain()
    assert again.num_cached_tokens == 64
    assert ends[0][0] == 64 and ends[0][1] > 64 // 4, "64 tokens, of which each place has blocks of several groups"


def test_declined_blocks_of_a_window_that_are_computed_again_count_as_returned() -> None:
    told, places = list[float](), set[int]()

    class Hooks(DefaultHooks):
        def swaps(self, probability: float, blocks_per_place: int) -> bool:
            told.append(probability)
            places.add(blocks_per_place)
            return False

    bench = windowed(make_hooks=Hooks, num_host_blocks=100)
    kv = bench.scheduler.kv_manager
    bench.say(TEXT[:64], 4)
    bench.drain()
    kv.limit_cache("t", 0, 0, bench.now)
    declined = kv.blocks.swapping.declined
    assert declined > 2 * 64 // 4 // 2, "blocks of the text and of its window"
    assert places == {3}
    bench.say(TEXT[:64], 4)
    bench.drain()
    assert told[-1] == pytest.approx(1 - 0.5 * (1 - RETURN_RATE_WEIGHT_PER_BLOCK) ** declined)


def test_the_host_keeps_the_window_before_the_end_of_a_prompt_whose_answer_the_next_turn_leaves_out() -> None:
    """A template may drop what a model thought, so that the next turn goes on where the prompt ended."""
    bench = windowed(num_blocks=100, max_model_len=100, num_host_blocks=150, **BUDGET)
    for length in (48, 49, 51):
        bench.say(TEXT[:length], 40, ends=())
        bench.drain()
        flood(bench)
        again = bench.say([*TEXT[:length], 9, 9, 9], 4)
        bench.drain()
        assert again.num_cached_tokens == 48
    blocks = bench.scheduler.kv_manager.blocks
    names = list(blocks.windows.names_of(again.block_names[:9], 2))
    assert not any(map(blocks.swapping.named, names)), "behind the window of a prompt none is asked for"


def test_a_floor_keeps_the_text_of_a_window_though_both_were_cached_apart() -> None:
    bench = windowed()
    kv = bench.scheduler.kv_manager
    bench.say(TEXT[:64], 30, ends=())
    bench.drain()
    kv.limit_cache("t", 0, 30, bench.now)
    kv.limit_cache("t", 20, None, bench.now)
    bench.say([8] * 40, 2)
    bench.drain()
    turn = bench.say([*TEXT[:64], 9, 9], 2, ends=())
    bench.drain()
    assert turn.num_cached_tokens == 0, "all of its text is cached, and no window before its end"
    flood(bench)
    again = bench.say([*turn.request.prompt, *turn.output, 5], 1)
    bench.drain()
    assert again.num_cached_tokens == 64


def test_a_lost_step_takes_nothing_from_the_floor_of_a_text_that_it_computed_again() -> None:
    bench = windowed()
    kv = bench.scheduler.kv_manager
    turn = bench.say(TEXT[:64], 6, ends=())
    bench.drain()
    kv.limit_cache("t", 0, 28, bench.now)
    kv.limit_cache("t", 28, None, bench.now)
    other = bench.say([*TEXT[:48], *([6] * 16)], 20, ends=())
    while len(other.output) < 2:
        bench.step()
    while bench.plan():
        pass
    bench.scheduler.finish_sequence(other, FinishReason.CANCELLED, bench.now)
    bench.lose()
    bench.drain()
    again = bench.say([*turn.request.prompt, *turn.output, 9], 1)
    bench.drain()
    assert again.num_cached_tokens == 68


def test_what_was_computed_again_replaces_nothing_of_another_tenants_floor() -> None:
    bench = windowed()
    kv = bench.scheduler.kv_manager
    turn = bench.say([*TEXT[:48], *([7] * 16)], 6, "a", "g", ends=())
    bench.drain()
    kv.limit_cache("a", 0, 28, bench.now)
    kv.limit_cache("a", 28, None, bench.now)
    other = bench.say([*TEXT[:48], *([6] * 16)], 6, "b", "g", ends=())
    bench.drain()
    assert other.num_cached_tokens == 0, "the window before their common end is not kept"
    flood(bench)
    again = bench.say([*turn.request.prompt, *turn.output, 9], 1, "a", "g")
    bench.drain()
    assert again.num_cached_tokens == 68


class WindowMachine(SharingMachine):
    """Everything that sequences which share blocks may meet, in a pool that must preempt, with windows."""

    @initialize(
        spare=st.one_of(st.integers(0, 8), st.integers(18, 40)),
        depth=st.integers(1, 2),
        budget=st.integers(4, 12),
        chunk=st.sampled_from([None, 3, 4, 8]),
        host=st.sampled_from([0, 3, 40]),
        groups=st.integers(1, 3),
        window=st.integers(1, 9),
        alignment=st.sampled_from([1, 4, 8]),
    )
    def configure(
        self,
        spare: int,
        depth: int,
        budget: int,
        chunk: int | None,
        host: int,
        groups: int,
        window: int,
        alignment: int,
    ) -> None:
        self.begin(
            num_host_blocks=host,
            num_blocks=6 + groups * 6 + 2 + spare,  # two floors are kept beside the longest sequence
            max_model_len=24,
            max_num_batched_tokens=24 if chunk is None else max(budget, chunk),
            prefill_chunk=chunk,
            steps_in_flight=depth,
            window_groups=groups,
            window_tokens=window,
            window_alignment=alignment,
        )

    @rule(tenant=st.sampled_from(["a", "b"]), blocks=st.one_of(st.none(), st.integers(0, 8)))
    def allow(self, tenant: str, blocks: int | None) -> None:
        longest = self.bench.config.kv_blocks(23)
        self.bench.scheduler.allow(tenant, None if blocks is None else longest + blocks, self.bench.now)

    def has_room_for_pins(self) -> bool:
        """Two tenants pin two places each, and have a floor of one block."""
        config = self.bench.config
        return config.num_blocks >= config.kv_blocks(24) + 4 * (1 + config.window_groups) + 2


TestWindows = WindowMachine.TestCase
TestWindows.settings = settings(max_examples=examples(12, at_night=4000), stateful_step_count=50, deadline=None)
