"""Adapters in mixed batches: against transformers' model with each adapter's weights merged, and against each other."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backend import LLM, SamplingParams
from backend.config import EngineOptions
from backend.kernels import build
from labs.benchmarks.adapters import Storm
from tests.backend.adapters import MODULES, merged_model, random_adapter
from tests.backend.families import random_model, save_checkpoint
from tests.examples import examples

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
ADAPTERS = {"all": (4, MODULES, 1), "queries": (3, ("q_proj", "v_proj"), 2), "mlp": (1, MODULES[4:], 3)}
WAYS = {
    "together": EngineOptions(max_num_seqs=8, max_adapter_rank=4),
    "in chunks": EngineOptions(max_num_seqs=4, max_num_batched_tokens=24, prefill_chunk=7, max_adapter_rank=5),
    "blocks of two tokens": EngineOptions(max_num_seqs=8, block_size=2, max_adapter_rank=4),
}
SCARCE = EngineOptions(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=100,
    block_size=2,
    kv_memory_bytes=12 * 16 * 3 * 2 * 2 * 16 * 4,  # 192 tokens x layers x K/V x heads x dim x fp32
    swap_space_bytes=2**20,
    max_adapter_rank=4,
)


def prompts() -> list[list[int]]:
    """Prompts that begin alike, with the model alone and with each adapter."""
    generator = torch.Generator().manual_seed(7)
    begin = torch.randint(131, (40,), generator=generator).tolist()
    return [begin + torch.randint(131, (length,), generator=generator).tolist() for length in (1, 9, 21, 30)] * 2


NAMES = (None, *ADAPTERS, *ADAPTERS, None)


def oracle(family: str) -> list[list[int]]:
    models = {name: merged_model(family, *made) for name, made in ADAPTERS.items()}
    answers = []
    for prompt, name in zip(prompts(), NAMES, strict=True):
        model = random_model(family) if name is None else models[name]
        answers.append(model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)[0])
    return [answer[len(prompt) :].tolist() for answer, prompt in zip(answers, prompts(), strict=True)]


FAMILIES = ("qwen2", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("mistral-window", "llama-biases")))


@pytest.fixture(scope="module", params=FAMILIES)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A model with a folder of adapters beside it, and the right answers."""
    root = tmp_path_factory.mktemp("adapted")
    for name, made in ADAPTERS.items():
        random_adapter(request.param, root / name, *made)
    return save_checkpoint(request.param, root / "model"), oracle(request.param)


def open_llm(model: Path, options: EngineOptions, **keys: str) -> LLM:
    llm = LLM(str(model), options, **keys)
    for name in ADAPTERS:
        llm.load_adapter(name, model.parent / name)
    return llm


def answers(llm: LLM, sampling: SamplingParams = GREEDY) -> list[list[int]]:
    found = llm.generate(prompts(), sampling, progress=False, adapters=NAMES)
    llm.scheduler.check_integrity()
    assert llm.scheduler.kv_manager.num_held == 0
    return [one.token_ids for one in found]


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_are_those_of_merged_weights(adapted: tuple[Path, list[list[int]]], way: str) -> None:
    model, expected = adapted
    llm = open_llm(model, WAYS[way])
    assert answers(llm) == expected
    assert answers(llm) == expected, "with all prompts cached, each adapter's apart"
    assert llm.scheduler.counters.cached_tokens > 0


def test_tokens_stay_through_swaps_and_preemptions_and_evicted_adapters(
    adapted: tuple[Path, list[list[int]]],
) -> None:
    """An adapter of all products takes a third of the memory, which is for two prompts or fewer."""
    model, expected = adapted
    llm = open_llm(model, SCARCE)
    assert answers(llm) == answers(llm) == expected
    counters = llm.scheduler.counters
    assert counters.preemptions > 0 and counters.swapped_in > 0 and llm.scheduler.kv_manager.cache.evictions > 0


def test_adapters_on_weights_of_eight_bits_are_the_same_in_every_batch(adapted: tuple[Path, list[list[int]]]) -> None:
    model, plain = adapted
    if build.load_library(wait=True) is None:
        pytest.skip("weights of 8 bits need compiled kernels")
    found = answers(open_llm(model, replace(SCARCE, quantization="int8")))
    assert found == answers(open_llm(model, replace(WAYS["together"], quantization="int8"))) != plain


@pytest.mark.nightly
@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_every_kind_of_kernels_has_adapters(adapted: tuple[Path, list[list[int]]], kernels: str) -> None:
    model, expected = adapted
    assert answers(open_llm(model, WAYS["in chunks"], kernels=kernels)) == expected


def test_no_token_is_of_another_adapter_while_all_are_loaded_and_evicted_at_random(tmp_path: Path) -> None:
    """`python -m labs.benchmarks.adapters --part isolation --tokens 1000000` is the same for as long as one likes."""
    storm = Storm(tmp_path, seed=1)
    while storm.tokens < examples(150, at_night=20_000):
        storm.step()
    scheduler = storm.llm.scheduler
    scheduler.check_integrity()
    assert storm.wrong == 0
    assert storm.distinct > 0.9 and storm.cancelled > 0 and storm.loads > 0
    assert scheduler.counters.preemptions > 0 and scheduler.counters.swapped_in > 0
