"""The cost of a request to the event loop, in this checkout and in another: `python -m labs.benchmarks.two_checkouts
--beside DIR`.

Both gateways run side by side on one core, in this interpreter's environment, and take turns. Each figure is the CPU
time of the loop's thread for a request, and what is judged is the median over pairs of one turn each. The engine takes
steps of no length through the real scheduler and the device threads, or (instant) has the whole answer at once.
"""

import os
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from labs.benchmarks import machine
from labs.benchmarks.fresh import Fresh, check_nothing_was_cached
from labs.benchmarks.load import closed_loop, post
from labs.benchmarks.processes import Worker
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.benchmarks.telemetry_cost import BODY, CONNECTIONS, PATH

TOKENS = 32
INTERPRETED = "interpreted"  # the core of both, because an environment has at most one compiled
KINDS = ("whole", "stream", "instant whole", "instant stream")  # of an answer; instant: without scheduler and device

Costs = dict[tuple[str, str], list[float]]  # microseconds of the loop's thread for a request, by checkout and kind


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=12)
    parser.add_argument("--beside", type=Path, required=True, metavar="DIR", help="the other checkout")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement in each run")
    parser.add_argument("--most", type=float, default=1.0, help="what a request may cost, as a share of there")
    parser.add_argument("--compiled", action="store_true", help="let the core of this checkout be compiled")
    options = parser.parse_args(arguments)
    runs, seconds = (1, 0.3) if options.quick else (options.runs, options.seconds)
    server_core, load_core = machine.two_cores()
    report = Report("two_checkouts", options.quick)
    costs: Costs = defaultdict(list)
    here = "compiled" if options.compiled else INTERPRETED
    with ExitStack() as running:
        gateways = {
            (name, kind): running.enter_context(_gateway(directory, kind, server_core, core))
            for name, directory, core in (("here", Path.cwd(), here), ("there", options.beside, INTERPRETED))
            for kind in ("stepping", "instant")
        }
        os.sched_setaffinity(0, {load_core})
        for run in range(runs):
            for name in ("here", "there") if run % 2 else ("there", "here"):
                for kind in KINDS:
                    engine = "instant" if kind.startswith("instant") else "stepping"
                    costs[name, kind].append(_cost(gateways[name, engine], kind.endswith("stream"), seconds))
    _tell(report, costs, options.most)
    return report.finish(options.results)


def _gateway(directory: Path, engine: str, cpu: int, core: str) -> Worker:
    flags = ["--instant"] if engine == "instant" else []
    command = [sys.executable, "-m", "labs.benchmarks.gateway_server", "--set=metrics_on_tenant_port=true", *flags]
    env = {"PYTHONPATH": str(directory.resolve()), "BENCHMARK_CORE": core}
    return Worker(command, cpu, env=env, directory=directory)


def _cost(gateway: Worker, stream: bool, seconds: float) -> float:
    requests = Fresh(post(PATH, BODY | {"max_tokens": TOKENS, "stream": stream}, gateway.ready["key"]))
    closed_loop(gateway.ready["port"], requests, CONNECTIONS, seconds / 6)
    before = gateway.ask()
    load = closed_loop(gateway.ready["port"], requests, CONNECTIONS, seconds, warm_up=0)
    after = gateway.ask()
    check_nothing_was_cached(gateway.ready["port"])
    microseconds: float = (after["loop_cpu"] - before["loop_cpu"]) * 1e6 / load.answers
    return microseconds


def _tell(report: Report, costs: Costs, most: float) -> None:
    rows: list[dict[str, object]] = []
    for kind in KINDS:
        here, there = costs["here", kind], costs["there", kind]
        shares = [ours / theirs for ours, theirs in zip(here, there, strict=True)]
        rows.append({"answer": kind, "here": Spread.of(here), "there": Spread.of(there), "share": Spread.of(shares)})
        report.at_most(f"{kind}: cost as a share of that in the other checkout", median(shares), most)
    report.add_table(f"us of the loop for a request of {TOKENS} tokens, median (extremes)", rows)


if __name__ == "__main__":
    sys.exit(main())
