from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from backend.calibration_steps import LONG_CONTEXT_TOKENS, calibration_series
from backend.config import EngineConfig


@given(st.integers(1, 2000), st.integers(1, 64), st.integers(1, 300), st.integers(1, 3000), st.data())
def test_an_engine_of_any_size_has_steps_that_it_can_compute(
    blocks: int, block_size: int, seqs: int, budget: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, min(blocks * block_size, 20_000)))
    budget = max(seqs, budget)
    config = EngineConfig(blocks, length, block_size, seqs, budget, min(budget, 256))
    series = calibration_series(config)
    assert length < 3 or series
    for step in (step for each in series for step in each):
        assert 0 < step.num_tokens <= budget and step.num_decodes + step.num_prefills <= seqs
        assert max(step.context, step.start + step.length) <= min(length, LONG_CONTEXT_TOKENS + 1)


def test_steps_of_a_series_grow_little_by_little() -> None:
    config = EngineConfig(27_000, 131_072, max_num_seqs=256, max_num_batched_tokens=2048)
    for series in calibration_series(config):
        sizes = [(step.num_tokens, step.num_decodes * step.context + step.num_prefills * step.start) for step in series]
        for (tokens, context), (more_tokens, more_context) in pairwise(sizes):
            assert more_tokens <= 4 * tokens and more_context <= 4 * max(context, 1024)
