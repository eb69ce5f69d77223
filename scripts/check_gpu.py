#!/usr/bin/env python3
"""Check and measure everything on one NVIDIA GPU, in less than ten minutes: `scripts/check_gpu.py [--json FILE]`.

    scripts/check_gpu.py                       every part, the most telling first
    scripts/check_gpu.py --parts kernels engine

Needs Python 3.11, torch, triton, numpy, safetensors, tokenizers and jinja2; transformers and what the gateway needs are
used when they are there. Each part runs in a process of its own, within a time of its own, and is reported even when
others fail; figures are written after each, also when this is ended in the midst of one (SIGTERM, SIGINT), and no
process is left on the GPU. Speeds are compared with what the same GPU did in the same run.
Without a GPU the parts run interpreted and small, here, which shows only that they run.
Exit status: 0 when every part ran, 3 when a figure misses its bound, 1 when a part failed and what ran is right.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"  # read when Triton is imported

import triton

from backend import compiled_core
from backend.bound_process import bound
from labs.benchmarks.gpu_check import (
    adapters,
    agreement,
    beside,
    compiling,
    correctness,
    kernels,
    leak,
    masks,
    packed,
    peers,
    requests,
    same,
    sanitize,
    serving,
    steps,
    tenants,
)
from labs.benchmarks.gpu_check.finding import Finding
from labs.benchmarks.gpu_check.models import FALLBACK, dtype_of
from labs.benchmarks.kernels_gpu import copy_rates, matrix_rate

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
ALL_SECONDS = 570.0
TOLD_LINES = 30  # of a failed part's stderr


def environment(device: torch.device) -> Iterable[Finding]:
    """The machine's equipment, and the missing packages of parts."""
    yield Finding("device", torch.cuda.get_device_name(device) if GPU else "none: interpreted, small")
    yield Finding("Python, torch, triton", f"{platform.python_version()}, {torch.__version__}, {triton.__version__}")
    if GPU:
        free, total = torch.cuda.mem_get_info(device)
        yield Finding("memory, free", free / 2**30, f"GiB of {total / 2**30:.1f}")
        yield Finding("capability", ".".join(map(str, torch.cuda.get_device_capability(device))))
    yield Finding("processors", os.cpu_count() or 0)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    yield Finding("C compiler, Python's headers", f"{compiler and Path(compiler).name}, {header.exists()}")
    yield Finding("core", "interpreted" if compiled_core.compiled() is None else "compiled")
    absent = requests.missing() + [name for name in ("transformers", "llguidance") if find_spec(name) is None]
    yield Finding("absent", ", ".join(absent) or "nothing")
    for which, rate in copy_rates(device).items():
        yield Finding(f"copy, read and written, {which}", rate / 1e12, "TB/s")
    yield Finding("matrix product", matrix_rate(device, dtype_of(device)) / 1e12, "TFLOP/s")


def embeddings(device: torch.device) -> Iterable[Finding]:
    if absent := requests.missing():
        yield Finding("embeddings", f"skipped: needs {', '.join(absent)}")
        return
    from labs.benchmarks import embeddings_device  # noqa: PLC0415 - of the gateway, which is not everywhere

    yield from embeddings_device.check(device)


@dataclass(frozen=True)
class Part:
    check: Callable[[torch.device], Iterable[Finding]]
    seconds: float  # on a GPU


PARTS = {
    "environment": Part(environment, 20),
    "compile": Part(compiling.check, 35),
    "correctness": Part(correctness.check, 40),
    "serving": Part(serving.check, 25),
    "agreement": Part(agreement.check, 25),
    "engine": Part(requests.check_offline, 40),
    "llama-3-8b": Part(partial(steps.check, plan=steps.LLAMA), 65),
    "http": Part(requests.check_http, 70),
    "kernels": Part(kernels.check, 100),
    "beside": Part(beside.check, 80),
    "qwen3-0.6b": Part(partial(steps.check, plan=steps.QWEN), 60),
    "same": Part(same.check, 40),
    "masks": Part(masks.check, 25),
    "packed": Part(packed.check, 60),
    "adapters": Part(adapters.check, 100),
    "leak": Part(leak.check, 60),
    "sanitize": Part(sanitize.check, 60),
    "tenants": Part(tenants.check, 180),
    "embeddings": Part(embeddings, 60),
    "fa3": Part(peers.check_attention, 40),
    "peers": Part(peers.check_engines, 70),
    "vllm": Part(peers.check_vllm, 180),
}
"""The parts by worth: correctness before speed, and last the parts that a visit of minutes has no time for."""


@dataclass
class Result:
    """The result of a part. Findings made before it failed are kept."""

    part: str
    findings: list[Finding] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0
    device: str = ""  # the name of the GPU, as the part's process knows it: this one takes no memory of it


def shown(finding: Finding) -> Finding:
    """A finding as it is printed: the speed of an interpreter has no bound."""
    return finding if GPU or finding.exact else replace(finding, bound=None)


def run_here(name: str) -> Result:
    result, started = Result(name), time.perf_counter()
    torch.set_grad_enabled(False)
    try:
        for finding in PARTS[name].check(DEVICE):
            result.findings.append(finding)
            print(f"  {shown(finding)}", flush=True)
    except Exception:  # noqa: BLE001 - the other parts still run
        result.failure = traceback.format_exc()
    except Ended as ended:
        result.failure, ended.result = str(ended), result
        raise
    result.seconds = time.perf_counter() - started
    return result


class Ended(BaseException):
    """A signal ended the run within a part; `result` is the part's result so far."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.status = 128 + number
        self.result: Result | None = None


def end(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # further signals are ignored: ending takes a moment
    raise Ended(number)


def run_apart(name: str, seconds: float) -> Result:
    """In a process of its own, killed after `seconds`; a device error there stays there. Raises `Ended`."""
    with tempfile.TemporaryDirectory() as folder:
        file, started = Path(folder) / "part.jsonl", time.perf_counter()
        command = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--json", str(file)]
        command += [f"--kernels={FALLBACK.kernels}", *([] if FALLBACK.has_graphs else ["--without-graphs"])]
        command += [] if FALLBACK.kv_gib is None else [f"--kv-gib={FALLBACK.kv_gib}"]
        errors = Path(folder) / "stderr"
        ended: Ended | None = None
        with errors.open("w") as stderr:
            process = subprocess.Popen(**bound(command), stderr=stderr)
        try:
            status = process.wait(timeout=max(seconds, 1.0))
            failure = "" if status == 0 else f"ended with status {status}"
        except subprocess.TimeoutExpired:
            failure = f"took longer than {seconds:.0f} s"
        except Ended as error:
            ended, failure = error, str(error)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the children that a crashed part left on the device
            process.wait()
        lines = file.read_text().splitlines() if file.exists() else []
        if failure:
            failure = "\n".join([failure, *errors.read_text(errors="replace").splitlines()[-TOLD_LINES:]])
    device, *found = [json.loads(line) for line in lines] or [""]
    seconds = time.perf_counter() - started
    result = Result(name, [Finding(**one) for one in found], failure, seconds, device)
    if ended is not None:
        ended.result = result
        raise ended
    return result


def part_main(name: str, file: Path) -> int:
    """Each finding is written as it is made, so that a part that is killed keeps those before."""
    torch.set_grad_enabled(False)
    with file.open("w") as out:
        print(json.dumps(torch.cuda.get_device_name(DEVICE) if GPU else ""), file=out, flush=True)
        for finding in counting_kernels(PARTS[name].check(DEVICE)):
            print(f"  {shown(finding)}", flush=True)
            print(json.dumps(asdict(finding)), file=out, flush=True)
    return 0


def counting_kernels(findings: Iterable[Finding]) -> Iterable[Finding]:
    """The findings, with the number of kernels still to compile after part `compile`."""
    before = compiling.num_cached()
    yield from findings
    if GPU:
        yield Finding("kernels compiled meanwhile", compiling.num_cached() - before)


def run_all(names: list[str], apart: bool, limit: float, file: Path) -> list[Result]:
    """Write the figures after each part, so that a crash of the next one loses none. Raises `Ended`."""
    deadline, results = time.perf_counter() + limit, list[Result]()
    for name in names:
        print(f"{name}:", flush=True)
        left = deadline - time.perf_counter()
        try:
            if left < 1:
                results.append(Result(name, failure="no time was left"))
            else:
                most = min(PARTS[name].seconds, left) if GPU else left
                results.append(run_apart(name, most) if apart else run_here(name))
                results[-1].findings += over_http(results) if name in ("engine", "http") else []
        except Ended as ended:
            results += [ended.result] if ended.result is not None else []
            raise
        finally:
            if results and results[-1].failure:
                print(f"  FAILED: {results[-1].failure}", flush=True)
            write(results, file)
    return results


def write(results: list[Result], file: Path) -> None:
    parts = [vars(result) | {"findings": [finding.to_json() for finding in result.findings]} for result in results]
    about = {"device": next((result.device for result in results if result.device), None)}
    about |= {"torch": torch.__version__, "triton": triton.__version__, "date": datetime.now(UTC).date().isoformat()}
    whole = file.with_name(f"{file.name}.new")
    whole.write_text(json.dumps(about | {"parts": parts}, indent=1))
    whole.replace(file)  # a process that is ended before this leaves the old file


def over_http(results: list[Result]) -> list[Finding]:
    """The share of offline throughput over HTTP, if both were measured."""
    rates = {result.part: found.value for result in results for found in result.findings if found.unit == "tok/s"}
    if not {"engine", "http"} <= rates.keys():
        return []
    return [Finding("over HTTP / offline", rates["http"] / rates["engine"], bound=0.9, sense=">=")]


def report(results: list[Result], file: Path) -> int:
    """Print the bounds and the failures again; returns the exit status."""
    found = [finding for result in results for finding in result.findings]
    judged = [finding for finding in found if finding.met is not None and (GPU or finding.exact)]
    print("\nsummary")
    for finding in judged:
        print(f"  {finding}")
    for result in results:
        print(f"  {result.part:20}{result.seconds:7.1f} s  {'FAILED' if result.failure else 'ran'}")
    print(f"  figures in {file}")
    if not all(finding.met for finding in judged):
        return 3
    return 1 if any(result.failure for result in results) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    parser.add_argument("--json", type=Path, default=Path("check_gpu.json"), metavar="FILE")
    parser.add_argument("--apart", action="store_true", default=GPU, help="a process for each part without a GPU too")
    parser.add_argument("--seconds", type=float, default=ALL_SECONDS, help="for all parts together")
    parser.add_argument("--kernels", default="auto", help="torch: where Triton cannot compile")
    parser.add_argument("--without-graphs", action="store_true", help="where they cannot be recorded")
    parser.add_argument("--kv-gib", type=float, help="of KV memory, where all that is free is too much")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # the process of one part
    options = parser.parse_args()
    FALLBACK.kernels, FALLBACK.kv_gib = options.kernels, options.kv_gib
    FALLBACK.has_graphs = not options.without_graphs
    if options.part:
        return part_main(options.part, options.json)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    try:
        return report(run_all(options.parts, options.apart, options.seconds, options.json), options.json)
    except Ended as ended:
        return ended.status


if __name__ == "__main__":
    sys.exit(main())
