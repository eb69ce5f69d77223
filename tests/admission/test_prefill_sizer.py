from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.prefill_sizer import CAUTION_MEAN_ERRORS, LONGEST_STEP_S, MIN_PREFILL_SHARE, PrefillSizer
from admission.step_times.step_time import CopyTime, Pipeline, StepTime, StepTimeModel, StepWork
from backend.config import EngineConfig

CONFIG = EngineConfig(num_blocks=1000, max_model_len=4096, max_num_batched_tokens=512)
NO_COPIES = CopyTime(CONFIG, Pipeline())
MODEL = StepTimeModel(StepTime((5e-3, 5e-5, 5e-5, 1e-7, 1e-7, 1e-9, 1e-6)))
SLACK = 1 + CAUTION_MEAN_ERRORS * MODEL.relative_error


def certain(decodes: StepWork, interval: float) -> float:
    """Seconds that a step may be predicted to take: nearly certain to be in time, or half of what decodes leave."""
    base = MODEL.fitted.seconds(decodes)
    return max(interval / SLACK, base + MIN_PREFILL_SHARE * (interval - base))


def test_prefill_alone_fills_the_step() -> None:
    assert PrefillSizer(CONFIG, MODEL, NO_COPIES).prefill_budget(0, 0, None, 512).fits(0, 4096) == 512


def test_where_nothing_is_promised_prefill_gets_its_share() -> None:
    sizer = PrefillSizer(CONFIG, MODEL, NO_COPIES, prefill_share=0.25)
    assert sizer.prefill_budget(8, 800, None, 504).fits(0, 4096) == 128
    assert sizer.prefill_budget(8, 800, None, 100).fits(0, 4096) == 100


@given(
    st.integers(1, 256),
    st.floats(1e-4, 0.2),
    st.integers(0, 512),
    st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 2000)), min_size=1, max_size=6),
)
def test_the_step_keeps_the_promise_or_carries_one_block(
    decodes: int, interval: float, most: int, chunks: list[tuple[int, int]]
) -> None:
    step, taken = StepWork(decode_tokens=decodes, decode_context=decodes * 500), 0
    allowed = certain(step, interval)
    budget = PrefillSizer(CONFIG, MODEL, NO_COPIES).prefill_budget(decodes, decodes * 500, interval, most)
    for start, length in chunks:
        fits = budget.fits(start, length)
        if fits:
            budget.spend(start, fits)
            step, taken = step + StepWork().with_prefill(start, fits), taken + fits
        assert 0 <= fits <= length and taken <= most
        assert taken <= CONFIG.block_size or MODEL.fitted.seconds(step) <= allowed * (1 + 1e-9)
        more = step + StepWork().with_prefill(start + fits, 1)
        assert fits == length or taken == most or MODEL.fitted.seconds(more) > allowed * (1 - 1e-9)


def test_a_late_chunk_of_a_long_prompt_is_bounded_by_the_longest_step() -> None:
    sizer = PrefillSizer(CONFIG, MODEL, NO_COPIES)
    assert MODEL.fitted.seconds(StepWork().with_prefill(0, 512)) < LONGEST_STEP_S
    late = 1_000_000
    fits = sizer.prefill_budget(0, 0, None, 512).fits(late, 512)
    seconds = MODEL.fitted.seconds
    assert (
        seconds(StepWork().with_prefill(late, fits))
        <= LONGEST_STEP_S
        < seconds(StepWork().with_prefill(late, fits + 1))
    )


def test_a_chunk_that_attends_to_more_is_shorter() -> None:
    sizer = PrefillSizer(CONFIG, MODEL, NO_COPIES)
    starts = (0, 1000, 10_000, 30_000)
    fits = [sizer.prefill_budget(8, 4000, 0.03, 504).fits(start, 4096) for start in starts]
    assert fits == sorted(fits, reverse=True) and fits[-1] < fits[0] / 1.4
    assert fits[-1] > CONFIG.block_size


def test_noise_alone_takes_no_more_than_half_of_the_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    sizer, tokens = PrefillSizer(CONFIG, MODEL, NO_COPIES), []
    for error in (0.0, 0.1, 1.0, 10.0):
        monkeypatch.setattr(StepTimeModel, "relative_error", error)
        tokens.append(sizer.prefill_budget(64, 32_000, 0.03, 448).fits(0, 4096))
    assert tokens == sorted(tokens, reverse=True) and tokens[1] < tokens[0]
    assert tokens[2] == tokens[3] >= tokens[0] // 2


def test_tokens_taken_shrink_the_budget_of_the_next_prompts() -> None:
    budget = PrefillSizer(CONFIG, MODEL, NO_COPIES).prefill_budget(8, 4000, 0.03, 504)
    whole = budget.fits(0, 4096)
    budget.spend(0, 100)
    assert whole - 101 <= budget.fits(0, 4096) <= whole - 99


def test_a_chunk_makes_room_for_the_groups_of_its_own_model() -> None:
    config = replace(CONFIG, block_copy_seconds=1e-3, further_windows=((3, 64),))
    sizer = PrefillSizer(config, MODEL, CopyTime(config, Pipeline()), others=[MODEL])

    def fits(model: int, each: float) -> int:
        budget = sizer.prefill_budget(4, 400, 0.05, 512, model)
        budget.copies(0.0, 0, each)
        return budget.fits(0, 512)

    assert 0 < fits(1, 1.0) == fits(0, 4.0) < fits(0, 1.0), "a block for the text and one for each group"
