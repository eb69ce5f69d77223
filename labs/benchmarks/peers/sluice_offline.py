"""Our engine as a library, and the baselines that it keeps: static batches, whole prompts, contiguous memory."""

import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import get_args

import torch

import labs.choices  # noqa: F401 - adds batching rules and contiguous memory
from backend.config import Batching, EngineOptions, KVAllocation, Quantization
from backend.llm import LLM
from backend.sampling_params import SamplingParams
from backend.scheduler.kv_accounts import KVAccounts
from backend.scheduler.scheduled_step import NewToken
from labs.benchmarks.peers.peer import Generate, Generated, answer_requests, parser
from labs.benchmarks.workload import Workload


@dataclass(slots=True)
class Observed:
    """The observations of one run, step by step."""

    started: float = field(default_factory=time.perf_counter)
    times: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 0
    allocated: float = 0.0  # token slots times seconds
    unused: float = 0.0
    largest_batch: int = 0


class ObservedLLM(LLM):
    """Notes when tokens come, and what of the allocated KV memory holds none."""

    observed: Observed

    def step(self) -> list[NewToken]:
        before = time.perf_counter()
        new_tokens = super().step()
        self._observe(new_tokens, time.perf_counter(), before)
        return new_tokens

    def _observe(self, new_tokens: list[NewToken], now: float, before: float) -> None:
        seen, scheduler = self.observed, self.scheduler
        for sequence, _, _ in new_tokens:
            seen.times.setdefault(sequence.id, []).append(now - seen.started)
        slots = scheduler.kv_manager.num_held * scheduler.config.block_size
        seen.allocated += slots * (now - before)
        seen.unused += KVAccounts(scheduler.kv_manager).unused_slots().total() * (now - before)
        seen.largest_batch = max(seen.largest_batch, len(scheduler.running))
        seen.steps += 1


@contextmanager
def load(options: Namespace) -> Iterator[Generate]:
    torch.set_num_threads(1)
    engine = EngineOptions(
        max_num_seqs=options.max_num_seqs,
        prefill_chunk="off" if options.prefill_chunk == "off" else None,
        batching=Batching(options.batching),
        kv_allocation=KVAllocation(options.kv_allocation),
        steps_in_flight=options.steps_in_flight,
        quantization=options.quantization,
        prefix_cache=False,  # as every engine is measured, since some have none
    )
    llm = ObservedLLM(options.model, engine, dtype=options.dtype, device="cpu")

    def generate(workload: Workload) -> Generated:
        sampling = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in workload.max_tokens]
        seen, cached = Observed(), llm.scheduler.counters.cached_tokens
        llm.observed = seen
        llm.generate(workload.prompts, sampling, progress=False, detokenize=workload.detokenize)
        seconds = time.perf_counter() - seen.started
        extra = {"KV waste": seen.unused / seen.allocated, "steps": seen.steps, "largest batch": seen.largest_batch}
        cached = llm.scheduler.counters.cached_tokens - cached
        times = [seen.times[str(index)] for index in range(len(workload.prompts))]
        return Generated(seconds, times, cached, extra=extra)

    yield generate


if __name__ == "__main__":
    own = parser()
    own.add_argument("--prefill-chunk", choices=("auto", "off"), default="auto")
    own.add_argument("--batching", choices=[*Batching], default="continuous")
    own.add_argument("--kv-allocation", choices=[*KVAllocation], default="paged")
    own.add_argument("--steps-in-flight", type=int, default=2)
    own.add_argument("--quantization", choices=get_args(Quantization), default="auto")
    answer_requests(own.parse_args(), load)
