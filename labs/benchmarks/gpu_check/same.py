"""The same tokens in fp32 in every batch, and for every way to cut, launch and give up a request's steps.

The oracle is each request alone, in whole prompts, without graphs and a step at a time. Greedy and drawn answers part
only at near ties, which the reference on the CPU judges (`near_ties`).
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from backend.config import EngineConfig
from backend.kernels.cpu import select_ops
from backend.llm import OfflineEngine
from backend.model.decoder import Decoder
from backend.model.model_config import read_model_config
from backend.model.weights import load_weights
from backend.paged_kv.block_names import BlockNames
from backend.paged_kv.kv_cache import KVCache
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Counters
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import PromptRequest, Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed
from backend.worker.device_stream import DeviceStream
from backend.worker.model_runner import ModelRunner
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.gpu_check.models import TINY, write_checkpoint
from labs.benchmarks.gpu_check.near_ties import Reference, Request, difference

KINDS = (
    SamplingParams(temperature=0, ignore_eos=True),
    SamplingParams(temperature=0, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=0.8, ignore_eos=True, top_p=0.9, top_k=50),
    SamplingParams(temperature=1.0, ignore_eos=True, min_p=0.02),
)
LONGEST = 512
BLOCK_SIZE = 16
SHARED = 3 * BLOCK_SIZE + 5  # tokens with which half of the prompts begin
MakeStream = Callable[[], DeviceStream | None]


@dataclass(frozen=True, slots=True)
class Plan:
    requests: int
    longest_prompt: int
    tokens: int  # of each answer

    def config(self) -> EngineConfig:
        """Whole prompts, all requests at once, and room for all of them."""
        return EngineConfig(
            num_blocks=self.requests * -(-(self.longest_prompt + self.tokens) // BLOCK_SIZE),
            max_model_len=self.longest_prompt + self.tokens,
            block_size=BLOCK_SIZE,
            max_num_seqs=self.requests,
            max_num_batched_tokens=LONGEST,
            prefill_chunk=None,
            max_preemptions=sys.maxsize,
            prefix_cache=False,
        )


GPU = Plan(requests=24, longest_prompt=300, tokens=64)
SMALL = Plan(requests=8, longest_prompt=80, tokens=40)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run the same requests, and the events that must have happened in it to show anything."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)  # of the configuration
    has_graphs: bool = True
    rounds: int = 1  # how often all requests are asked, one round after the other
    what: str = ""
    happened: Callable[[Counters], int] = lambda counters: counters.generation_tokens


def ways(plan: Plan) -> list[Way]:
    config = plan.config()
    few = {"num_blocks": max(config.blocks_for(config.max_model_len), config.num_blocks // 6)}
    cached = {"prefix_cache": True}
    return [
        Way("together, without graphs", has_graphs=False),
        Way("together, with graphs"),
        Way("alone, with graphs", {"max_num_seqs": 1}),
        Way("a step in flight", {"steps_in_flight": 1}),
        Way("chunks of 33", {"prefill_chunk": 33}),
        Way("chunks of 96", {"prefill_chunk": 96}),
        Way("found in the cache", cached, rounds=2, what="cached tokens", happened=lambda c: c.cached_tokens),
        Way("preempted", few | {"prefill_chunk": 96}, what="preemptions", happened=lambda c: c.preemptions),
        Way(
            "swapped",
            few | cached | {"num_host_blocks": config.num_blocks},
            what="blocks copied back",
            happened=lambda c: c.swapped_in,
        ),
    ]


def check(device: torch.device, make_stream: MakeStream = lambda: None) -> Iterator[Finding]:
    plan = GPU if device.type == "cuda" else SMALL
    with TemporaryDirectory() as folder:
        checkpoint = Path(folder)
        write_checkpoint(TINY, checkpoint, torch.device("cpu"))
        runners = _Runners(checkpoint, device, make_stream)
        reference, requests = Reference(checkpoint), _requests(plan)
        alone = Way("alone", {"max_num_seqs": 1, "steps_in_flight": 1}, has_graphs=False)
        expected = runners.run(plan, alone, requests)[0][0]
        near = 0
        for way in ways(plan):
            rounds, counters = runners.run(plan, way, requests)
            differences = [difference(reference, requests, expected, found) for found in rounds]
            wrong = sum(one.wrong for one in differences)
            near += sum(one.near for one in differences)
            yield Finding(f"answers that differ, {way.name}", wrong, bound=0, exact=True)
            if way.what:
                happened = way.happened(counters)
                yield Finding(f"{way.name}: {way.what}", happened, bound=1, sense=">=", exact=True)
        yield Finding("answers that part at a near tie, of all", near)


class _Runners:
    """Runners over one decoder, each with keys and values of its own."""

    def __init__(self, checkpoint: Path, device: torch.device, make_stream: MakeStream) -> None:
        config = read_model_config(checkpoint)
        weights = load_weights(checkpoint, config, torch.float32, device)
        self._device, self._make_stream = device, make_stream
        self._decoder = Decoder(config, weights, select_ops(device, torch.float32, "auto"), config.max_position)

    def run(self, plan: Plan, way: Way, requests: list[Request]) -> tuple[list[list[list[int]]], Counters]:
        """Return the answers of each round, and the scheduler's counters."""
        config = replace(plan.config(), **way.changes)
        kv = KVCache(self._decoder.config, config.num_blocks, config.block_size, torch.float32, self._device)
        kv.blocks.fill_(torch.nan)  # stale numbers must not be read
        runner = ModelRunner(self._decoder, kv, config, self._make_stream())
        if way.has_graphs:
            runner.warm_up()
        scheduler = Scheduler(config, FirstComeFirstServed())
        names = BlockNames(b"same", config.block_size)
        scheduler.name_blocks_by(names)
        rounds = []
        for _ in range(way.rounds):
            sequences = [_sequence(number, request, plan.tokens) for number, request in enumerate(requests)]
            for sequence in sequences:
                if config.shares_blocks:
                    sequence.cache_root = names.root()
                    names.name(sequence, sequence.num_prompt_tokens // config.block_size)
                scheduler.add(sequence)
            engine = OfflineEngine(scheduler, runner)
            while scheduler.has_work:
                engine.step()
            rounds.append([sequence.output for sequence in sequences])
        return rounds, scheduler.counters


def _requests(plan: Plan) -> list[Request]:
    random = Random(0)
    beginning = [random.randrange(TINY.vocab_size) for _ in range(SHARED)]
    requests = []
    for number in range(plan.requests):
        length = random.randint(1, plan.longest_prompt - SHARED)
        prompt = [random.randrange(TINY.vocab_size) for _ in range(length)]
        requests.append(Request(beginning * (number % 2) + prompt, KINDS[number // 2 % len(KINDS)], number))
    return requests


def _sequence(number: int, request: Request, tokens: int) -> Sequence:
    asked = PromptRequest(str(number), "", request.prompt, request.sampling, tokens, request.seed, frozenset())
    return Sequence(asked, float(number))
