"""Blocks of layers with a window: released behind it, shared, swapped and charged like all others."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from backend.scheduler.sequence import SequenceStatus
from tests.backend.paged_kv.test_prefix_cache import SharingMachine
from tests.backend.scheduler.bench import Bench
from tests.examples import examples

TEXT = [10 + index % 7 for index in range(200)]


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
            table = sequence.window_table
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


def test_a_pinned_prefix_keeps_its_window() -> None:
    bench = windowed(num_blocks=100, max_model_len=80)
    bench.pin_prefixes("t", TEXT[:32])
    bench.say([*TEXT[:32], 1], 2)
    bench.drain()
    flood(bench)
    again = bench.say([*TEXT[:32], 2], 2)
    bench.drain()
    assert again.num_cached_tokens == 32


def test_answers_to_one_prompt_share_its_window() -> None:
    bench = windowed()
    answers = [bench.say(TEXT[:50], 6, prompt_group="g") for _ in range(3)]
    while any(len(one.output) < 2 for one in answers):
        bench.step()
    tables = [one.window_table for one in answers]
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


class WindowMachine(SharingMachine):
    """Everything that sequences which share blocks may meet, in a pool that must preempt, with windows."""

    @initialize(
        spare=st.integers(0, 30),
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
            num_blocks=6 + groups * 6 + spare,
            max_model_len=24,
            max_num_batched_tokens=24 if chunk is None else max(budget, chunk),
            prefill_chunk=chunk,
            steps_in_flight=depth,
            window_groups=groups,
            window_tokens=window,
            window_alignment=alignment,
        )

    @rule(tenant=st.sampled_from(["a", "b"]), blocks=st.one_of(st.none(), st.integers(24, 40)))
    def allow(self, tenant: str, blocks: int | None) -> None:
        self.bench.scheduler.allow(tenant, blocks, self.bench.now)

    @rule(tenant=st.sampled_from(["a", "b"]), lengths=st.just([]), salt=st.none())
    def pin_prefixes(self, tenant: str, lengths: list[int], salt: str | None) -> None:
        super().pin_prefixes(tenant, lengths, salt)


TestWindows = WindowMachine.TestCase
TestWindows.settings = settings(max_examples=examples(12, at_night=4000), stateful_step_count=50, deadline=None)
