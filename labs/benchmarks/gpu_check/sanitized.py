"""The program that `sanitize` examines: steps that launch every kernel, few and padded as graphs pad them.

`python -m labs.benchmarks.gpu_check.sanitized`; without a GPU and with TRITON_INTERPRET=1 it shows that kernels run. It
prints each step before it runs it, so that the place is known if a tool ends it. It ends by itself when its time is
over, so that the tool sums up, and prints its stack if it cannot. It ends without finalisers: after an error of the
device torch's fail in their turn, and hide it.
"""

import argparse
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backend.config import EngineConfig
from backend.kernels.integers import rounded
from backend.kernels.packed_product import PackedProduct, PackedWeight
from backend.kernels.self_check import disagreements
from backend.kernels.triton_lang import FP8
from backend.kernels.triton_ops import TritonOps
from backend.model.decoder import Decoder
from backend.model.known_shapes import QWEN3_06B
from backend.model.model_config import ModelConfig
from backend.model.weights import random_weights
from backend.paged_kv.kv_cache import KVCache
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, NewSequence
from backend.worker.cuda_graphs import StepGraphs
from backend.worker.device_stream import CpuStream, CudaStream, DeviceStream
from backend.worker.graph_shapes import GraphShapes, StepShape
from backend.worker.model_runner import ModelRunner
from labs.benchmarks.gpu_check.models import TINY

PLAIN = SamplingParams(temperature=1)
PENALISED = SamplingParams(temperature=1, presence_penalty=1, repetition_penalty=1.1)
FILTERED = SamplingParams(temperature=1, top_k=50, top_p=0.9, min_p=0.01)
BOTH = replace(FILTERED, presence_penalty=0.5)
SECONDS_TO_END = 2.0  # that a step and the tool's summary may still take


@dataclass(frozen=True, slots=True)
class Numbers:
    """The types and heads of a model, which kernels are compiled for."""

    name: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    group: int
    window: int | None = None
    qk_norm: bool = True

    def model(self, vocab: int) -> ModelConfig:
        return replace(
            TINY,
            vocab_size=vocab,
            num_layers=1,
            num_heads=2 * self.group,
            num_kv_heads=2,
            head_dim=self.head_dim,
            sliding_window=self.window,
            qk_norm=self.qk_norm,
        )


NUMBERS = (
    Numbers("bf16, heads of 128", torch.bfloat16, torch.bfloat16, 128, 4),
    Numbers("fp8 cache, heads of 64", torch.bfloat16, FP8, 64, 7, window=100, qk_norm=False),
    Numbers("fp32, heads of 32", torch.float32, torch.float32, 32, 2),
)
"""By worth: time may be over before the last, and no fp32 is served."""


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of the vocabulary, and of the prompts of three sequences."""

    vocab: int
    longest: int
    others: tuple[int, int]

    @property
    def config(self) -> EngineConfig:
        """Room for two sequences more, so that decodes are padded."""
        return EngineConfig(
            num_blocks=3 * (self.longest // 16 + 2),
            block_size=16,
            max_model_len=self.longest + 16,
            max_num_seqs=5,
            max_num_batched_tokens=self.longest,
            prefill_chunk=self.longest,
            prefix_cache=False,
        )


SIZE = Size(QWEN3_06B.vocab_size, 600, (70, 9))  # more chunks of a decode than one step of the join takes
SMALL = Size(1500, 40, (9, 3))  # which an interpreter has time for


class EagerGraphs(StepGraphs):
    """These are work that is done again, padded as graphs are: without a cache of memory nothing can be recorded."""

    def __init__(self, runner: ModelRunner) -> None:
        assert runner._logits is not None
        self._shapes, self._logits, self._compute = GraphShapes(runner.config), runner._logits, runner._compute_padded

    def replay(self, shape: StepShape) -> Tensor:
        self._compute(shape)
        return self._logits


class PaddingCpuStream(CpuStream):
    """A stream that claims to capture graphs: a runner on it allocates the memory that graphs write."""

    captures = True


def make_runner(numbers: Numbers, size: Size, device: torch.device) -> ModelRunner:
    model, config = numbers.model(size.vocab), size.config
    weights = random_weights(model, numbers.dtype, 0, device)
    kv = KVCache(model, config.num_blocks, config.block_size, numbers.kv_dtype, device)
    stream: DeviceStream = CudaStream(device) if device.type == "cuda" else PaddingCpuStream()
    return ModelRunner(Decoder(model, weights, TritonOps(), config.max_model_len), kv, config, stream)


def steps(size: Size) -> dict[str, Batch]:
    """Return the steps of one runner, named by the novelty of each, in the order in which they are run."""
    longest, (middle, short) = size.longest, size.others
    batches = {
        "a prompt": _prompts({0: longest}, PLAIN, size),
        "a decode": _decodes([longest]),
        "prompts beside a decode, filters and penalties": _beside(
            _decodes([longest + 1]), _prompts({1: middle, 2: short}, BOTH, size)
        ),
        "padded decodes, filters and penalties": _decodes([longest + 2, middle, short]),
        "a prompt of few tokens, filters": _prompts({0: short}, FILTERED, size),
        "a prompt of few tokens, penalties": _prompts({0: short}, PENALISED, size),
        "decodes, padded, once more": _decodes([short, middle + 1, short + 1]),
    }
    for number, batch in enumerate(batches.values()):
        batch.step = number
    return batches


def _prompts(lengths: dict[int, int], kind: SamplingParams, size: Size) -> Batch:
    """Whole prompts in one step, by slot; each slot has blocks of its own."""
    width = size.longest // 16 + 2
    tokens = {slot: [7 * n % 599 for n in range(length)] for slot, length in lengths.items()}
    return Batch(
        0,
        slots=list(lengths),
        starts=[0] * len(lengths),
        lengths=list(lengths.values()),
        token_ids=[token for prompt in tokens.values() for token in prompt],
        sampled=list(range(len(lengths))),
        new_blocks=[(slot, 0, [slot * width + n for n in range(length // 16 + 1)]) for slot, length in lengths.items()],
        admitted=[NewSequence(slot, kind, slot, tokens[slot], length) for slot, length in lengths.items()],
    )


def _decodes(positions: list[int]) -> Batch:
    """Return decodes of the first slots, at these positions."""
    every = list(range(len(positions)))
    return Batch(0, len(every), every, positions, [1] * len(every), [], every)


def _beside(decodes: Batch, prompts: Batch) -> Batch:
    rows = decodes.num_decodes
    return replace(
        prompts,
        num_decodes=rows,
        slots=decodes.slots + prompts.slots,
        starts=decodes.starts + prompts.starts,
        lengths=decodes.lengths + prompts.lengths,
        sampled=decodes.sampled + [rows + row for row in prompts.sampled],
    )


def multiply_packed(device: torch.device) -> None:
    """Run a product of few rows and one of many with a weight in each form of 4 and 8 bits."""
    weight = torch.randn(80, 320, device=device)
    forms = [PackedWeight.of_integers(rounded(weight, bits)) for bits in (4, 8)] + [
        PackedWeight.rounded_to_e4m3(weight)
    ]
    for form in forms:
        for rows in (3, 70):
            PackedProduct((form,), None)(torch.randn(rows, 320, device=device).bfloat16())


def run(all_numbers: tuple[Numbers, ...], size: Size, device: torch.device) -> Iterator[str]:
    """Yield the name of the next step before it runs, and at the end."""
    yield "operations one by one"  # masks and adapters among them, which no step below has
    disagreements(TritonOps(), torch.float32, device)
    multiply_packed(device)
    for numbers in all_numbers:
        runner = None
        for what, batch in steps(size).items():
            yield f"{numbers.name}: {what}"
            if runner is None:
                runner = make_runner(numbers, size, device)
                runner.graphs = EagerGraphs(runner)
            runner.launch(batch).wait()
    yield "the end"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, help="of kinds of models (default: all)")
    parser.add_argument("--began", type=float, default=time.monotonic(), help="by the machine's monotonic clock")
    parser.add_argument("--seconds", type=float, default=600.0, help="from then on")
    options = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(
        max(0.1, options.began + options.seconds + SECONDS_TO_END - time.monotonic()), exit=True
    )
    torch.set_grad_enabled(False)
    gpu = torch.cuda.is_available()
    device, size = (torch.device("cuda", 0), SIZE) if gpu else (torch.device("cpu"), SMALL)
    chosen = NUMBERS[: options.numbers] if gpu else NUMBERS[2:]
    total = 1 + len(chosen) * len(steps(size))
    for done, what in enumerate(run(chosen, size, device)):
        seconds = time.monotonic() - options.began
        print(f"{seconds:.1f} s: {done} of {total} steps ran, then {what}", flush=True)
        if seconds > options.seconds:
            break
    print(f"ran {done} steps of {total}", flush=True)


if __name__ == "__main__":
    status = 0
    try:
        main()
    except Exception:  # noqa: BLE001 - it is told
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
