"""Weights in 4 and 8 bits beside llama.cpp, on the same GGUF files, and beside our own bfloat16.

    python -m labs.benchmarks.quantized_peers

SmolLM2-135M in Q4_1 (as `scripts/download smollm2` has it), and in Q8_0 and Q4_0 made from it. One thread, each engine
in a process of its own on the same core, in turns run by run. llama.cpp is compiled for this processor.
"""

import os
import subprocess
import sys
from pathlib import Path

from backend.bound_process import bound
from backend.model.hub import resolve_model
from labs.benchmarks import machine
from labs.benchmarks.cache import cache_dir
from labs.benchmarks.engine_peers import LLAMA, MAX_NUM_SEQS, OFFLINE, Cores, command, measure, ratio, tell
from labs.benchmarks.llama_environment import llama_python
from labs.benchmarks.peers.peer import CPU_RATE
from labs.benchmarks.processes import ROOT
from labs.benchmarks.report import Report, scenario_parser
from labs.benchmarks.workload import decode

OURS_WIDE = "sluice offline, bfloat16"
LEAST = {1: 1.0, 8: 1.3, 32: 1.3}  # of llama.cpp's tokens a second, by rows
LEAST_OF_BFLOAT16 = 1.6  # with one row


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=5)
    parser.add_argument("--formats", nargs="+", default=["Q4_1", "Q8_0", "Q4_0"])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    options = parser.parse_args(arguments)
    report = Report("quantized_peers", options.quick)
    cores = Cores(*machine.two_cores())
    os.sched_setaffinity(0, {cores.load})
    limits = ("--max-num-seqs", str(MAX_NUM_SEQS))
    workloads = [decode(rows, options.tokens) for rows in LEAST]
    for name in options.formats:
        file, python = str(file_in(name)), str(llama_python())
        figures = measure(
            {
                OFFLINE: command("sluice_offline", "float32", *limits, model=file),
                OURS_WIDE: command("sluice_offline", "bfloat16", *limits, "--quantization", "none", model=file),
                LLAMA: command("llama_cpp", "float32", *limits, model=file, python=python),
            },
            workloads,
            1 if options.quick else options.runs,
            cores,
        )
        tell(report, f"{name}, at most {MAX_NUM_SEQS} sequences", figures)
        for rows, bound_ in LEAST.items():
            for of in ("tok/s", CPU_RATE):
                found = ratio(figures, OFFLINE, LLAMA, f"batch {rows}", of)
                report.at_least(f"{name}: batch {rows}, {of} over llama.cpp", found, bound_)
        report.at_least(
            f"{name}: batch 1, tok/s over our bfloat16",
            ratio(figures, OFFLINE, OURS_WIDE, "batch 1"),
            LEAST_OF_BFLOAT16,
        )
    return report.finish(options.results)


def file_in(name: str) -> Path:
    """SmolLM2 in this format, made at first use if it is another than the download's."""
    source = (resolve_model("smollm2") / "model.gguf").readlink()
    if source.stem.endswith(name):
        return source
    target = cache_dir() / f"smollm2-{name}.gguf"
    if not target.exists():
        draft = target.with_suffix(".draft")
        made = [str(llama_python()), "-m", "labs.benchmarks.peers.requantize", str(source), name, str(draft)]
        subprocess.run(**bound(made), cwd=ROOT, check=True)
        draft.rename(target)
    return target


if __name__ == "__main__":
    sys.exit(main())
