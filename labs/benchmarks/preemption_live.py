"""The live part of `labs.benchmarks.preemption`: the embedded model on this machine's CPU, with real copies.

Conversations of several turns, whose memory at their fullest together is four times the pool's. A turn waits until the
turn before it has ended, behind those of all others, which take its blocks meanwhile. Copies are the engine's own; to
make a bandwidth of a slower one, each step then waits for as long as its copies would take.

A run takes the CPU time of this process, on one thread, and what it waited for copies; so does a step. What others take
of the machine is none of it. The model draws the same tokens under every rule, or a block did not come back as it was.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch

from admission.core import CoreConfig, MemoryGate, Overload, make_core
from admission.kv.swap_choice import SwapRule
from backend.config import EngineOptions
from backend.errors import MemoryExhausted
from backend.loader import LoadedModel, load_model
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.sequence import PromptRequest
from backend.scheduler.sequence import Sequence as EngineSequence
from backend.step_loop import StepLoop
from backend.worker.executor import Executor, InlineDevice, PendingStep

CONVERSATIONS, TURNS, SEQS = 12, 3, 6
PROMPTS, OUTPUTS = (60, 260), (20, 60)  # tokens of a turn
STEP_TOKENS = 128  # tokens of a step
KV_BYTES = SWAP_BYTES = 2**26
LONGEST = TURNS * (PROMPTS[1] + OUTPUTS[1])
POOL_SHARE_OF_NEED = 1 / 8  # of all conversations: a quarter of the need of the half that may run
SAMPLING = SamplingParams(temperature=0, ignore_eos=True)


@dataclass(slots=True)
class LiveRun:
    """The cost and the results of one run."""

    seconds: float  # of the CPU, and of waiting for copies
    tokens: list[list[int]]  # of each answer
    swapped_in: int
    recomputed: int  # tokens of prompts, computed though an earlier turn had computed them, or after a preemption
    preemptions: int

    @property
    def rate(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


class Throttled:
    """An executor whose copies take as long as over a slower link."""

    def __init__(self, executor: Executor, copy_seconds: float) -> None:
        self.runs_ahead = executor.runs_ahead
        self.waited = 0.0
        self._executor = executor
        self._copy_seconds = copy_seconds

    def launch(self, batch: Batch) -> PendingStep:
        return _ThrottledStep(self, self._executor.launch(batch), batch.num_copies * self._copy_seconds)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
        self.waited += seconds


@dataclass(slots=True)
class _ThrottledStep:
    device: Throttled
    step: PendingStep
    seconds: float

    def wait(self) -> StepOutput:
        begin = time.process_time()
        output = self.step.wait()
        elapsed = time.process_time() - begin + self.seconds
        self.device.wait(self.seconds)
        return replace(output, elapsed=elapsed)


class LiveEngine:
    """The embedded model, and one run after another on it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        options = EngineOptions(
            max_num_seqs=SEQS,
            max_num_batched_tokens=STEP_TOKENS,
            max_model_len=LONGEST,
            kv_memory_bytes=KV_BYTES,
            swap_space_bytes=SWAP_BYTES,
        )
        self.model: LoadedModel = load_model("embedded", options, device="cpu")
        self.model.runner.warm_up()

    @property
    def block_bytes(self) -> int:
        return self.model.kv_bytes // self.model.engine_config.num_blocks

    @property
    def real_bandwidth(self) -> float:
        """Bytes a second of this machine's own copies."""
        return self.block_bytes / self.model.engine_config.block_copy_seconds

    def run(self, rule: str, bandwidth: float | None, seed: int, conversations: int) -> LiveRun:
        """Serve them all, over a link of `bandwidth` bytes a second; None: as fast as this machine copies."""
        real = self.model.engine_config.block_copy_seconds
        copy = real if bandwidth is None else self.block_bytes / bandwidth
        device = Throttled(self.model.runner, max(0.0, copy - real))
        return _Serving(self.model, device, rule, copy, _turns(seed, conversations)).run()


class _Serving:
    """One core and its requests, from the first turn of all conversations to the last of all."""

    def __init__(
        self,
        model: LoadedModel,
        device: Throttled,
        rule: str,
        copy: float,
        turns: Sequence[list[tuple[list[int], int]]],
    ) -> None:
        needed = sum(sum(len(prompt) + output for prompt, output in one) for one in turns)
        blocks = needed // model.engine_config.block_size
        pool = max(model.engine_config.blocks_for(LONGEST), int(POOL_SHARE_OF_NEED * blocks))
        config = replace(model.engine_config, num_blocks=pool, num_host_blocks=blocks, block_copy_seconds=copy)
        core = CoreConfig(
            order="fcfs",
            overload=Overload.UNBOUNDED,
            memory=MemoryGate.OPTIMISTIC,
            swap=SwapRule(rule),
            max_waiting=None,
        )
        self._core = make_core(core, config)
        self._names = model.block_names(b"benchmark")
        self._core.scheduler.name_blocks_by(self._names)
        self._throttled = device
        self._device = InlineDevice(device)
        self._loop = StepLoop(self._core, self._device.launch, time.perf_counter)
        self._turns = turns
        self._block = config.block_size
        self._answers: dict[tuple[int, int], list[int]] = {}
        self._tokens_seen = 0  # of prompts, that an earlier turn had or computed
        self._cached = 0

    def run(self) -> LiveRun:
        begin = time.process_time()
        for conversation in range(len(self._turns)):
            self._ask(conversation, 0, [])
        while self._core.scheduler.has_work:
            self._loop.schedule()
            output = self._device.wait()
            if isinstance(output, MemoryExhausted):
                raise output
            for sequence, _, reason in self._loop.step(output):
                if reason is not None:
                    self._answered(sequence)
        seconds = time.process_time() - begin + self._throttled.waited
        counters = self._core.scheduler.counters
        again = self._tokens_seen - self._cached + counters.recomputed_tokens
        answers = [self._answers[key] for key in sorted(self._answers)]
        return LiveRun(seconds, answers, counters.swapped_in, again, counters.preemptions)

    def _ask(self, conversation: int, turn: int, history: list[int]) -> None:
        new, output = self._turns[conversation][turn]
        sequence = EngineSequence(
            PromptRequest(f"{conversation}.{turn}", "everyone", [*history, *new], SAMPLING, output, 0, frozenset()),
            time.perf_counter(),
        )
        sequence.cache_root = self._names.root("everyone")
        self._names.name(sequence, sequence.num_prompt_tokens // self._block)
        self._tokens_seen += len(history) // self._block * self._block
        self._core.arrive(sequence, time.perf_counter())

    def _answered(self, sequence: EngineSequence) -> None:
        conversation, turn = map(int, sequence.id.split("."))
        self._answers[conversation, turn] = sequence.output
        self._cached += sequence.num_cached_tokens
        if turn + 1 < len(self._turns[conversation]):
            self._ask(conversation, turn + 1, [*sequence.request.prompt, *sequence.output])


def _turns(seed: int, conversations: int) -> list[list[tuple[list[int], int]]]:
    """Return for each conversation what its turns add, and how long their answers are."""
    random = Random(seed)
    return [
        [
            ([random.randrange(200) for _ in range(random.randint(*PROMPTS))], random.randint(*OUTPUTS))
            for _ in range(TURNS)
        ]
        for _ in range(conversations)
    ]


def same_tokens(runs: Mapping[str, LiveRun]) -> bool:
    """Return True if every rule led to the same answers."""
    first, *others = runs.values()
    return all(one.tokens == first.tokens for one in others)
