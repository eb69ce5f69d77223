"""Steps of decoders: decodes, prompts, and both; device time against the roofline, and the host's cost of a launch."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import median

import torch

from backend.config import EngineOptions
from backend.roofline import RUNTIME_BYTES, Roofline
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, NewSequence
from backend.worker.executor import PendingStep
from backend.worker.model_runner import ModelRunner
from labs.benchmarks.gpu_check.breakdown import breakdown
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.gpu_check.floors import measured_roofline
from labs.benchmarks.gpu_check.models import SHAPES, random_runner
from labs.benchmarks.kernels_gpu import best_seconds, rows_drawn

DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=50)


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements of a shape."""

    shape: str
    batches: tuple[int, ...]
    context: int
    prompts: tuple[int, ...]
    mixed: tuple[int, int]  # decodes, and tokens of a prompt beside them
    judged: Mapping[int, float] = field(default_factory=dict)  # by batch, how many times its floor a step may take

    @property
    def options(self) -> EngineOptions:
        longest = max(*self.prompts, self.context + REPEATS + 2)
        return EngineOptions(
            max_num_seqs=max(self.batches),
            max_model_len=longest + 1,
            max_num_batched_tokens=max(*self.prompts, *self.batches),
        )


REPEATS = 20
LEAST_LEFT = 0.1  # GiB of the reserve, once everything has run
_numbers = count()  # of steps: one with the number of another, or a lower one, would take its place
LLAMA = Plan("Llama-3-8B", (1, 64, 256), 1024, (1024, 8000), (100, 400), judged={1: 1.2, 64: 1.15, 256: 1.15})
QWEN = Plan("Qwen3-0.6B", (1, 64, 256), 1024, (1024, 8000), (100, 400), judged={1: 2.5})
TINY = Plan("tiny", (1, 3), 40, (30,), (2, 20))


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians over steps of which two were in flight, in seconds."""

    step: float  # from completion to completion
    launch: float  # of the host


def check(device: torch.device, plan: Plan) -> Iterator[Finding]:
    plan = plan if device.type == "cuda" else TINY
    model = SHAPES[plan.shape]
    roofline = measured_roofline(model, device)
    started = time.perf_counter()
    runner = random_runner(model, plan.options, device)
    yield Finding(f"{plan.shape}: made, warmed up, graphs recorded", time.perf_counter() - started, "s")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        elsewhere = total - free - torch.cuda.memory_reserved(device)
        yield Finding(f"{plan.shape}: taken by CUDA, libraries and graphs", elsewhere / 2**30, "GiB")
        left = f"{plan.shape}: left of the reserve of {RUNTIME_BYTES / 2**30:g} GiB"
        yield Finding(left, free / 2**30, "GiB", bound=LEAST_LEFT, sense=">=", exact=True)
    if runner.graphs is not None:
        yield Finding(f"{plan.shape}: graphs", len(runner.graphs))
        yield Finding(f"{plan.shape}: graphs recorded in", runner.graphs.seconds, "s")
    runner.kv.blocks.normal_()  # a device may be faster on zeros
    for batch in plan.batches:
        yield from _decode(runner, plan, batch, roofline)
    for tokens in plan.prompts:
        timing = _timed(runner, [_prompt(tokens, runner.config.blocks_for(tokens)) for _ in range(6)])
        rate = 2 * roofline.footprint.num_multiplied_by_token * tokens / timing.step
        what = f"{plan.shape}: prefill of {tokens:,}"
        yield Finding(what, timing.step * 1e3, "ms")
        bound = 0.6 if plan is LLAMA and tokens == max(plan.prompts) else None
        yield Finding(f"{what}: share of the matrix rate", rate / roofline.rate, bound=bound, sense=">=")
        yield from _host(what, timing, plan)
    yield from _mixed(runner, plan)
    yield from _breakdowns(runner, plan)


def _breakdowns(runner: ModelRunner, plan: Plan) -> Iterator[Finding]:
    """Yield the breakdowns of decodes, and of the longest prompt."""
    tokens = max(plan.prompts)
    for rows in plan.batches:
        _fill(runner, rows, plan.context)
        decodes = [_numbered(_decodes(rows, plan.context + n)) for n in range(4)]
        yield from breakdown(f"{plan.shape}: decode, batch {rows}", runner, decodes)
    prompts = [_numbered(_prompt(tokens, runner.config.blocks_for(tokens))) for _ in range(2)]
    yield from breakdown(f"{plan.shape}: prefill of {tokens:,}", runner, prompts)


def _decode(runner: ModelRunner, plan: Plan, batch: int, roofline: Roofline) -> Iterator[Finding]:
    what, bound = f"{plan.shape}: decode, batch {batch}, context {plan.context:,}", plan.judged.get(batch)
    alone = batch == 1  # where the host counts most, and sampling least
    _fill(runner, batch, plan.context)
    timing = _timed(runner, [_decodes(batch, plan.context + n) for n in range(REPEATS)])
    sampling = _sampling_seconds(runner, batch)
    floor = roofline.decode(batch, plan.context)
    yield Finding(f"{what}: step", timing.step * 1e3, "ms")
    yield Finding(f"{what}: step / floor", timing.step / floor, bound=bound if alone else None)
    yield Finding(f"{what}: sampling alone", sampling * 1e3, "ms")
    yield Finding(f"{what}: sampling / step", sampling / timing.step, bound=0.05 if bound and not alone else None)
    without = (timing.step - sampling) / floor
    yield Finding(f"{what}: without sampling / floor", without, bound=None if alone else bound)
    yield from _host(what, timing, plan)


def _mixed(runner: ModelRunner, plan: Plan) -> Iterator[Finding]:
    """Decodes, and the whole prompt of another slot."""
    rows, tokens = plan.mixed
    what = f"{plan.shape}: {rows} decodes, context {plan.context:,}, and prefill of {tokens:,}"
    _fill(runner, rows, plan.context)
    timing = _timed(runner, [_beside(rows, plan.context + n, tokens, runner) for n in range(REPEATS)])
    yield Finding(f"{what}: step", timing.step * 1e3, "ms")
    yield from _host(what, timing, plan)


def _host(what: str, timing: Timing, plan: Plan) -> Iterator[Finding]:
    """Yield the host's part of a step; if a model's steps take milliseconds, the host idles for most of each."""
    yield Finding(f"{what}: host and launch", timing.launch * 1e3, "ms")
    bound = 0.25 if plan is LLAMA else None
    yield Finding(f"{what}: host and launch / step", timing.launch / timing.step, bound=bound)


def _sampling_seconds(runner: ModelRunner, rows: int) -> float:
    """Return the seconds of the kernels that draw with top-k and top-p; 0 where torch draws."""
    draw = runner.decoder.ops.sample
    if draw is None:
        return 0.0
    logits = 4 * torch.randn((rows, runner.decoder.config.vocab_size), device=runner.device)
    how = rows_drawn(rows, 50, 0.9, runner.device)
    return best_seconds(lambda: draw(logits, how, None), runner.device)


def _timed(runner: ModelRunner, batches: list[Batch]) -> Timing:
    running: deque[PendingStep] = deque()
    launches, steps = [], []
    for batch in batches:
        _numbered(batch)
        started = time.perf_counter()
        running.append(runner.launch(batch))
        launches.append(time.perf_counter() - started)
        if len(running) == runner.config.steps_in_flight:
            steps.append(running.popleft().wait().elapsed)
    steps += [step.wait().elapsed for step in running]
    return Timing(median(steps[1:]), median(launches[1:]))


def _numbered(batch: Batch) -> Batch:
    batch.step = next(_numbers)
    return batch


def _fill(runner: ModelRunner, batch: int, context: int) -> None:
    """Give slots 0 to `batch` blocks for `context` tokens and later ones; their contents do not matter."""
    width = runner.config.blocks_for(context + REPEATS + 1)
    for slot in range(batch):
        blocks = [(slot * width + n) % runner.config.num_blocks for n in range(width)]
        admitted = NewSequence(slot, DRAWN, slot, [1], 1)
        runner.launch(Batch(next(_numbers), 0, [slot], [0], [1], [1], [0], [(slot, 0, blocks)], [admitted])).wait()


def _decodes(batch: int, position: int) -> Batch:
    every = list(range(batch))
    return Batch(0, batch, every, [position] * batch, [1] * batch, [], every)


def _prompt(tokens: int, blocks: int, slot: int = 0) -> Batch:
    """A whole prompt in one step."""
    token_ids = [7 * n % 599 for n in range(tokens)]
    admitted = NewSequence(slot, DRAWN, 0, token_ids, tokens)
    return Batch(0, 0, [slot], [0], [tokens], token_ids, [0], [(slot, 0, list(range(blocks)))], [admitted])


def _beside(rows: int, position: int, tokens: int, runner: ModelRunner) -> Batch:
    """Decodes of slots 0 to `rows`, and a whole prompt in the slot behind them."""
    decodes, prompt = _decodes(rows, position), _prompt(tokens, runner.config.blocks_for(tokens), rows)
    return replace(
        prompt,
        num_decodes=rows,
        slots=decodes.slots + prompt.slots,
        starts=decodes.starts + prompt.starts,
        lengths=decodes.lengths + prompt.lengths,
        sampled=[*decodes.sampled, rows],
    )
