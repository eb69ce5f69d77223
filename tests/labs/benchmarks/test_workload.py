from random import Random

from hypothesis import given
from hypothesis import strategies as st

from labs.benchmarks.workload import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    batches,
    decode,
    fresh,
    lengths,
    mixed,
    token_ids_only,
    varied,
)


@given(st.integers(0, 2**32), st.integers(1, 64), st.integers(8, 64))
def test_lengths_stay_in_bounds_and_add_up(seed: int, count: int, mean: int) -> None:
    found = lengths(Random(seed), count, 1.0, 4, 256, mean * count)
    assert len(found) == count
    assert sum(found) == mean * count
    assert all(4 <= length <= 256 for length in found)


def test_the_mixed_workload_has_the_published_number_of_tokens_and_is_always_the_same() -> None:
    workload = mixed()
    assert sum(map(len, workload.prompts)) == PROMPT_TOKENS
    assert workload.num_output_tokens == OUTPUT_TOKENS
    assert workload == mixed()


def test_varied_answers_are_mostly_short_and_a_few_long() -> None:
    answers = sorted(varied().max_tokens)
    assert answers[len(answers) // 2] < sum(answers) / len(answers) < answers[-1] / 4


def test_batches_hold_every_request_once_in_order() -> None:
    workload = mixed(10)
    parts = batches(workload, 4)
    assert [len(part.prompts) for part in parts] == [4, 4, 2]
    assert [prompt for part in parts for prompt in part.prompts] == workload.prompts


def test_a_decode_workload_has_one_length() -> None:
    assert decode(8, num_tokens=5).max_tokens == [5] * 8


def test_runs_of_a_workload_have_its_lengths_and_share_no_beginning() -> None:
    asked = [fresh(workload, run) for workload in (mixed(), token_ids_only(mixed()), decode(32)) for run in range(3)]
    assert [[*map(len, one.prompts)] for one in asked[:6]] == [[*map(len, mixed().prompts)]] * 6
    prompts = [prompt for one in asked for prompt in one.prompts]
    assert len({tuple(prompt[:4]) for prompt in [*prompts, *mixed().prompts]}) == len(prompts) + 64
    assert asked[0] == fresh(mixed(), 0)
