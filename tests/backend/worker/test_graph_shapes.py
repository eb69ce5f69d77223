import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backend.config import EngineConfig
from backend.scheduler.batch import Batch
from backend.worker.graph_shapes import (
    MAX_PROMPTS,
    MAX_TOKENS,
    GraphShapes,
    decode_sizes,
    num_shapes,
    place_sizes,
    token_sizes,
)


def config(max_num_seqs: int, max_num_batched_tokens: int) -> EngineConfig:
    return EngineConfig(1000, 100, 16, max_num_seqs, max_num_batched_tokens, prefill_chunk=1)


def batch(num_decodes: int, prompts: list[int]) -> Batch:
    lengths = [1] * num_decodes + prompts
    return Batch(0, num_decodes, list(range(len(lengths))), [0] * len(lengths), lengths)


@st.composite
def steps(draw: st.DrawFn) -> tuple[EngineConfig, Batch]:
    """A step within the limits of an engine."""
    most = draw(st.integers(1, 10_000))
    seqs = draw(st.integers(1, min(most, 600)))
    num_seqs = draw(st.integers(1, seqs))
    num_prompts = draw(st.integers(0, min(num_seqs, MAX_PROMPTS + 2)))
    left = most - num_seqs
    prompts = []
    for _ in range(num_prompts):
        prompts.append(1 + draw(st.integers(0, left)))
        left -= prompts[-1] - 1
    return config(seqs, most), batch(num_seqs - num_prompts, prompts)


@given(steps())
def test_a_batch_runs_in_a_shape_that_holds_it_and_is_little_larger(step: tuple[EngineConfig, Batch]) -> None:
    limits, found = step[0], step[1]
    shape = GraphShapes(limits).holding(found)
    num_prompts, num_tokens = len(found.slots) - found.num_decodes, sum(found.lengths)
    if shape is None:
        assert num_prompts > MAX_PROMPTS or num_tokens > MAX_TOKENS
        return
    assert shape in list(GraphShapes(limits))
    assert shape.num_decodes >= found.num_decodes and shape.num_prompts >= num_prompts
    assert num_tokens <= shape.num_tokens <= limits.max_num_batched_tokens
    assert shape.num_tokens - num_tokens <= max(7 if num_prompts == 0 else 127, num_tokens / 4)
    assert shape.num_decodes <= max(2 * found.num_decodes, 64)
    assert num_prompts or shape.num_prompts == 0


@given(steps(), st.integers(0, 600))
@example((config(144, 144), batch(0, [1])), 143)  # one token, and more answers than its smallest shape has places
def test_a_batch_with_forks_runs_in_a_shape_with_logits_for_each_or_in_none(
    step: tuple[EngineConfig, Batch], num_forks: int
) -> None:
    limits, found = step
    num_seqs = len(found.slots)
    if found.num_decodes == num_seqs:
        return
    found.sampled = [*range(num_seqs), *[num_seqs - 1] * min(num_forks, limits.max_num_seqs - num_seqs)]
    shape = GraphShapes(limits).holding(found)
    if shape is None:
        num_prompts, num_tokens = num_seqs - found.num_decodes, sum(found.lengths)
        assert num_prompts > MAX_PROMPTS or num_tokens > MAX_TOKENS
    else:
        assert shape in list(GraphShapes(limits)) and len(found.sampled) <= shape.num_seqs


@given(st.integers(1, 600), st.integers(1, 10_000))
def test_no_shape_has_more_decodes_than_rows_or_one_row_and_a_prompt_beside_it(seqs: int, tokens: int) -> None:
    for shape in GraphShapes(config(min(seqs, tokens), tokens)):
        assert shape.num_decodes <= shape.num_tokens - (shape.num_prompts > 0)
        assert shape.max_query_len > 1 or shape.num_seqs == shape.num_tokens


@given(st.integers(1, 600), st.integers(1, 10_000))
def test_there_are_no_more_shapes_than_their_number_and_few_less(seqs: int, tokens: int) -> None:
    seqs = min(seqs, tokens)
    beyond = num_shapes(tokens, seqs) - len(list(GraphShapes(config(seqs, tokens))))
    assert 0 <= beyond <= 2 * len(place_sizes(seqs))


@pytest.mark.parametrize(("seqs", "tokens", "mixed"), [(64, 2048, 24), (256, 2048, 47), (256, 8192, 79), (11, 24, 2)])
def test_graphs_of_steps_with_prompts_are_few(seqs: int, tokens: int, mixed: int) -> None:
    shapes = list(GraphShapes(config(seqs, tokens)))
    assert len(set(shapes)) == len(shapes) == mixed + len(decode_sizes(seqs))
    with_prompts = [shape.num_tokens for shape in shapes if shape.num_prompts]
    assert with_prompts == sorted(with_prompts, reverse=True), "the largest come first"
    assert with_prompts[0] == tokens


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (2, [1, 2]), (11, [1, 2, 4, 8, 11]), (16, [1, 2, 4, 8, 16])])
def test_decodes_alone_come_in_few_sizes(most: int, sizes: list[int]) -> None:
    assert decode_sizes(most) == sizes


@pytest.mark.parametrize(("most", "sizes"), [(1, [0, 1]), (64, [0, 64]), (65, [0, 64, 65]), (200, [0, 64, 128, 200])])
def test_places_of_decodes_double(most: int, sizes: list[int]) -> None:
    assert place_sizes(most) == sizes


def test_tokens_are_padded_by_steps_that_grow() -> None:
    assert token_sizes(1) == [1]
    assert token_sizes(300) == [128, 256, 300]
    assert token_sizes(2048) == [*range(128, 1025, 128), 1280, 1536, 1792, 2048]
    assert token_sizes(1_000_000)[-5:] == [4096, 5120, 6144, 7168, 8192]
