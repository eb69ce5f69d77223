from labs.benchmarks.workload import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    decode,
    fresh,
    mixed,
    token_ids_only,
)


def test_the_mixed_workload_has_the_published_number_of_tokens_and_is_always_the_same() -> None:
    workload = mixed()
    assert sum(map(len, workload.prompts)) == PROMPT_TOKENS
    assert workload.num_output_tokens == OUTPUT_TOKENS
    assert workload == mixed()


def test_runs_of_a_workload_have_its_lengths_and_share_no_beginning() -> None:
    asked = [fresh(workload, run) for workload in (mixed(), token_ids_only(mixed()), decode(32)) for run in range(3)]
    assert [[*map(len, one.prompts)] for one in asked[:6]] == [[*map(len, mixed().prompts)]] * 6
    prompts = [prompt for one in asked for prompt in one.prompts]
    assert len({tuple(prompt[:4]) for prompt in [*prompts, *mixed().prompts]}) == len(prompts) + 64
    assert asked[0] == fresh(mixed(), 0)
