"""Memory leaks: over steps of all kinds, and from one model loaded to the next.

The first steps take every kind at its fullest, so that all caches are filled; after them neither allocated nor reserved
memory of torch may grow. A discarded model frees its memory at once, without the garbage collector, and another of its
size fits.
"""

import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from weakref import ref

import torch

from backend.config import EngineOptions
from backend.model.model_config import ModelConfig
from backend.paged_kv.block_names import BlockNames
from backend.paged_kv.kv_cache import block_bytes
from backend.sampling_params import SamplingParams
from backend.scheduler.forking import group_by_prompt
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import FinishReason, PromptRequest, Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed
from backend.step_loop import StepLoop
from backend.worker import warm_up
from backend.worker.executor import InlineDevice
from backend.worker.model_runner import ModelRunner
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.gpu_check.models import SHAPES, dtype_of, random_runner

KINDS = (
    *warm_up.KINDS,
    SamplingParams(temperature=0.7, min_p=0.05, frequency_penalty=0.5, repetition_penalty=1.2, logprobs=3),
)
GREEDY = SamplingParams(temperature=0)
FILLING = 12  # tokens of each answer, while all seats are taken by one kind
BLOCK_SIZE = 16
FORKS = 3  # answers to one prompt
CANCELLED = 0.05  # of steps with a cancellation
FITS = 0.98  # of the KV memory of the first load


@dataclass(frozen=True, slots=True)
class Plan:
    model: ModelConfig  # of the steps
    steps: int
    seqs: int
    longest_prompt: int
    longest_answer: int
    kv_tokens: int  # fewer than all may have, so that some give way
    loaded: ModelConfig
    loaded_seqs: int  # for whose contexts a load would take all the memory that there is

    def options(self, device: torch.device) -> EngineOptions:
        kv_bytes = self.kv_tokens // BLOCK_SIZE * block_bytes(self.model, BLOCK_SIZE, dtype_of(device))
        return EngineOptions(
            max_num_seqs=self.seqs,
            max_model_len=self.longest_prompt + self.longest_answer,
            max_num_batched_tokens=self.longest_prompt,
            kv_memory_bytes=kv_bytes,
            swap_space_bytes=2 * kv_bytes,
        )


QWEN = SHAPES["Qwen3-0.6B"]
GPU = Plan(replace(QWEN, num_layers=4), 2000, 16, 1024, 256, 6144, QWEN, 32)
SMALL = Plan(SHAPES["tiny"], 300, 4, 60, 40, 192, SHAPES["tiny"], 4)


def check(device: torch.device) -> Iterator[Finding]:
    plan = GPU if device.type == "cuda" else SMALL
    yield from _steps(plan, device, random_runner(plan.model, plan.options(device), device))
    options = EngineOptions(max_num_seqs=plan.loaded_seqs, max_num_batched_tokens=256)
    yield from _loads(device, lambda: random_runner(plan.loaded, options, device))


def _steps(plan: Plan, device: torch.device, runner: ModelRunner) -> Iterator[Finding]:
    traffic = Traffic(runner, plan.seqs, plan.longest_prompt)
    traffic.fill_with(KINDS, FILLING)
    first, before = traffic.steps, memory(device)
    pinned, began = pinned_bytes(device), time.perf_counter()
    with waits_of_the_host(device) as waits:
        traffic.mix(plan.steps, plan.longest_answer)
    yield Finding("mean step", (time.perf_counter() - began) / (traffic.steps - first) * 1e3, "ms")
    told = f": {waits[0]}" if waits else ""
    yield Finding(f"operations that had the host wait{told}", len(waits), bound=0, exact=True)
    counters = traffic.scheduler.counters
    happened = (counters.preemptions, counters.swapped_in, counters.cached_tokens, traffic.cancelled)
    told = "{:,} preemptions, {:,} blocks copied back, {:,} cached tokens, {:,} cancelled".format(*happened)
    yield Finding(f"{traffic.steps:,} steps", told)
    yield Finding("kinds of events that did not occur in them", happened.count(0), bound=0, exact=True)
    for kind, then, now in zip(("allocated", "reserved"), before, memory(device), strict=True):
        grown = (now - then) / 2**20
        yield Finding(f"memory {kind}, growth after the first {first} steps", grown, "MiB", bound=0, exact=True)
    yield Finding("pinned memory of the host, growth", (pinned_bytes(device) - pinned) / 2**20, "MiB")


def _loads(device: torch.device, load: Callable[[], ModelRunner]) -> Iterator[Finding]:
    gc.collect()
    gc.disable()
    try:
        first, first_kept = _load_and_let_go(load)
        left = memory(device)[0]
        second, second_kept = _load_and_let_go(load)
        grown = memory(device)[0] - left
    finally:
        gc.enable()
    yield Finding("KV blocks of a second load, of the first's", second / first, bound=FITS, sense=">=", exact=True)
    kept = first_kept + second_kept
    yield Finding("models that stay when they are let go", kept, bound=0, exact=True)
    yield Finding("allocated after the second, beyond the first", grown / 2**20, "MiB", bound=0, exact=True)


def _load_and_let_go(load: Callable[[], ModelRunner]) -> tuple[int, bool]:
    """Return its KV blocks, and True if they are still allocated."""
    runner = load()
    steps = [*warm_up.prompts(runner.config)][-2:]
    for number, step in enumerate(steps):
        step.step = number
    launched = [runner.launch(step) for step in steps]
    for pending in launched:
        pending.wait()
    blocks, count = ref(runner.kv.blocks), runner.config.num_blocks
    del runner, launched, pending
    return count, blocks() is not None


class Traffic:
    """Requests of all kinds on one runner."""

    def __init__(self, runner: ModelRunner, seqs: int, longest_prompt: int) -> None:
        self.steps = self.cancelled = 0
        config = replace(runner.config, max_preemptions=sys.maxsize)
        self.scheduler = Scheduler(config, FirstComeFirstServed())
        self._seqs, self._longest_prompt = seqs, longest_prompt
        self._vocab, self._random = runner.decoder.config.vocab_size, Random(0)
        self._names = BlockNames(b"leak", config.block_size)
        self.scheduler.name_blocks_by(self._names)
        self._device = InlineDevice(runner)
        self._loop = StepLoop(self.scheduler, self._device.launch, time.perf_counter)
        self._prompts = [self._tokens(longest_prompt) for _ in range(4)]  # that others begin like
        self._arrived = 0

    def fill_with(self, kinds: Listed[SamplingParams], tokens: int) -> None:
        """All seats by one kind after the other, one of them with the longest prompt."""
        for kind in kinds:
            for number in range(self._seqs):
                length = self._longest_prompt if number == 0 else max(1, self._longest_prompt // 8)
                self._arrive([self._tokens(length)], kind, tokens)
            self._drain()
        self._end()

    def mix(self, steps: int, longest_answer: int) -> None:
        """Run until there were `steps` steps in all and every sequence has ended."""
        random = self._random
        while self.steps < steps:
            while len(self.scheduler.running) + len(self.scheduler.waiting) < self._seqs + 2:
                prompt = random.choice(self._prompts)[: random.randint(1, self._longest_prompt)]
                if random.random() < 0.5:
                    prompt = self._tokens(len(prompt))
                answers = FORKS if random.random() < 0.2 else 1
                self._arrive([prompt] * answers, random.choice(KINDS), random.randint(1, longest_answer))
            self._step()
            if random.random() < CANCELLED and (running := [*self.scheduler.running.values()]):
                self.scheduler.finish_sequence(random.choice(running), FinishReason.CANCELLED)
                self.cancelled += 1
        self._drain()
        self._end()

    def _end(self) -> None:
        """Make the last step of the same kind after every mix."""
        self._arrive([self._tokens(1)], GREEDY, 2)
        self._drain()

    def _drain(self) -> None:
        while self.scheduler.has_work:
            self._step()

    def _step(self) -> None:
        self._loop.schedule()
        self._loop.step(self._device.wait())
        self.steps += 1

    def _arrive(self, prompts: list[list[int]], kind: SamplingParams, tokens: int) -> None:
        sequences = []
        for prompt in prompts:
            name = str(self._arrived)
            request = PromptRequest(name, "", prompt, kind, tokens, self._arrived, frozenset())
            sequence = Sequence(request, float(self._arrived))
            if kind.prompt_logprobs is None:
                sequence.cache_root = self._names.root()
                self._names.name(sequence, len(prompt) // BLOCK_SIZE)
            sequences.append(sequence)
            self._arrived += 1
        group_by_prompt(sequences)
        for sequence in sequences:
            self.scheduler.add(sequence)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(count)]


def memory(device: torch.device) -> tuple[int, int]:
    """Bytes allocated and reserved by torch on a GPU; on a CPU twice the bytes of all live tensors."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    tensors = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and one.layout is torch.strided)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()), sum(storages.values())


@contextmanager
def waits_of_the_host(device: torch.device) -> Iterator[list[str]]:
    """Fill a list with where operations of torch have made the host wait for the device, but for waiting for a step."""
    places: list[str] = []
    if device.type != "cuda":
        yield places
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places += [f"{one.filename}:{one.lineno}" for one in caught if "synchronizing CUDA" in str(one.message)]


def pinned_bytes(device: torch.device) -> int:
    """Bytes of the host's memory that torch keeps pinned."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
