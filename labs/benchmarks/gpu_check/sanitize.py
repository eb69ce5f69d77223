"""Steps of all kinds under compute-sanitizer: accesses out of bounds, and races in shared memory, kernel by kernel.

What runs is `sanitized`, small, once under each tool, both at the same time. So that a kernel which reads beyond a
tensor is seen, torch then gives each tensor memory of its own. Before 2026.1 the tool took for races what are none
where warps of Hopper synchronise in groups of four: what is found in `_prefill` alone is to be tried with a newer one,
which a wheel has (nvidia-cuda-sanitizer-api). The first on the PATH is taken.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import torch

from backend.bound_process import bound
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.processes import ROOT

SECONDS = 75.0  # for both tools
SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error"),
}
UNSUPPORTED = "Device not supported"
KERNELS = (
    "_rms_norm", "_silu_mul", "_rope_and_store", "_decode", "_join", "_prefill", "_survey", "_count", "_weigh",
    "_choose", "_apply_token_bitmask",
)  # fmt: skip
TOLD_LINES = 12  # of what a tool that failed said


def check(device: torch.device) -> Iterator[Finding]:
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if device.type != "cuda" or tool is None:
        yield Finding("kernels under compute-sanitizer", f"skipped: needs {'a GPU' if tool else 'compute-sanitizer'}")
        return
    yield from under(tool)


def under(tool: str) -> Iterator[Finding]:
    """Yield what both of its tools find. Raises `RuntimeError` for one that does not come to its summary."""
    running, until = {name: _start(tool, name) for name in SUMMARIES}, time.monotonic() + SECONDS
    try:
        for name, process in running.items():
            yield from _judged(name, _said(process, until - time.monotonic()))
    finally:
        for process in running.values():
            _kill(process)
            with process:  # closes what it has said, and waits for it
                pass


def _start(tool: str, name: str) -> "subprocess.Popen[str]":
    filters = [word for kernel in KERNELS for word in ("--kernel-name", f"kns={kernel}")]
    options = ["--tool", name, "--report-api-errors", "no", "--show-backtrace", "no", *filters]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if name == "memcheck":
        environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return subprocess.Popen(
        **bound([tool, *options, sys.executable, "-m", "labs.benchmarks.gpu_check.sanitized"]),
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def _said(process: "subprocess.Popen[str]", seconds: float) -> str:
    try:
        said: str = process.communicate(timeout=max(0.0, seconds))[0]
    except subprocess.TimeoutExpired:
        _kill(process)
        said = f"{process.communicate()[0]}\nended after {SECONDS:g} s"
    return said


def _kill(process: "subprocess.Popen[str]") -> None:
    """Kill it with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _judged(name: str, said: str) -> Iterator[Finding]:
    if UNSUPPORTED in said:
        yield Finding(name, f"skipped: {UNSUPPORTED}")
        return
    told = [line for line in said.splitlines() if line.startswith("=========")]
    summary, done = SUMMARIES[name].search(said), re.search(r"^ran (.*)$", said, re.MULTILINE)
    if summary is None or done is None:
        raise RuntimeError(
            "\n".join([f"{name} did not come to its end:", *told[:TOLD_LINES], *said.splitlines()[-TOLD_LINES:]])
        )
    named = [kernel for kernel in KERNELS if any(re.search(rf"\b{kernel}\b", line) for line in told)]
    yield Finding(f"{name}: errors{' in ' if named else ''}{', '.join(named)}", int(summary[1]), bound=0, exact=True)
    yield Finding(f"{name}: ran", done[1])
