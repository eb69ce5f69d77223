"""Adapters: their products beside the reference, texts of mixed batches beside a CPU's, and their cost in a step."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from backend import LLM, SamplingParams
from backend.config import EngineOptions
from backend.kernels import reference
from backend.kernels.ops import StepAdapters
from backend.kernels.self_check import TOLERANCE, small_step
from backend.kernels.triton_ops import TritonOps
from backend.model.known_shapes import QWEN3_06B
from labs.benchmarks.adapters import MODULES, MOST_COST, ROWS, adapter_tensors, measure_steps, save_adapter
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.gpu_check.models import TINY, random_runner

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NUM_ADAPTERS = 6  # of the mixed batch, beside the model alone
EQUAL_SHARE = 0.97  # of texts: the others part at a near tie of logits
MEASURED_SECONDS = 3.0
KV_BYTES = 8 << 30  # of which 32 adapters of rank 64 take 2.6


def check(device: torch.device) -> Iterator[Finding]:
    on_gpu = device.type == "cuda"
    shapes = [(70, 1), (70, 40)] if on_gpu else [(3, 1), (18, 17)]  # tokens, and those of a sequence
    for dtype in DTYPES:
        ranks = (3, 16, 64) if on_gpu else (3,)
        errors = [low_rank_error(device, dtype, *shape, rank) for shape in shapes for rank in ranks]
        yield Finding(f"low-rank products, {dtype}, error", max(errors), bound=TOLERANCE[dtype], exact=True)
    yield from _texts(device, tokens=48 if on_gpu else 4)
    for rank in (8, 16, 64) if on_gpu else (8,):
        memory = KV_BYTES if on_gpu else None
        options = EngineOptions(
            max_num_seqs=ROWS if on_gpu else 2, max_model_len=256, max_adapter_rank=rank, kv_memory_bytes=memory
        )
        runner = random_runner(QWEN3_06B if on_gpu else TINY, options, device)
        found = measure_steps(runner, rank, MEASURED_SECONDS if on_gpu else 0.0)
        what = f"{runner.config.max_num_seqs} adapters of rank {rank}, a step / without"
        yield Finding(what, found.ratio, bound=MOST_COST)
        yield Finding("the same step without", min(found.fast), "ms")


def low_rank_error(device: torch.device, dtype: torch.dtype, tokens: int, longest: int, rank: int) -> float:
    """The largest error of the kernels on a ragged step, relative to the largest result."""
    generator = torch.Generator().manual_seed(longest + rank)
    inputs, parts = 200, ((300, 70, 70), (200,), (130, 130), (200,))
    rows = torch.randint(-1, 5, (tokens // longest + 1,), generator=generator).repeat_interleave(longest)[:tokens]
    memory = torch.randn(40 * rank * 320, generator=generator) / rank
    vectors = torch.randint(len(memory) // 16 - 20, (5, 2, 14 * rank), generator=generator) * 16
    of_rank = torch.arange(14 * rank) % rank >= torch.tensor([rank, 1, rank // 2, rank, rank - 1]).view(5, 1, 1)
    vectors.masked_fill_(of_rank, -1)
    adapters = StepAdapters(rows.int().to(device), vectors.to(device), memory.to(device, dtype), rank, parts)
    step = replace(small_step(device), max_query_len=longest, adapters=adapters)
    error = 0.0
    for product, width in enumerate((inputs, 300, 200, 130)):
        x = torch.randn((tokens, width), generator=generator).to(device, dtype)
        expected = torch.randn((tokens, sum(parts[product])), generator=generator).to(device, dtype)
        found = expected.clone()
        reference.adapt(expected, x, step, 1, product)
        TritonOps().adapt(found, x, step, 1, product)
        error = max(error, float((found.float() - expected.float()).abs().max() / expected.float().abs().max()))
    return error if math.isfinite(error) else math.inf


def _texts(device: torch.device, tokens: int) -> Iterator[Finding]:
    """Greedy texts in fp32 of a batch in which every adapter is next to every other, cut into chunks."""
    options = EngineOptions(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=256, max_adapter_rank=4)
    with TemporaryDirectory() as folder:
        names = [None, *(f"adapter {number}" for number in range(NUM_ADAPTERS))]
        prompts = [[2 + (7 * row + 3 * at) % 900 for at in range(5 + 9 * row)] for row in range(len(names))]
        texts: list[list[list[int]]] = []
        for where in (device.type, "cpu"):
            llm = LLM("embedded", options, device=where, dtype="float32")
            for number in range(NUM_ADAPTERS):
                rank, modules = 1 + number % 4, MODULES if number % 2 else MODULES[: 1 + number]
                tensors = adapter_tensors(llm.model.config, rank, modules, number, strength=2.0)
                llm.load_adapter(f"adapter {number}", save_adapter(Path(folder) / str(number), tensors, rank))
            sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            found = llm.generate(prompts, sampling, progress=False, detokenize=False, adapters=names)
            texts.append([one.token_ids for one in found])
    pairs = [pair for ours, theirs in zip(*texts, strict=True) for pair in zip(ours, theirs, strict=True)]
    share = sum(one == other for one, other in pairs) / len(pairs)
    yield Finding("tokens of a mixed batch that are the CPU's", share, bound=EQUAL_SHARE, sense=">=")
    distinct = len({tuple(text) for text in texts[0]}) / len(names)
    yield Finding("texts that tell their adapter", distinct, bound=1, sense=">=")
