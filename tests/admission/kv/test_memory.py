from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from admission.kv.memory import FuturePeak
from admission.output_length import OutputLengths
from backend.config import EngineConfig
from backend.scheduler.sequence import Sequence
from tests.backend.sequences import make_sequence

ENGINE = EngineConfig(num_blocks=100, max_model_len=1000, block_size=10)


def make(prompt: int, output: int, generated: int = 0, tenant: str = "t") -> Sequence:
    sequence = make_sequence("s", tenant, prompt, output)
    sequence.output = [0] * generated
    sequence.num_tokens += generated
    return sequence


sequences = st.builds(make, st.integers(1, 50), st.integers(10, 200), st.integers(0, 9))


@given(st.lists(sequences, min_size=1, max_size=8), st.integers(0, 120))
def test_the_peak_within_so_many_steps_is_the_fullest_of_their_moments(running: list[Sequence], steps: int) -> None:
    """Without history half of what an answer may still have is expected of it."""
    lives = [((s.request.max_tokens - len(s.output)) / 2, s.num_tokens + ENGINE.block_size / 2) for s in running]
    moments = {min(left, steps) for left, _ in lives}
    fullest = max(sum(holds + moment for left, holds in lives if left >= moment) for moment in moments)
    assert FuturePeak(ENGINE, OutputLengths(), deviations=0).peak(running, steps) == fullest


def test_a_short_answer_joins_long_ones_that_fill_memory_only_when_it_is_over() -> None:
    gate = FuturePeak(ENGINE, OutputLengths())
    running = [make(10, 400, generated=20) for _ in range(5)]
    assert not gate(make(10, 400), running, num_free=80, num_held=0, num_kept=0)
    assert gate(make(10, 8), running, num_free=80, num_held=0, num_kept=0)


def test_an_answer_that_may_be_long_is_believed_to_be_short_when_its_tenants_were() -> None:
    lengths = OutputLengths()
    gate, running = FuturePeak(ENGINE, lengths), [make(10, 400, generated=20) for _ in range(5)]
    for tenant, length in (("long", 400), ("short", 8)):
        for _ in range(10):
            lengths.observe(tenant, 300, length)
    assert not gate(make(10, 300, tenant="long"), running, num_free=80, num_held=0, num_kept=0)
    assert gate(make(10, 300, tenant="short"), running, num_free=80, num_held=0, num_kept=0)


def test_a_pool_that_fills_before_the_newcomer_ends_keeps_even_a_short_one_out() -> None:
    gate = FuturePeak(ENGINE, OutputLengths(), deviations=0)
    running = [make(180, 40, generated=10) for _ in range(5)]
    assert not gate(make(10, 8), running, num_free=4, num_held=0, num_kept=0)


def test_the_window_of_a_short_chat_counts_by_its_text_and_not_by_the_answer_that_it_may_have() -> None:
    engine = replace(
        ENGINE, num_blocks=2000, max_num_seqs=8, max_num_batched_tokens=160, max_model_len=4000, prefill_chunk=160
    )
    engine, lengths = replace(engine, window_groups=4, window_tokens=500, window_alignment=10), OutputLengths()
    for _ in range(20):
        lengths.observe("t", 3000, 30)
    chat = FuturePeak(engine, lengths, deviations=0).peak([make(20, 3000)])
    assert chat <= (1 + engine.window_groups) * (20 + 60 + engine.block_size)


def test_a_window_counts_as_full_and_that_of_a_prompt_with_the_tokens_of_steps_in_flight() -> None:
    engine = replace(ENGINE, max_num_seqs=8, max_num_batched_tokens=16, prefill_chunk=16, max_model_len=400)
    engine = replace(engine, window_groups=2, window_tokens=20, window_alignment=10)
    one, plain = make(300, 100), FuturePeak(ENGINE, OutputLengths(), deviations=0)
    beyond = FuturePeak(engine, OutputLengths(), deviations=0).peak([one]) - plain.peak([one])
    assert beyond == 2 * 10 * (2 + 7), "thirty tokens and two steps of sixteen begin and end within blocks"
    one.num_computed_tokens = 300
    beyond = FuturePeak(engine, OutputLengths(), deviations=0).peak([one]) - plain.peak([one])
    assert beyond == 2 * 10 * (1 + 3)


def test_blocks_that_are_shared_count_once() -> None:
    gate, running = FuturePeak(ENGINE, OutputLengths(), deviations=0), [make(400, 1), make(400, 1)]
    apart = gate.peak(running)
    for sequence in running:
        sequence.block_table.blocks, sequence.block_table.num_shared = list(range(26)), 20
    running[0].block_table.num_charged, running[1].block_table.num_charged = 26, 6
    assert gate.peak(running) == apart - 20 * ENGINE.block_size
