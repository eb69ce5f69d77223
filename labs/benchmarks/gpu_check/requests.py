"""The benchmark of 256 requests with 100 to 1,024 tokens in and out: through the engine, and over HTTP."""

import importlib.util
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch

from backend.config import EngineOptions
from backend.model.model_config import ModelConfig
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import PromptRequest, Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed
from backend.worker.executor import PendingStep
from backend.worker.model_runner import ModelRunner
from labs.benchmarks.gateway_process import gateway_process
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.gpu_check.floors import measured_roofline, step_floor
from labs.benchmarks.gpu_check.models import FALLBACK, SHAPES, random_runner, write_checkpoint
from labs.benchmarks.load import all_at_once, post

GATEWAY_NEEDS = (
    "starlette", "uvicorn", "uvloop", "httptools", "orjson", "pydantic", "pydantic_settings", "httpx", "yaml", "redis",
    "opentelemetry", "tqdm",
)  # fmt: skip
SETTLED = 100  # steps after which an engine has all the memory that it will ever take
KEY, NAME = "sk-check", "random"

Requests = list[tuple[list[int], int]]
"""Prompts with the number of tokens that each is continued by."""


def workload(device: torch.device) -> tuple[str, Requests]:
    """The shape of nano-vllm's benchmark, drawn as it draws: all prompts, then all lengths, seed 0."""
    count, least, most, shape = (256, 100, 1024, "Qwen3-0.6B") if device.type == "cuda" else (6, 5, 20, "tiny")
    rng, vocab = Random(0), min(10_000, SHAPES[shape].vocab_size - 1)
    prompts = [[rng.randint(0, vocab) for _ in range(rng.randint(least, most))] for _ in range(count)]
    return shape, [(prompt, rng.randint(least, most)) for prompt in prompts]


def check_offline(device: torch.device) -> Iterator[Finding]:
    shape, requests = workload(device)
    options = EngineOptions(max_num_seqs=len(requests), max_model_len=2048 if device.type == "cuda" else 64)
    roofline = measured_roofline(SHAPES[shape], device)
    runner = random_runner(SHAPES[shape], options, device)
    tokens = sum(length for _, length in requests)
    run = _generate(runner, requests)
    what = f"{shape}, {len(requests)} requests, offline"
    floor = sum(step_floor(roofline, batch) for batch in run.batches)
    yield Finding(f"{what}: output tokens/s", tokens / run.seconds, "tok/s")
    yield Finding(f"{what}: output tokens/s at the floor", tokens / floor)
    yield Finding(f"{what}: floor / time", floor / run.seconds, bound=0.75, sense=">=")
    yield Finding(f"{what}: device idle between steps", 1 - run.busy / run.seconds, bound=0.05)
    yield Finding(f"{what}: mean step", run.seconds / len(run.batches) * 1e3, "ms")
    yield Finding(f"{what}: torch's memory, grown since step {SETTLED}", run.grown / 2**20, "MiB", bound=0, exact=True)


@dataclass(slots=True)
class _Run:
    batches: list[Batch] = field(default_factory=list)
    seconds: float = 0.0
    busy: float = 0.0  # seconds of the device
    grown: int = 0  # bytes that torch has taken from the device since step `SETTLED`


def _generate(runner: ModelRunner, requests: Requests) -> _Run:
    scheduler = Scheduler(runner.config, FirstComeFirstServed())
    sampling = SamplingParams(temperature=0.6, ignore_eos=True)
    for number, (prompt, length) in enumerate(requests):
        request = PromptRequest(str(number), "", prompt, sampling, length, number, frozenset())
        scheduler.add(Sequence(request, float(number)))
    launched: deque[PendingStep] = deque()
    run, reserved, started = _Run(), _reserved(runner.device), time.perf_counter()
    while scheduler.has_work:
        while (batch := scheduler.schedule()) is not None:
            launched.append(runner.launch(batch))
            run.batches.append(batch)
        output = launched.popleft().wait()
        run.busy += output.elapsed
        scheduler.update_from_output(output)
        if output.step == SETTLED:
            reserved = _reserved(runner.device)
    run.seconds = time.perf_counter() - started
    run.grown = _reserved(runner.device) - reserved
    return run


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def check_http(device: torch.device) -> Iterator[Finding]:
    """Skipped, and said so, where the gateway's packages are not installed."""
    if absent := missing():
        yield Finding("over HTTP", f"skipped: needs {', '.join(absent)}")
        return
    shape, requests = workload(device)
    tokens = sum(length for _, length in requests)
    with _served(SHAPES[shape], device, len(requests)) as port:
        bodies = [_request(prompt, length) for prompt, length in requests]
        all_at_once(port, [_request(prompt[::-1], length) for prompt, length in requests[:2]])  # nothing that is timed
        seconds, events = all_at_once(port, bodies)
    firsts = sorted(times[0] for times in events)
    what = f"{shape}, {len(requests)} requests, over HTTP"
    yield Finding(f"{what}: output tokens/s", tokens / seconds, "tok/s")
    yield Finding(f"{what}: median time to the first token", firsts[len(firsts) // 2], "s")


def missing() -> list[str]:
    """The packages that a gateway needs and this machine lacks."""
    return [name for name in GATEWAY_NEEDS if importlib.util.find_spec(name) is None]


@contextmanager
def _served(model: ModelConfig, device: torch.device, max_num_seqs: int) -> Iterator[int]:
    """The port of a gateway over a random checkpoint."""
    with TemporaryDirectory() as folder:
        checkpoint = Path(folder) / NAME
        checkpoint.mkdir()
        write_checkpoint(model, checkpoint, device)
        server = gateway_process(
            Path(folder) / "state",
            model=checkpoint,
            demo_key=KEY,
            device=device.type,
            **_fallback(),
            max_num_seqs=max_num_seqs,
            max_model_len=min(2048, model.max_position),
        )
        with server as process:
            yield process.port


def _fallback() -> dict[str, object]:
    memory = {} if FALLBACK.kv_bytes is None else {"kv_memory_bytes": FALLBACK.kv_bytes}
    return memory | {"kernels": FALLBACK.kernels}


def _request(prompt: list[int], max_tokens: int) -> bytes:
    body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.6, "stream": True}
    return post("/v1/completions", body | {"ignore_eos": True, "skip_special_tokens": False}, KEY)
