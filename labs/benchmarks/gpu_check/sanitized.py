"""Steps of all kinds by Triton's kernels, small and padded as graphs pad them: what `sanitize` has tools look at.

`python -m labs.benchmarks.gpu_check.sanitized`; without a GPU and with TRITON_INTERPRET=1 it shows that kernels run.
The process ends without finalisers: after an error of the device torch's fail in their turn, and hide it.
"""

import os
import sys
import traceback
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from backend.config import EngineConfig
from backend.kernels.self_check import disagreements
from backend.kernels.triton_lang import FP8
from backend.kernels.triton_ops import TritonOps
from backend.model.decoder import Decoder
from backend.model.known_shapes import QWEN3_06B
from backend.model.model_config import ModelConfig
from backend.model.weights import random_weights
from backend.paged_kv.kv_cache import KVCache
from backend.sampling_params import SamplingParams
from backend.worker.device_stream import CpuStream, CudaStream, DeviceStream, Graph, Work
from backend.worker.model_runner import ModelRunner
from labs.benchmarks.gpu_check.leak import KINDS, Traffic
from labs.benchmarks.gpu_check.models import TINY

FEW_KINDS = (
    SamplingParams(temperature=0, repetition_penalty=1.1, allowed_token_ids=(1, 2, 3)),
    SamplingParams(temperature=1, top_k=5, top_p=0.9, min_p=0.1),
)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The types and heads of a model, which kernels are compiled for."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    group: int
    window: int | None = None
    qk_norm: bool = False

    @property
    def model(self) -> ModelConfig:
        return replace(
            TINY,
            num_heads=2 * self.group,
            num_kv_heads=2,
            head_dim=self.head_dim,
            sliding_window=self.window,
            qk_norm=self.qk_norm,
        )


NUMBERS = (
    Numbers(torch.float32, torch.float32, 32, 2, qk_norm=True),
    Numbers(torch.bfloat16, torch.bfloat16, 128, 4),
    Numbers(torch.bfloat16, FP8, 64, 7, window=100),
)


class EagerStream(CudaStream):
    """Its graphs do their work again: without a cache of memory nothing can be recorded."""

    def capture(self, work: Work) -> Graph:
        return SimpleNamespace(replay=work)


class EagerCpuStream(CpuStream):
    """The same of a CPU."""

    captures = True

    def capture(self, work: Work) -> Graph:
        return SimpleNamespace(replay=work)


def run(numbers: Numbers, device: torch.device) -> int:
    """Returns how many steps were run."""
    gpu = device.type == "cuda"
    model = replace(numbers.model, vocab_size=QWEN3_06B.vocab_size if gpu else 40, num_layers=2 if gpu else 1)
    seqs, longest = (5, 500) if gpu else (2, 5)
    config = EngineConfig(
        num_blocks=160 if gpu else 8,
        max_model_len=2 * longest + 20,
        max_num_seqs=seqs,
        max_num_batched_tokens=longest,
        prefill_chunk=longest,
        prefix_cache=False,
    )
    weights = random_weights(model, numbers.dtype, 0, device)
    kv = KVCache(model, config.num_blocks, config.block_size, numbers.kv_dtype, device)
    stream: DeviceStream = EagerStream(device) if gpu else EagerCpuStream()
    runner = ModelRunner(Decoder(model, weights, TritonOps(), config.max_model_len), kv, config, stream)
    if gpu:
        runner.warm_up()
    traffic = Traffic(runner, seqs, longest)
    traffic.fill_with(KINDS if gpu else FEW_KINDS, 3 if gpu else 2)
    return traffic.steps


def main() -> None:
    torch.set_grad_enabled(False)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    steps = 0
    for numbers in NUMBERS if gpu else NUMBERS[:1]:
        steps += run(numbers, device)
        if gpu:
            disagreements(TritonOps(), numbers.dtype, device)  # every kernel, also those of no step here
            torch.cuda.synchronize(device)
        print(f"{numbers}: {steps} steps", flush=True)
    print(f"ran {steps} steps", flush=True)


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
