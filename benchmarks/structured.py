"""What answers that match a schema cost: python -m benchmarks.structured FOLDER [--schemas 200]

FOLDER as `benchmarks.json_schemas` takes it. In one run, offline, on the embedded model (real): tokens per second of 32
rows with 32 schemas, held against the same numbers of tokens that match nothing, with tokens that are forced sampled
one by one, and taken at once.
"""

import time
from pathlib import Path
from random import Random
from statistics import median

import torch

from backend.grammar import Grammar
from backend.llm import LLM
from backend.sampling_params import SamplingParams
from backend.sizing import EngineOptions
from benchmarks.json_schemas import SEED, try_schemas
from benchmarks.report import Report, scenario_parser
from gateway.settings.machine import spare_cores

ROWS, TOKENS, RUNS = 32, 96, 7
COST, GAIN = 0.97, 1.3


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=RUNS)
    parser.add_argument("folder", type=Path, help="of the files with schemas and instances")
    parser.add_argument("--schemas", type=int, default=200, help="to choose from (default: %(default)s)")
    options = parser.parse_args(arguments)
    report = Report("structured", options.quick)
    taken = [grammar for _, _, grammar in try_schemas(options.folder, options.schemas, SEED).taken]
    torch.set_num_threads(spare_cores())  # as the server has them: another core is left to who matches
    llm = LLM("embedded", EngineOptions(max_num_seqs=ROWS))
    table = _throughput(llm, Random(SEED).sample(taken, ROWS), 1 if options.quick else options.runs, report)
    report.add_table(f"{ROWS} rows, {ROWS} schemas, {TOKENS} tokens each", table)
    return report.finish(options.results)


def _throughput(llm: LLM, grammars: list[Grammar], runs: int, report: Report) -> list[dict[str, object]]:
    masks = llm.model.runner.masks
    assert masks is not None
    rates: dict[str, list[float]] = {"unconstrained": [], "sampled one by one": [], "forced at once": []}
    shares = []
    for n in range(runs + 1):
        counts = [0] * ROWS
        for kind in ("sampled one by one", "unconstrained", "forced at once"):
            masks.jump_forward = kind == "forced at once"
            constrained = kind != "unconstrained"
            sampling = [
                SamplingParams(seed=n, max_tokens=TOKENS, grammar=grammar)
                if constrained
                else SamplingParams(seed=n, max_tokens=max(1, counts[row]), ignore_eos=True)
                for row, grammar in enumerate(grammars)
            ]
            jumped, began = llm.scheduler.counters.jump_forward_tokens, time.perf_counter()
            completions = llm.generate(["a"] * ROWS, sampling, progress=False)
            seconds = time.perf_counter() - began
            made = [len(completion.token_ids) for completion in completions]
            if kind == "sampled one by one":
                counts = made
            if n:  # the first run compiles
                rates[kind].append(sum(made) / seconds)
                if masks.jump_forward:
                    shares.append((llm.scheduler.counters.jump_forward_tokens - jumped) / sum(made))
    free = rates["unconstrained"]
    of_free = {kind: median(a / b for a, b in zip(each, free, strict=True)) for kind, each in rates.items()}
    report.at_least("tokens/s with masks, of those without", of_free["sampled one by one"], COST)
    report.at_least("tokens/s with forced tokens at once, of those without masks", of_free["forced at once"], GAIN)
    return [
        {
            "tokens": kind,
            "tokens/s": median(each),
            "of unconstrained": of_free[kind],
            "forced": median(shares) if kind == "forced at once" else 0.0,
        }
        for kind, each in rates.items()
    ]


if __name__ == "__main__":
    raise SystemExit(main())
