"""The tokens of an answer do not depend on whether its prompt was computed, found in the prefix cache, or forked."""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend import LLM, SamplingParams
from backend.config import EngineOptions
from backend.loader import LoadedModel
from backend.scheduler.scheduled_step import NewToken
from backend.scheduler.sequence import FinishReason
from tests.backend.families import random_model, save_checkpoint
from tests.examples import examples

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
DRAWN = SamplingParams(temperature=1, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True, repetition_penalty=1.2)
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4  # layers x K/V x heads x dim x fp32
FAMILIES = ("qwen2", "llama3-scaling", "mistral-window", "qwen3")
SHAPES: dict[str, EngineOptions] = {
    "together": EngineOptions(max_num_seqs=8),
    "chunked": EngineOptions(max_num_seqs=3, max_num_batched_tokens=24, prefill_chunk=7),
    "unchunked": EngineOptions(max_num_seqs=4, prefill_chunk="off"),
    "one step in flight": EngineOptions(max_num_seqs=4, max_num_batched_tokens=24, steps_in_flight=1),
    "blocks of three tokens": EngineOptions(max_num_seqs=4, max_num_batched_tokens=24, block_size=3),
}
SCARCE = EngineOptions(
    max_num_seqs=4, max_num_batched_tokens=32, max_model_len=136, block_size=4, kv_memory_bytes=136 * TOKEN_BYTES
)


def drawn(seed: int, length: int) -> list[int]:
    return torch.randint(131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SYSTEM = drawn(1, 53)
FIRST_TURNS = [SYSTEM + drawn(10 + length, length) for length in (0, 1, 11, 12, 30, 43)]


@cache
def right(family: str, prompt: tuple[int, ...]) -> list[int]:
    """What transformers continues a prompt with."""
    generated = _model(family).generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
    return generated[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


_model = cache(random_model)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: save_checkpoint(family, root / family) for family in FAMILIES}


def ask(llm: LLM, family: str, prompts: list[list[int]]) -> list[int]:
    """Have all answered as transformers answers each; returns how many tokens of each were found."""
    completions = llm.generate(prompts, GREEDY, progress=False)
    assert [one.token_ids for one in completions] == [right(family, tuple(prompt)) for prompt in prompts]
    assert llm.scheduler.kv_manager.num_held == 0
    return [one.num_cached_tokens for one in completions]


@pytest.mark.parametrize(
    ("family", "shape"), [*(("qwen2", shape) for shape in SHAPES), *((family, "chunked") for family in FAMILIES[1:])]
)
def test_greedy_tokens_of_two_turns_equal_transformers(checkpoints: dict[str, Path], family: str, shape: str) -> None:
    llm = LLM(str(checkpoints[family]), SHAPES[shape])
    size = llm.model.engine_config.block_size
    ask(llm, family, FIRST_TURNS[:1])
    found = ask(llm, family, FIRST_TURNS)
    assert found == [52 // size * size] + [53 // size * size] * 5, "the system prompt, up to its last full block"
    second_turns = [turn + right(family, tuple(turn)) + drawn(9, 5) for turn in FIRST_TURNS]
    found = ask(llm, family, second_turns)
    computed = [len(turn) + NUM_TOKENS - 1 for turn in FIRST_TURNS]
    assert found == [count // size * size for count in computed], "the answer as well, whose last token was never fed"
    assert ask(llm, family, second_turns) == [(len(turn) - 1) // size * size for turn in second_turns]


def test_sequences_that_begin_alike_at_once_compute_it_once(checkpoints: dict[str, Path]) -> None:
    llm = LLM(str(checkpoints["qwen2"]), SHAPES["together"])
    assert sorted(ask(llm, "qwen2", FIRST_TURNS))[1:] == [48] * 5
    counters = llm.scheduler.counters
    assert counters.prompt_tokens + counters.cached_tokens == sum(map(len, FIRST_TURNS))


def test_preemption_does_not_change_a_token(checkpoints: dict[str, Path]) -> None:
    llm = LLM(str(checkpoints["qwen2"]), SCARCE)
    others = [drawn(20 + length, length) + SYSTEM for length in (3, 20, 33)]
    for _ in range(2):
        ask(llm, "qwen2", FIRST_TURNS + others)
    assert llm.scheduler.counters.preemptions > 0
    assert llm.scheduler.counters.cached_tokens > 0
    assert llm.scheduler.kv_manager.blocks.cache.evictions > 0


@pytest.mark.parametrize(
    ("family", "shape"), [*(("qwen2", shape) for shape in SHAPES), *((family, "chunked") for family in FAMILIES[1:])]
)
def test_greedy_tokens_of_several_answers_equal_transformers(
    checkpoints: dict[str, Path], family: str, shape: str
) -> None:
    """Prompts that end within a block and at its end, and one shorter than a block."""
    llm = LLM(str(checkpoints[family]), SHAPES[shape])
    prompts = [*FIRST_TURNS[1:3], SYSTEM[:48], SYSTEM[:2]]
    asked = [prompt for prompt in prompts for _ in range(4)]
    forked = [n == len(prompt) for n, prompt in zip(ask(llm, family, asked), asked, strict=True)]
    assert sum(forked) >= 3
    counters = llm.scheduler.counters
    assert counters.prompt_tokens + counters.cached_tokens == 4 * sum(map(len, prompts))
    if shape == "together":
        assert counters.prompt_tokens <= sum(map(len, prompts))


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_preemption_of_several_answers_does_not_change_a_token(checkpoints: dict[str, Path], host_blocks: int) -> None:
    swap = None if host_blocks == 0 else host_blocks * 4 * TOKEN_BYTES
    llm = LLM(str(checkpoints["qwen2"]), replace(SCARCE, swap_space_bytes=swap or 0))
    prompts = [*FIRST_TURNS[1:], drawn(40, 21)]
    ask(llm, "qwen2", [prompt for prompt in prompts for _ in range(3)])
    counters = llm.scheduler.counters
    assert counters.preemptions > 0
    assert (counters.swapped_in > 0) == bool(host_blocks)


def test_the_option_turns_it_off(checkpoints: dict[str, Path]) -> None:
    llm = LLM(str(checkpoints["qwen2"]), EngineOptions(prefix_cache=False))
    for _ in range(2):
        assert ask(llm, "qwen2", FIRST_TURNS) == [0] * len(FIRST_TURNS)
    assert llm.scheduler.kv_manager.pool.num_free == llm.model.engine_config.num_blocks


class CancellingLLM(LLM):
    """Ends sequences of its own accord: each after as many of its tokens as its id says."""

    ends: dict[str, int]

    def step(self) -> list[NewToken]:
        new_tokens = super().step()
        for sequence, _, _ in new_tokens:
            if len(sequence.output) == self.ends.get(sequence.id):
                self.scheduler.finish_sequence(sequence, FinishReason.CANCELLED)
        self.scheduler.check_integrity()
        return new_tokens


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> LoadedModel:
    return LLM(str(checkpoints["qwen2"]), EngineOptions(max_model_len=200, max_num_seqs=8)).model


PROMPTS = st.builds(
    lambda begins, ends, tail: begins[:ends] + drawn(tail, tail),
    st.sampled_from([SYSTEM + drawn(2, 40), SYSTEM[:40] + drawn(3, 40), drawn(4, 60)]),
    st.integers(1, 100),
    st.integers(0, 20),
)
CONFIGS = st.builds(
    dict,
    num_blocks=st.sampled_from([13, 20, 60]),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.sampled_from([8, 32, 200]),
    prefill_chunk=st.sampled_from([5, 8]),
    steps_in_flight=st.sampled_from([1, 2]),
)


@settings(max_examples=examples(3, at_night=120))
@given(
    rounds=st.lists(
        st.lists(st.tuples(PROMPTS, st.booleans(), st.integers(1, 3)), min_size=1, max_size=7), min_size=1, max_size=3
    ),
    ends=st.dictionaries(st.sampled_from("0123456"), st.integers(1, NUM_TOKENS)),
    config=CONFIGS,
)
def test_no_token_depends_on_what_was_cached(
    model: LoadedModel,
    rounds: list[list[tuple[list[int], bool, int]]],
    ends: dict[str, int],
    config: dict[str, int],
) -> None:
    """Prompts that begin alike, some with several answers, greedy and drawn, in any batch, some cancelled: as one by
    one without a cache.
    """
    each = [
        [
            (prompt, GREEDY if is_greedy else replace(DRAWN, seed=n))
            for prompt, is_greedy, many in asked
            for n in range(many)
        ]
        for asked in rounds
    ]
    expected = [[plain(model, tuple(prompt), sampling) for prompt, sampling in asked] for asked in each]
    caching = CancellingLLM.of(replace(model, engine_config=replace(model.engine_config, **config)), model.runner)
    caching.ends = ends
    for asked, answers in zip(each, expected, strict=True):
        completions = caching.generate(*map(list, zip(*asked, strict=True)), progress=False)
        for index, completion in enumerate(completions):
            assert completion.token_ids == answers[index][: ends.get(str(index), NUM_TOKENS)]
            length, found = len(completion.prompt_token_ids), completion.num_cached_tokens
            assert found <= (length - 1) // 16 * 16 or found == length
    kv = caching.scheduler.kv_manager
    assert (kv.num_held, +Counter(kv.blocks.allowances.held)) == (0, Counter())


_PLAIN: dict[tuple[tuple[int, ...], SamplingParams], list[int]] = {}


def plain(model: LoadedModel, prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    """The tokens of an answer that was computed alone, without a cache; it writes over what the memory holds."""
    if (prompt, sampling) not in _PLAIN:
        config = replace(model.engine_config, prefix_cache=False)
        llm = LLM.of(replace(model, engine_config=config), model.runner)
        (completion,) = llm.generate([list(prompt)], sampling, progress=False)
        _PLAIN[prompt, sampling] = completion.token_ids
    return _PLAIN[prompt, sampling]
