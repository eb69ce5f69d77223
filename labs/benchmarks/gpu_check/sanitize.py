"""Steps that launch every kernel under compute-sanitizer: accesses out of bounds, and races in shared memory.

The program is `sanitized`, run once under each tool, both at the same time. To show a kernel that reads beyond a
tensor, torch then gives each tensor memory of its own. Only the project's own kernels are examined, by their names.
Before 2026.1 racecheck reported false races where warps of Hopper synchronise in groups of four: so a newer racecheck
that is carried (`scripts/gpu_peers.py sanitizer`) is used if it starts, and the machine's own tools for everything
else.
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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from backend.bound_process import bound
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.processes import ROOT

CARRIED = ROOT / ".gpu" / "sanitizer.txz"
TOOL_SECONDS = {"memcheck": 35.0, "racecheck": 40.0}  # from the start of both
SECONDS_TO_END = 5.0  # of them, in which no step begins
SECONDS_TO_START = 8.0  # for a tool of which it is not known whether it can
SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error"),
}
UNSUPPORTED = "Device not supported"
KERNELS = (
    "_rms_norm", "_silu_mul", "_rope_and_store", "_decode", "_join", "_prefill", "_product", "_survey", "gather",
    "_choose", "_apply_token_bitmask", "_shrink", "_expand", "_multiply_groups",
    "_packed_product",
)  # fmt: skip
STARTS = """
from ctypes import CDLL, byref, c_void_p
cuda, context, module, kernel = CDLL("libcuda.so.1"), c_void_p(), c_void_p(), c_void_p()
ptx = b".version 7.0\\n.target sm_80\\n.address_size 64\\n.visible .entry _decode() { ret; }"
calls = [
    lambda: cuda.cuInit(0),
    lambda: cuda.cuDevicePrimaryCtxRetain(byref(context), 0),
    lambda: cuda.cuCtxSetCurrent(context),
    lambda: cuda.cuModuleLoadData(byref(module), ptx),
    lambda: cuda.cuModuleGetFunction(byref(kernel), module, b"_decode"),
    lambda: cuda.cuLaunchKernel(kernel, *[1] * 6, 0, None, None, None),
    lambda: cuda.cuCtxSynchronize(),
]
print("started:", not any(call() for call in calls))
"""
"""A program that launches one kernel."""
ERROR = re.compile(r"^========= (?:Error: )?(?:Race reported|Invalid) ", re.MULTILINE)
PROGRESS = re.compile(r"^[\d.]+ s: (\d+) of (\d+) steps ran, then .*$", re.MULTILINE)
ACCESS = re.compile(r"(Read|Write) access at (.+?)\+(0x[0-9a-f]+)(?: in (\S+))?")
TOLD_LINES = 12  # of what a tool that failed said
TOLD_RACES = 5
RACES_NUMBERS = 2  # kinds of models that are served; racecheck is slow


def check(device: torch.device) -> Iterator[Finding]:
    with TemporaryDirectory() as folder:
        if CARRIED.exists():
            with tarfile.open(CARRIED) as archive:
                archive.extractall(folder, filter="data")
        carried = shutil.which(f"{folder}/compute-sanitizer")
        own = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
        if device.type != "cuda" or not (own or carried):
            what = "a GPU" if own or carried else "compute-sanitizer"
            yield Finding("kernels under compute-sanitizer", f"skipped: needs {what}")
            return
        yield from under(own, carried)


@dataclass(frozen=True, slots=True)
class Run:
    """A tool that runs. What it says is in a file: a pipe ends only with the last process that could write to it."""

    name: str
    process: subprocess.Popen[bytes]
    said: Path
    until: float  # by the monotonic clock

    def end(self) -> str:
        """Return the tool's output when it ends, or when its time is over and it is killed with every process that it
        started.
        """
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, self.until - time.monotonic()))
        over = self.process.poll() is None
        self.kill()
        said = self.said.read_text(errors="replace")
        return f"{said}\nended after {TOOL_SECONDS[self.name]:g} s\n" if over else said

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # of a device that does not let go of it
            self.process.wait(1)


def under(own: str | None, carried: str | None) -> Iterator[Finding]:
    """Yield the findings of both tools, the machine's own compute-sanitizer or a carried one; one is there.

    Raises `RuntimeError` for tools that do not end.
    """
    began, running, failures = time.monotonic(), list[Run](), list[str]()
    with TemporaryDirectory() as folder:
        try:
            running.append(_start(own or str(carried), "memcheck", began, Path(folder)))
            newer = carried if carried and (own is None or starts(carried)) else None
            yield Finding("racecheck: whose", "carried" if newer else "the machine's")
            running.append(_start(newer or str(own), "racecheck", began, Path(folder)))
            for run in running:
                yield from _judged(run.name, run.end(), failures)
        finally:
            for run in running:
                run.kill()
    if failures:
        raise RuntimeError("\n".join(failures))


def starts(tool: str) -> bool:
    """True if a program under it ends within a few seconds."""
    with TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        command = [tool, "--tool", "racecheck", sys.executable, "-c", STARTS]
        run = Run("racecheck", _popen(command, said, {}), said, time.monotonic() + SECONDS_TO_START)
        told = run.end()
    return "started: True" in told and SUMMARIES["racecheck"].search(told) is not None


def _start(tool: str, name: str, began: float, folder: Path) -> Run:
    filters = [word for kernel in KERNELS for word in ("--kernel-name", f"kne={kernel}")]
    options = ["--tool", name, "--report-api-errors", "no", "--show-backtrace", "no", *filters]
    program = [sys.executable, "-m", "labs.benchmarks.gpu_check.sanitized"]
    limits = [f"--began={began}", f"--seconds={TOOL_SECONDS[name] - SECONDS_TO_END}"]
    environ = {"PYTHONUNBUFFERED": "1"}
    if name == "racecheck":
        limits.append(f"--numbers={RACES_NUMBERS}")
    else:
        environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    said = folder / name
    return Run(name, _popen([tool, *options, *program, *limits], said, environ), said, began + TOOL_SECONDS[name])


def _popen(command: list[str], said: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    with said.open("w") as out:
        return subprocess.Popen(
            **bound(command), cwd=ROOT, env=os.environ | environ, stdout=out, stderr=subprocess.STDOUT
        )


def _judged(name: str, said: str, failures: list[str]) -> Iterator[Finding]:
    """Yield the findings in a tool's output. They count even if the examined process then failed, or was ended."""
    if UNSUPPORTED in said:
        yield Finding(name, f"skipped: {UNSUPPORTED}")
        return
    told = [line for line in said.splitlines() if line.startswith("=========")]
    summary, done = SUMMARIES[name].search(said), re.search(r"^ran (\d+) steps of (\d+)$", said, re.MULTILINE)
    errors = int(summary[1]) if summary else len(ERROR.findall(said))
    if errors or (summary and done):
        named = [kernel for kernel in KERNELS if any(re.search(rf"\b{kernel}\b", line) for line in told)]
        what = f"{name}: errors{' in ' if named else ''}{', '.join(named)}"
        yield Finding(what, errors, bound=0, exact=True)
        for race in _races(said)[:TOLD_RACES]:
            yield Finding(f"{name}: race", race)
    stages = list(PROGRESS.finditer(said))
    ran, total = map(int, done.groups() if done else stages[-1].groups() if stages else (0, 0))
    yield Finding(f"{name}: ran", f"{ran} steps of {total}")
    if summary and done:
        yield Finding(f"{name}: steps that time was too short for", total - ran, bound=0, exact=True)
    else:
        rest = [line for line in said.splitlines() if not line.startswith(("=========", "frame #"))]
        rest = [line for line in rest if not PROGRESS.match(line)]
        stuck = next((number for number, line in enumerate(rest) if line.startswith("Timeout (")), -TOLD_LINES)
        failures += [f"{name} did not come to its end:", *told[:TOLD_LINES], *rest[stuck:][:TOLD_LINES]]
    if not (summary and done and ran == total):
        for stage in stages[-TOLD_LINES:]:
            yield Finding(f"{name}: at", stage[0])


def _races(said: str) -> list[str]:
    """Each pair of accesses, as kernel, offset and line of the source."""
    accesses = [f"{kind} at {kernel} {offset} {place}".strip() for kind, kernel, offset, place in ACCESS.findall(said)]
    return list(dict.fromkeys(map(" and ".join, zip(accesses[::2], accesses[1::2], strict=False))))
