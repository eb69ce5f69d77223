"""The benchmark of 256 requests with 100 to 1,024 tokens in and out: through the engine, and over HTTP."""

import importlib.util
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch

from backend.model.model_config import ModelConfig
from backend.sampling_params import SamplingParams
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence
from backend.scheduler.waiting_queue import FirstComeFirstServed, HoldingQueue
from backend.sizing import EngineOptions
from backend.worker.executor import PendingStep
from backend.worker.model_runner import ModelRunner
from benchmarks.gateway_process import gateway_process
from benchmarks.gpu_check.finding import Finding
from benchmarks.gpu_check.models import SHAPES, random_runner, write_checkpoint
from benchmarks.load import all_at_once, post

GATEWAY_NEEDS = (
    "starlette", "uvicorn", "uvloop", "httptools", "orjson", "pydantic", "pydantic_settings", "httpx", "yaml", "redis",
    "opentelemetry", "tqdm",
)  # fmt: skip
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
    runner = random_runner(SHAPES[shape], options, device)
    tokens = sum(length for _, length in requests)
    seconds, busy, steps = _generate(runner, requests)
    what = f"{shape}, {len(requests)} requests, offline"
    yield Finding(f"{what}: output tokens/s", tokens / seconds, "tok/s", bound=25_000, sense=">=")
    yield Finding(f"{what}: device idle between steps", 1 - busy / seconds, bound=0.05)
    yield Finding(f"{what}: mean step", seconds / steps * 1e3, "ms")


def _generate(runner: ModelRunner, requests: Requests) -> tuple[float, float, int]:
    """Seconds in all, seconds that the device was busy, and steps."""
    scheduler = Scheduler(runner.config, HoldingQueue(FirstComeFirstServed()))
    sampling = SamplingParams(temperature=0.6, ignore_eos=True)
    for number, (prompt, length) in enumerate(requests):
        scheduler.add(Sequence(str(number), "", prompt, sampling, length, number, frozenset(), float(number)))
    launched: deque[PendingStep] = deque()
    busy, steps, started = 0.0, 0, time.perf_counter()
    while scheduler.has_work:
        while (batch := scheduler.schedule()) is not None:
            launched.append(runner.launch(batch))
        output = launched.popleft().wait()
        busy, steps = busy + output.elapsed, steps + 1
        scheduler.update_from_output(output)
    return time.perf_counter() - started, busy, steps


def check_http(device: torch.device) -> Iterator[Finding]:
    """Skipped, and said so, where the gateway's packages are not installed."""
    if missing := _missing():
        yield Finding("over HTTP", f"skipped: needs {', '.join(missing)}")
        return
    shape, requests = workload(device)
    tokens = sum(length for _, length in requests)
    with _served(SHAPES[shape], device, len(requests)) as port:
        bodies = [_request(prompt, length) for prompt, length in requests]
        all_at_once(port, [_request(prompt[::-1], length) for prompt, length in requests[:2]])  # nothing that is timed
        seconds, events = all_at_once(port, bodies)
    firsts = sorted(times[0] for times in events)
    what = f"{shape}, {len(requests)} requests, over HTTP"
    yield Finding(f"{what}: output tokens/s", tokens / seconds, "tok/s", bound=22_500, sense=">=")
    yield Finding(f"{what}: median time to the first token", firsts[len(firsts) // 2], "s")


def _missing() -> list[str]:
    """What a gateway needs and this machine has not; its own version is read from what is installed."""
    absent = [name for name in GATEWAY_NEEDS if importlib.util.find_spec(name) is None]
    try:
        version("sluice")
    except PackageNotFoundError:
        absent.append("sluice (its wheel, without dependencies)")
    return absent


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
            max_num_seqs=max_num_seqs,
            max_model_len=min(2048, model.max_position),
        )
        with server as process:
            yield process.port


def _request(prompt: list[int], max_tokens: int) -> bytes:
    body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.6, "stream": True}
    return post("/v1/completions", body | {"ignore_eos": True, "skip_special_tokens": False}, KEY)
