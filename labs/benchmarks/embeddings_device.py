"""Inputs embedded beside an engine on its device: one a batch, in batches, and in batches that wait for others.

It is part `embeddings` of `scripts/check_gpu.py`, as `embeddings` is for a gateway on a CPU. The encoder has the shape
of BGE-base and random weights. 64 clients ask, each as soon as its last input is embedded; then inputs come at random
times, half as many as batches without a wait have embedded; then answers are streamed beside the clients.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import inf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch

from admission.core import CoreConfig, make_core
from admission.encoding import EncodingLimits, EncodingRequest
from backend.config import EngineOptions
from backend.engine import Engine
from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import PromptRequest, Sequence
from backend.worker.model_runner import ModelRunner
from gateway.api.encoding_service import EncodingService
from gateway.api.engine_client import EncodingAsk
from gateway.encoders import LoadedEncoder, load_encoders
from gateway.settings.settings import Settings
from labs.benchmarks.embeddings import BGE_BASE, MINILM, WORDS, save_encoder
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.gpu_check.models import SHAPES, dtype_of, random_runner
from labs.benchmarks.report import quantile

NO_WAIT, WAIT, SINGLE = "batches", "batches that wait", "one input a batch"
LIMITS = {
    SINGLE: EncodingLimits(longest_wait_s=0.0, batch_tokens=1),
    NO_WAIT: EncodingLimits(longest_wait_s=0.0),
    WAIT: EncodingLimits(),
}
CLIENTS = 64
OF_SINGLE = 3.0
LOAD = 0.5  # of what batches without a wait embed, where inputs come at random times
PROMISED_S = 0.05  # between tokens, beside inputs
MODEL = "encoder"
PROMPT = 100  # tokens before a stream


@dataclass(frozen=True, slots=True)
class Plan:
    shape: str  # of the model whose answers are streamed
    lengths: tuple[int, ...]  # of inputs, in tokens
    streams: tuple[int, ...]
    seconds: float  # of each measurement
    longest: int  # context of a stream


GPU = Plan("Qwen3-0.6B", (16, 256), (8, 64), 1.5, 2048)
SMALL = Plan("tiny", (16,), (2,), 0.5, 512)


class Rig:
    """An engine with an encoder beside it; `service` embeds."""

    service: EncodingService

    def __init__(self, runner: ModelRunner, encoders: Mapping[str, LoadedEncoder]) -> None:
        self.core = make_core(CoreConfig(), runner.config)
        self.engine = Engine(self.core, runner)
        self._encoders = encoders
        self._random = Random(0)

    def serve(self, limits: EncodingLimits) -> None:
        self.service = EncodingService(self._encoders, self.engine, self.core, limits)

    async def embed(self, tokens: int) -> None:
        inputs = [[self._random.randrange(WORDS) for _ in range(tokens)]]
        await self.service.encode(EncodingAsk(MODEL, inputs, inf), EncodingRequest("embeds", [tokens], 0.0))


@dataclass(slots=True)
class Load:
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds


def check(device: torch.device) -> Iterator[Finding]:
    plan = GPU if device.type == "cuda" else SMALL
    seats = max(plan.streams)
    runner = random_runner(SHAPES[plan.shape], EngineOptions(max_num_seqs=seats, max_model_len=plan.longest), device)
    shape = BGE_BASE if device.type == "cuda" else MINILM
    with TemporaryDirectory() as folder:
        settings = Settings(embedding_model=str(save_encoder(Path(folder) / MODEL, shape)))
        encoders = load_encoders(settings, device, dtype_of(device))
    for length, count in product(plan.lengths, (1, 2, 8, CLIENTS)):
        encoders[MODEL].encoder.run([[5] * length] * count)  # libraries are loaded by their sizes
    yield from asyncio.run(_measured(plan, runner, encoders))


async def _measured(plan: Plan, runner: ModelRunner, encoders: Mapping[str, LoadedEncoder]) -> list[Finding]:
    rig, found = Rig(runner, encoders), list[Finding]()
    rig.engine.start()
    try:
        for length in plan.lengths:
            rates = {}
            for kind, limits in LIMITS.items():
                rig.serve(limits)
                load = await _closed_loop(lambda length=length: rig.embed(length), CLIENTS, plan.seconds)
                found += _told(f"{CLIENTS} clients, inputs of {length} tokens, {kind}", load)
                rates[kind] = load.rate
            for kind in (NO_WAIT, WAIT):
                what = f"inputs of {length} tokens: rate of {kind} / {SINGLE}"
                found.append(Finding(what, rates[kind] / rates[SINGLE], bound=OF_SINGLE, sense=">="))
            for kind in (NO_WAIT, WAIT):
                rig.serve(LIMITS[kind])
                load = await _at_random(lambda length=length: rig.embed(length), LOAD * rates[NO_WAIT], plan.seconds)
                found += _told(f"inputs of {length} tokens at random times, {kind}", load)
        rig.serve(LIMITS[NO_WAIT])
        for streams in plan.streams:
            found += await _beside(rig, plan, streams)
    finally:
        await rig.engine.shut_down()
    return found


def _told(what: str, load: Load) -> list[Finding]:
    ordered = sorted(load.latencies)
    return [
        Finding(f"{what}: rate", load.rate, "inputs/s"),
        Finding(f"{what}: p50", 1e3 * quantile(ordered, 0.5), "ms"),
        Finding(f"{what}: p99", 1e3 * quantile(ordered, 0.99), "ms"),
    ]


async def _closed_loop(ask: Callable[[], Awaitable[None]], clients: int, seconds: float) -> Load:
    began, load = time.perf_counter(), Load()

    async def client() -> None:
        while (asked := time.perf_counter()) - began < seconds:
            await ask()
            load.latencies.append(time.perf_counter() - asked)

    await asyncio.gather(*[client() for _ in range(clients)])
    load.seconds = time.perf_counter() - began
    return load


async def _at_random(ask: Callable[[], Awaitable[None]], rate: float, seconds: float) -> Load:
    """`rate` inputs a second, whether those before are embedded or not."""
    random, load, asking = Random(0), Load(), []
    began = due = time.perf_counter()

    async def timed(due: float) -> None:
        await ask()
        load.latencies.append(time.perf_counter() - due)

    while due - began < seconds:
        due += random.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        asking.append(asyncio.ensure_future(timed(due)))
    await asyncio.gather(*asking)
    load.seconds = time.perf_counter() - began
    return load


async def _beside(rig: Rig, plan: Plan, streams: int) -> list[Finding]:
    """The time between tokens of streams, alone and beside clients that embed."""
    found, length = [], plan.lengths[0]
    for what in ("alone", "beside inputs"):
        gaps: list[float] = []
        async with _streamed(rig.engine, streams, plan.longest, gaps):
            if what == "alone":
                await asyncio.sleep(plan.seconds)
            else:
                load = await _closed_loop(lambda: rig.embed(length), CLIENTS, plan.seconds)
                found.append(
                    Finding(f"{streams} streams: inputs of {length} tokens beside them", load.rate, "inputs/s")
                )
        ordered = sorted(gaps)
        bound = 1e3 * PROMISED_S if what != "alone" else None
        found.append(Finding(f"{streams} streams {what}: p50 between tokens", 1e3 * quantile(ordered, 0.5), "ms"))
        p99 = 1e3 * quantile(ordered, 0.99)
        found.append(Finding(f"{streams} streams {what}: p99 between tokens", p99, "ms", bound=bound))
    return found


@asynccontextmanager
async def _streamed(engine: Engine, count: int, longest: int, gaps: list[float]) -> AsyncIterator[None]:
    """Streams that have begun; `gaps` is filled with the seconds between their tokens within the block."""
    began = asyncio.Event()
    sequences = [_sequence(str(number), longest) for number in range(count)]
    times: list[list[float]] = [[] for _ in sequences]

    async def follow(sequence: Sequence, at: list[float]) -> None:
        stream = engine.submit(sequence)
        while stream.finish_reason is None:
            await stream.take()
            at.append(time.perf_counter())
            if all(len(each) > 2 for each in times):
                began.set()

    tasks = [asyncio.ensure_future(follow(*each)) for each in zip(sequences, times, strict=True)]
    await began.wait()
    start = time.perf_counter()
    try:
        yield
    finally:
        for sequence in sequences:
            engine.finish_sequence(sequence)
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    for each in times:
        within = [at for at in each if at >= start]
        gaps += [after - before for before, after in pairwise(within)]


def _sequence(name: str, longest: int) -> Sequence:
    sampling = SamplingParams(temperature=0.8, ignore_eos=True)
    prompt = [7 * number % 599 for number in range(min(PROMPT, longest // 4))]
    request = PromptRequest(name, "chats", prompt, sampling, longest - len(prompt), 0, frozenset())
    return Sequence(request)
