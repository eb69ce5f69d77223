"""Model runners over a small random decoder, and what they generate."""

from collections import abc, deque
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from backend.config import EngineConfig
from backend.kernels.ops import Ops, RotaryHeads, StepInputs
from backend.kernels.reference import ReferenceOps
from backend.llm import OfflineEngine
from backend.model.decoder import Decoder
from backend.model.known_shapes import LLAMA_32M
from backend.model.model_config import ModelConfig
from backend.model.weights import random_weights
from backend.paged_kv.kv_cache import KVCache
from backend.paged_kv.layer_groups import groups_of, one_group
from backend.sampling_params import SamplingParams
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import PromptRequest, Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed
from backend.worker.device_stream import CpuStream, DeferredWork, DeviceStream, Work
from backend.worker.graph_shapes import StepShape
from backend.worker.model_runner import ModelRunner

MODEL = replace(
    LLAMA_32M,
    vocab_size=97,
    hidden_size=96,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=24,
    max_position=64,
    qk_norm=True,
    eos_token_ids=(3,),
)
CONFIG = EngineConfig(
    num_blocks=40, max_model_len=64, block_size=4, max_num_seqs=11, max_num_batched_tokens=24, prefill_chunk=7
)


class EagerGraph:
    """A graph that does its work again."""

    def __init__(self, work: partial[object]) -> None:
        self.work = work
        self.shape: StepShape = work.args[0]
        self.replays = -1  # once it is recorded, of which its first replay is a part, 0

    def replay(self) -> None:
        self.replays += 1
        self.work()


class EagerGraphStream(CpuStream):
    """A CPU whose runner believes that it has graphs: steps run padded."""

    captures = True

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[EagerGraph] = []

    def capture(self, work: Work) -> EagerGraph:
        assert isinstance(work, partial)
        self.graphs.append(EagerGraph(work))
        return self.graphs[-1]


class AheadStream(CpuStream):
    """A CPU that works when it is told to, as a GPU does, and not when it is waited for."""

    runs_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.fails_at = -1  # launch
        self.failure: type[BaseException] = MemoryError
        self.launches = 0

    def launch(self, work: Work, copies: Work | None = None) -> DeferredWork:
        self.launches += 1
        if self.launches == self.fails_at:
            raise self.failure("a test has it fail")
        super().launch(work, copies).synchronize()
        return DeferredWork(self, [], 0)


class PaddedOps(ReferenceOps):
    """The reference, with the promise that graphs need: a token whose slot is negative is stored in the last block."""

    def rope_and_store(  # type: ignore[override]
        self, qkv: Tensor, rotation: RotaryHeads, k_cache: Tensor, v_cache: Tensor, step: StepInputs
    ) -> Tensor:
        spare = k_cache.shape[0] * k_cache.shape[2] - 1
        slots = torch.where(step.slot_mapping < 0, spare, step.slot_mapping)
        return ReferenceOps.rope_and_store(qkv, rotation, k_cache, v_cache, replace(step, slot_mapping=slots))


def make_runner(
    ops: Ops | None = None,
    device_stream: DeviceStream | None = None,
    config: EngineConfig = CONFIG,
    seed: int = 0,
    kv_dtype: torch.dtype = torch.float32,
    model: ModelConfig | None = None,
) -> ModelRunner:
    """Its KV memory has a block more than the engine knows of."""
    model = model or MODEL
    groups = groups_of(model, config.max_model_len) if config.window_groups else one_group(model.num_layers)
    weights = random_weights(model, torch.float32, seed)
    decoder = Decoder(model, weights, ops or PaddedOps(), config.max_model_len, groups=groups)
    cpu, num_layers = torch.device("cpu"), groups.size
    kv = KVCache(model, config.num_blocks + 1, config.block_size, kv_dtype, cpu, num_layers=num_layers)
    return ModelRunner(decoder, kv, config, device_stream)


def generate(
    runner: ModelRunner, prompts: abc.Sequence[list[int]], sampling: abc.Sequence[SamplingParams], at_once: int = 1000
) -> list[list[int]]:
    """The tokens of each prompt, prompt i with seed i; `at_once` prompts arrive with each step."""
    pairs = enumerate(zip(prompts, sampling, strict=True))
    sequences = [
        Sequence(
            PromptRequest(str(n), "", prompt, params, params.max_tokens or 8, n, frozenset(params.stop_token_ids)),
            float(n),
        )
        for n, (prompt, params) in pairs
    ]
    complete(runner, sequences, at_once)
    return [sequence.output for sequence in sequences]


def complete(runner: ModelRunner, sequences: abc.Sequence[Sequence], at_once: int = 1000) -> None:
    """Run sequences to their ends; `at_once` arrive with each step."""
    scheduler = Scheduler(runner.config, FirstComeFirstServed())
    coming = deque(sequences)
    tokens: dict[str, list[int]] = {sequence.id: [] for sequence in sequences}
    loop = OfflineEngine(scheduler, runner)
    while coming or scheduler.has_work:
        for _ in range(min(at_once, len(coming))):
            scheduler.add(coming.popleft())
        for sequence, token, _ in loop.step():
            tokens[sequence.id].append(token)
    assert scheduler.kv_manager.pool.num_free == runner.config.num_blocks
    assert [*tokens.values()] == [sequence.output for sequence in sequences]
