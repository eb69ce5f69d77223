"""The distance of `sluice tune` from the best of all settings, and its cost: `python -m labs.benchmarks.tune [--trace
FILE]`.

Llama-3-8B on an A100 (simulated, published step times). Each workload is requests of four tenants at 0.9 times what the
device completes; a request is good with its first token within 2 s and then a token every 0.1 s on average. The search
spends its budget; then every setting of its ladders that an engine can have meets all requests, and the best of them
is what the search might have found. Drawn workloads are Poisson arrivals: chats of the lengths of Azure's
conversations, and questions over documents, prompts four times as long with answers half as long. Traces keep their
own arrivals, at that load.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from labs.benchmarks.overload_loads import OUTPUTS, PROMPTS, drawn_trace
from labs.benchmarks.report import Report, scenario_parser
from labs.process_pool import process_pool
from labs.simulation.device import DEVICES
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective
from labs.simulation.search.tuning import LADDERS, Setting, Tuner
from labs.simulation.study import capacity
from labs.simulation.traces import read_trace
from labs.simulation.workload import Workload

DEVICE = DEVICES["llama3-8b-a100"]
POLICY = parse_simulated_policy("fair", DEVICE)
LOAD_SHARE_OF_CAPACITY = 0.9
REQUESTS = 600
BUDGET_SIMULATIONS = 30
MIN_SHARE_OF_BEST = 0.97  # of the goodput of the best of all settings
QUICK_GRID = 12  # settings


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=1)
    parser.add_argument("--trace", type=Path, action="append", help="instead of drawn workloads; may be repeated")
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"of each workload (default: {REQUESTS})")
    parser.add_argument("--jobs", type=int, default=2, help="simulations at a time (default: 2)")
    options = parser.parse_args(arguments)
    requests = 60 if options.quick else options.requests
    workloads = _traced(options.trace, requests) if options.trace else _drawn(requests)
    report = Report("tune", options.quick)
    rows = []
    with process_pool(options.jobs) as pool:
        for name, workload in workloads.items():
            tuner = Tuner(POLICY, workload.arrivals(seed=1), DEVICE, Objective(), BUDGET_SIMULATIONS, pool)
            tuned = tuner.run()
            grid = tuner.grid()
            best = tuner.best_of([*grid[: QUICK_GRID if options.quick else None], tuned.best.setting])
            found, most = tuned.best.summary.goodput, best.summary.goodput
            for which, trial, cost in (
                ("present", tuned.present, 1.0),
                ("found", tuned.best, tuned.spent),
                ("best of all", best, float(len(grid))),
            ):
                rows.append(
                    {
                        "workload": name,
                        "settings": f"{which}: {_written(trial.setting)}",
                        "good %": 100 * trial.summary.goodput,
                        "simulations": cost,
                    }
                )
            report.at_least(
                f"{name}: goodput found, of the best of {len(grid)} settings", found / most, MIN_SHARE_OF_BEST
            )
    report.add_table(f"the engine's settings ({', '.join(LADDERS)}) and what they make good", rows)
    return report.finish(options.results)


def _drawn(requests: int) -> dict[str, Workload]:
    documents = drawn_trace(1, requests, [4 * tokens for tokens in PROMPTS], [max(1, n // 2) for n in OUTPUTS])
    drawn = {"chats": drawn_trace(0, requests), "documents": documents}
    return {name: _at_load(Workload(tuple(trace), requests, rate=1.0, tenants="4")) for name, trace in drawn.items()}


def _traced(paths: Iterable[Path], requests: int) -> dict[str, Workload]:
    return {path.name: _at_load(Workload(tuple(read_trace(path)[:requests]), tenants="4")) for path in paths}


def _at_load(workload: Workload) -> Workload:
    rate = LOAD_SHARE_OF_CAPACITY * capacity(POLICY, workload, DEVICE)
    if workload.rate is not None:
        return replace(workload, rate=rate)
    return replace(workload, speedup=rate * workload.trace[-1].time / len(workload.trace))


def _written(setting: Setting) -> str:
    return ", ".join(f"{value:g}" for value in setting if value is not None)


if __name__ == "__main__":
    sys.exit(main())
