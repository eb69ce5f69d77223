"""Every Triton kernel that the parts launch, compiled before they do, by as many processes as there are processors:

    python -m labs.benchmarks.gpu_check.compiling [--arch 90] [--jobs 8]

fills Triton's cache (TRITON_CACHE_DIR) for a GPU of that architecture, which need not be there. A cache names its files
by their absolute paths: it serves where it was made, or unpacked at the same place, by the same version of Triton.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from triton.runtime import driver

from backend.bound_process import bound
from backend.config import EngineConfig
from backend.model.known_shapes import LLAMA_3_8B, QWEN3_06B
from backend.model.model_config import ModelConfig
from backend.worker import warm_up
from labs.benchmarks.gpu_check import correctness, packed, sanitized, serving
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.gpu_check.models import TINY
from labs.benchmarks.gpu_check.paper_gpu import compiled, paper_gpu, paper_runner
from labs.benchmarks.processes import ROOT
from labs.process_pool import process_pool

CPU = torch.device("cpu")
CONFIG = EngineConfig(
    num_blocks=64, max_model_len=256, block_size=16, max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk=64
)
MODELS = {
    "Llama-3-8B": (LLAMA_3_8B, torch.bfloat16),
    "Qwen3-0.6B": (QWEN3_06B, torch.bfloat16),
    "tiny, bf16": (TINY, torch.bfloat16),
    "tiny, fp32": (TINY, torch.float32),
}
H100 = 90
SMALLEST = "kernels that differ from their reference, float32"


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a job."""

    job: str
    kernels: int
    seconds: float
    failure: str = ""


def jobs() -> dict[str, Callable[[], object]]:
    """Return the launches to compile, by their purpose, the longest first; `paper_gpu` compiles them."""
    found: dict[str, Callable[[], object]] = {
        name: partial(launch_all, replace(model, num_layers=1), dtype) for name, (model, dtype) in MODELS.items()
    }
    for head_dim, group, kv_dtype in serving.SHAPES:
        steps = serving.SHORT + serving.SHORT_WINDOW
        job = partial(serving.largest_error, CPU, (head_dim, group, kv_dtype), steps)
        found[f"heads of {head_dim}, groups of {group}, {kv_dtype}"] = job
    found["packed products"] = packed.launch_all
    for numbers in sanitized.NUMBERS:
        found[f"sanitize, {numbers.name}"] = partial(launch_sanitized, numbers, sanitized.SIZE)
    return found | correctness.comparisons(CPU, gpu=True)


def launch_all(model: ModelConfig, dtype: torch.dtype) -> None:
    """Launch all that a model's engine launches as it warms up, and so all that it will ever launch."""
    runner = paper_runner(model, CONFIG, dtype)
    for batch in [*warm_up.prompts(CONFIG), *warm_up.sampling(CONFIG), warm_up.decodes(CONFIG)]:
        runner.launch(batch)
        runner.completed()


def launch_sanitized(numbers: sanitized.Numbers, size: sanitized.Size) -> None:
    runner = paper_runner(numbers.model(size.vocab), size.config, numbers.dtype, numbers.kv_dtype)
    runner.graphs = sanitized.EagerGraphs(runner)
    for batch in sanitized.steps(size).values():
        runner.launch(batch)
        runner.completed()


def run_job(name: str, arch: int, links: bool) -> Done:
    """`links`: whether the functions that launch kernels are compiled as well, which takes the GPU's own driver."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    started, names = time.perf_counter(), set[str]()
    launcher = driver.default.launcher_cls if links else None

    def compile_launch(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
        made = compiled(kernel, args, constants)
        if made.hash not in names:
            names.add(made.hash)
            if launcher is not None:
                launcher(made.src, made.metadata)

    failure = ""
    try:
        with paper_gpu(arch, compile_launch):
            jobs()[name]()
    except Exception as error:  # noqa: BLE001 - the others are compiled all the same
        failure = f"{type(error).__name__}: {error}"
    return Done(name, len(names), time.perf_counter() - started, failure)


def run_jobs(names: list[str], arch: int, processes: int, links: bool = False) -> Iterator[Done]:
    """Yield each job's result as it is done."""
    with process_pool(processes, get_context("spawn")) as pool:
        for job in as_completed([pool.submit(run_job, name, arch, links) for name in names]):
            yield job.result()


def check(device: torch.device) -> Iterator[Finding]:
    """In a program of its own, where Triton does not interpret."""
    gpu = device.type == "cuda"
    major, minor = torch.cuda.get_device_capability(device) if gpu else divmod(H100, 10)
    command = [sys.executable, "-m", "labs.benchmarks.gpu_check.compiling", f"--arch={10 * major + minor}", "--json"]
    command += ["--links"] if gpu else ["--only", SMALLEST]
    environ = {**os.environ, "TRITON_INTERPRET": "0"}
    before, started, failures = num_cached(), time.perf_counter(), list[str]()
    with subprocess.Popen(**bound(command), cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            done = Done(**json.loads(line))
            yield Finding(f"kernels of: {done.job}", done.kernels, f"in {done.seconds:.1f} s")
            failures += [f"{done.job}: {done.failure}"] if done.failure else []
    yield Finding("kernels that were not in Triton's cache", num_cached() - before)
    yield Finding("all kernels compiled in", time.perf_counter() - started, "s")
    if failures or process.returncode:
        raise RuntimeError("\n".join([f"compiling ended with status {process.returncode}", *failures]))


def num_cached() -> int:
    """The kernels in Triton's cache."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return sum(1 for _ in folder.glob("*/*.cubin"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=H100, help="80, 86, 89, 90, 100 or 120 (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a processor)")
    parser.add_argument("--only", nargs="+", choices=jobs(), default=list(jobs()), metavar="JOB")
    parser.add_argument("--links", action="store_true", help="what launches kernels too: needs the GPU's driver")
    parser.add_argument("--json", action="store_true", help="a line for each job")
    options = parser.parse_args(arguments)
    failures = 0
    for done in run_jobs(options.only, options.arch, options.jobs, options.links):
        failures += bool(done.failure)
        told = json.dumps(asdict(done)) if options.json else f"{done.job:60}{done.kernels:4} kernels {done.failure}"
        print(told.rstrip(), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
