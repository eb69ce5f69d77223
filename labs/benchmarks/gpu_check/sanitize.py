"""Steps of all kinds under compute-sanitizer: accesses out of bounds, and races in shared memory, kernel by kernel.

What runs is `sanitized`, small, once under each tool, both at the same time. So that a kernel which reads beyond a
tensor is seen, torch then gives each tensor memory of its own. Kernels of ours alone are looked at, by their names.
Before 2026.1 the tool took for races what are none where warps of Hopper synchronise in groups of four: so a newer one
that is carried (`scripts/gpu_peers.py sanitizer`) is taken, and the machine's where that one does not come to its end.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from tempfile import TemporaryDirectory

import torch

from backend.bound_process import bound
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.processes import ROOT

CARRIED = ROOT / ".gpu" / "sanitizer.txz"
SECONDS = 40.0  # for both tools
SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error"),
}
UNSUPPORTED = "Device not supported"
KERNELS = (
    "_rms_norm", "_silu_mul", "_rope_and_store", "_decode", "_prefill", "_product", "_survey", "gather", "_choose",
    "_apply_token_bitmask",
)  # fmt: skip
ACCESS = re.compile(r"(Read|Write) access at (.+?)\+(0x[0-9a-f]+)(?: in (\S+))?")
TOLD_LINES = 12  # of what a tool that failed said
TOLD_RACES = 5


def check(device: torch.device) -> Iterator[Finding]:
    with TemporaryDirectory() as folder:
        if CARRIED.exists():
            with tarfile.open(CARRIED) as archive:
                archive.extractall(folder, filter="data")
        places = (f"{folder}/compute-sanitizer", "compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
        tools = list(dict.fromkeys(filter(None, map(shutil.which, places))))
        if device.type != "cuda" or not tools:
            what = "a GPU" if tools else "compute-sanitizer"
            yield Finding("kernels under compute-sanitizer", f"skipped: needs {what}")
            return
        yield from by_one_of(tools)


def by_one_of(tools: list[str]) -> Iterator[Finding]:
    """Yield what the first tool finds that comes to its end; raises the last one's `RuntimeError` where none does."""
    for tool in tools:
        found: list[Finding] = []
        try:
            for finding in under(tool):
                found.append(finding)  # noqa: PERF402 - those before an error are kept
        except RuntimeError:
            if tool == tools[-1]:
                yield from found
                raise
        else:
            yield from found
            return


def under(tool: str) -> Iterator[Finding]:
    """Yield what both of its tools find. Raises `RuntimeError` for one that does not come to its end."""
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
    filters = [word for kernel in KERNELS for word in ("--kernel-name", f"kne={kernel}")]
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
    """What a tool has found counts, also where the process that it looked at then failed."""
    if UNSUPPORTED in said:
        yield Finding(name, f"skipped: {UNSUPPORTED}")
        return
    told = [line for line in said.splitlines() if line.startswith("=========")]
    summary, done = SUMMARIES[name].search(said), re.search(r"^ran (.*)$", said, re.MULTILINE)
    if summary is not None and (done is not None or int(summary[1])):
        named = [kernel for kernel in KERNELS if any(re.search(rf"\b{kernel}\b", line) for line in told)]
        what = f"{name}: errors{' in ' if named else ''}{', '.join(named)}"
        yield Finding(what, int(summary[1]), bound=0, exact=True)
        for race in _races(said)[:TOLD_RACES]:
            yield Finding(f"{name}: race", race)
    if summary is None or done is None:
        rest = [line for line in said.splitlines() if not line.startswith(("=========", "frame #"))]
        raise RuntimeError("\n".join([f"{name} did not come to its end:", *told[:TOLD_LINES], *rest[-TOLD_LINES:]]))
    yield Finding(f"{name}: ran", done[1])


def _races(said: str) -> list[str]:
    """Each pair of accesses, as kernel, offset and line of the source."""
    accesses = [f"{kind} at {kernel} {offset} {place}".strip() for kind, kernel, offset, place in ACCESS.findall(said)]
    return list(dict.fromkeys(map(" and ".join, zip(accesses[::2], accesses[1::2], strict=False))))
