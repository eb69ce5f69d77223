"""One sequence's logits, and whole texts, are the same to the last bit in every batch and cut."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from backend import LLM, SamplingParams
from backend.config import EngineOptions
from backend.kernels import build
from backend.kernels.cpu import select_ops
from backend.model.decoder import Decoder
from backend.model.weights import random_weights
from tests.backend.families import save_checkpoint
from tests.backend.paged_batch import PagedBatch
from tests.backend.runners import MODEL
from tests.examples import examples

SHAPE = replace(MODEL, head_dim=32, max_position=1024)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = 540
REQUESTS = examples(50, at_night=100)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    if build.load_library(wait=True) is None:
        pytest.skip("no C++ compiler")


@cache
def decoder(dtype: torch.dtype) -> Decoder:
    ops = select_ops(torch.device("cpu"), dtype, "native")
    made = Decoder(SHAPE, random_weights(SHAPE, dtype, seed=1), ops, SHAPE.max_position)
    assert ops.batch_invariant
    return made


@cache
def prompt() -> list[int]:
    generator = random.Random(1)
    return [generator.randrange(SHAPE.vocab_size) for _ in range(TOKENS)]


def logits(dtype: torch.dtype, sizes: list[int], others: list[list[int]]) -> Tensor:
    """Of every token of the prompt [TOKENS, vocab], in chunks of `sizes`, beside a chunk of each of `others` a step."""
    generator = random.Random(len(sizes))
    batch = PagedBatch(decoder(dtype), [prompt(), *others], block_size=16)
    parts = []
    for size in sizes:
        rows = {
            s: min(generator.choice((1, 1, 5, 40)), len(other) - batch.computed[s])
            for s, other in enumerate(others, start=1)
            if batch.computed[s] < len(other) and generator.random() < 0.8
        }
        before = sum(count for s, count in rows.items() if s % 2)
        ordered = {s: n for s, n in rows.items() if s % 2} | {0: size} | {s: n for s, n in rows.items() if s % 2 == 0}
        parts.append(batch.step(ordered)[before : before + size])
    return torch.cat(parts)


def chunks(size: int) -> list[int]:
    return [min(size, TOKENS - start) for start in range(0, TOKENS, size)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_the_same_in_every_chunk_and_as_decodes(dtype: torch.dtype) -> None:
    whole = logits(dtype, [TOKENS], [])
    for size in (1, 16, 33, 96, 512):
        assert torch.equal(logits(dtype, chunks(size), []), whole), size


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_the_same_beside_others_and_computed_again(dtype: torch.dtype) -> None:
    """Decodes after a chunk of the prompt, as they are made; and all of it as one prompt, as after a preemption."""
    generator = random.Random(2)
    whole = logits(dtype, [TOKENS], [])
    for count in (1, 3, 9):
        others = [[generator.randrange(97) for _ in range(generator.randint(1, 130))] for _ in range(count)]
        sizes = [generator.randint(1, 200), *[1] * generator.randint(1, 40)]
        sizes.append(TOKENS - sum(sizes))
        assert torch.equal(logits(dtype, sizes, others), whole), sizes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen2", tmp_path_factory.mktemp("checkpoint"))


@cache
def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    generator = random.Random(11)
    prompts = [[generator.randrange(131) for _ in range(generator.choice((3, 20, 60, 120)))] for _ in range(REQUESTS)]
    sampling = [
        SamplingParams(
            temperature=1,
            seed=number,
            top_p=generator.choice([1, 0.95]),
            presence_penalty=generator.choice([0, 0.6]),
            frequency_penalty=generator.choice([0, 0.3]),
            repetition_penalty=generator.choice([1, 1.2]),
            max_tokens=generator.randint(4, 40),
            ignore_eos=True,
        )
        for number in range(REQUESTS)
    ]
    return prompts, sampling


def texts(llm: LLM) -> list[list[int]]:
    prompts, sampling = requests()
    return [one.token_ids for one in llm.generate(prompts, sampling, progress=False)]


def test_requests_draw_the_same_texts_alone_and_beside_others_through_preemptions(checkpoint: Path) -> None:
    alone = texts(LLM(str(checkpoint), EngineOptions(max_num_seqs=1), kernels="native"))
    preemptions = 0
    for chunk, seqs, blocks in ((33, 12, 16), (16, 30, 24)):
        options = EngineOptions(
            max_num_seqs=seqs,
            max_num_batched_tokens=70,
            prefill_chunk=chunk,
            max_model_len=240,
            kv_memory_bytes=blocks * 16 * 3 * 2 * 2 * 16 * 4,
        )
        llm = LLM(str(checkpoint), options, kernels="native")
        assert texts(llm) == alone, options
        preemptions += llm.scheduler.counters.preemptions
    assert preemptions > 20
