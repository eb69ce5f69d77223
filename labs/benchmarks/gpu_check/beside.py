"""A long prompt that arrives beside decodes: its effect on their rhythm, in chunks and whole."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from admission.controller import Controller
from admission.core import CoreConfig, make_core
from backend.config import EngineOptions
from backend.roofline import Roofline
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch
from backend.scheduler.sequence import PromptRequest, Sequence
from backend.worker.executor import PendingStep
from backend.worker.model_runner import ModelRunner
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.gpu_check.floors import measured_roofline, step_floor
from labs.benchmarks.gpu_check.models import SHAPES, random_runner


@dataclass(frozen=True, slots=True)
class Plan:
    """`decodes` sequences of `context` tokens each decode, with a promised interval, when `prompt` tokens arrive."""

    shape: str
    decodes: int
    context: int
    prompt: int
    interval: float  # seconds between tokens, the class's target
    budget: int  # tokens in a step, in chunks
    lead: int  # steps before the prompt arrives, from which the core learns what steps take

    @property
    def longest(self) -> int:
        return self.prompt + ANSWER

    def options(self, budget: int, prefill_chunk: int | None) -> EngineOptions:
        return EngineOptions(
            max_num_seqs=self.decodes + 1,
            max_model_len=self.longest,
            max_num_batched_tokens=budget,
            prefill_chunk=prefill_chunk,
        )


ANSWER = 1024  # tokens that each sequence may generate: room for all of them at once, and no end before the measuring's
FLOORS = 1.5  # of the longest step, that the decodes wait at most where it takes longer than they were promised
GPU = Plan("Llama-3-8B", 64, 1024, 32_768, 0.05, 2048, 100)
TINY = Plan("tiny", 3, 20, 150, 0.05, 64, 5)


@dataclass(frozen=True, slots=True)
class Rhythm:
    """The rhythm of the decodes while the prompt was computed; times in seconds."""

    gaps: list[float]  # between tokens
    floor: float  # of the longest step
    first_token: float  # of the prompt, after it arrived
    tokens: int  # of the decodes, in all that was measured
    took: float

    def gap(self, share: float) -> float:
        return sorted(self.gaps)[min(len(self.gaps) - 1, int(share * len(self.gaps)))]


def check(device: torch.device) -> Iterator[Finding]:
    plan = GPU if device.type == "cuda" else TINY
    what = f"{plan.shape}: {plan.prompt:,} tokens beside {plan.decodes} decodes"
    roofline = measured_roofline(SHAPES[plan.shape], device)
    chunked = _rhythm(plan, _runner(plan, plan.budget, plan.budget, device), roofline, plan.interval)
    most = max(plan.interval, FLOORS * chunked.floor)
    yield Finding(f"{what}: p99 between tokens", chunked.gap(0.99) * 1e3, "ms", bound=most * 1e3)
    yield Finding(f"{what}: floor of the longest step", chunked.floor * 1e3, "ms")
    yield Finding(f"{what}: median between tokens", chunked.gap(0.5) * 1e3, "ms")
    yield Finding(f"{what}: first token of the prompt", chunked.first_token, "s")
    whole = _rhythm(plan, _runner(plan, plan.longest + plan.decodes, None, device), roofline, None, chunked.tokens)
    yield Finding(f"{what}: longest gap, unchunked", whole.gap(1.0) * 1e3, "ms")
    yield Finding(f"{what}: unchunked time over chunked", whole.took / chunked.took, bound=0.95, sense=">=")


def _runner(plan: Plan, budget: int, prefill_chunk: int | None, device: torch.device) -> ModelRunner:
    model = SHAPES[plan.shape]
    model = replace(model, max_position=max(model.max_position, plan.longest))
    return random_runner(model, plan.options(budget, prefill_chunk), device)


def _rhythm(plan: Plan, runner: ModelRunner, roofline: Roofline, interval: float | None, least: int = 0) -> Rhythm:
    """Until the prompt has its first token and the decodes have had `least`, so that two runs do the same work.

    `interval`: what the decodes are promised. A prompt that cannot be cut waits for them to end if they are.
    """
    core = make_core(CoreConfig(), runner.config)
    for number in range(plan.decodes):
        core.arrive(_sequence(str(number), plan.context, interval), time.perf_counter())
    launched: deque[PendingStep] = deque()
    decoding = 0
    while decoding < plan.lead:
        decoding += _step(core, runner, launched).num_decodes == plan.decodes
    prompt = _sequence("long", plan.prompt, None)
    arrived = last = time.perf_counter()
    core.arrive(prompt, arrived)
    gaps, batches, tokens, first_token = [], [], 0, 0.0
    while not prompt.output or tokens < least:
        batches.append(_step(core, runner, launched))
        tokens += batches[-1].num_decodes
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
        if prompt.output and not first_token:
            first_token = now - arrived
    return Rhythm(gaps, max(step_floor(roofline, batch) for batch in batches), first_token, tokens, last - arrived)


def _step(core: Controller, runner: ModelRunner, launched: deque[PendingStep]) -> Batch:
    """Until the oldest step in flight is complete, which is returned."""
    while (batch := core.schedule(time.perf_counter())) is not None:
        launched.append(runner.launch(batch))
    batch = core.scheduler.in_flight[0].batch
    core.update_from_output(launched.popleft().wait(), time.perf_counter())
    return batch


def _sequence(name: str, prompt: int, interval: float | None) -> Sequence:
    sampling = SamplingParams(temperature=0.8, ignore_eos=True)
    token_ids = [7 * number % 599 for number in range(prompt)]  # a device may be faster on one number alone
    return Sequence(PromptRequest(name, name, token_ids, sampling, ANSWER, 0, frozenset(), token_interval=interval))
