"""The promises of `sluice tune`, live: `python -m labs.benchmarks.tune_live [--seconds 30] [--runs 3]`.

The load of `overload_live` at `LOAD_SHARE_OF_CAPACITY` times capacity meets `sluice serve`, with settings that suit it
badly and with its own, which writes an event log. `sluice tune --log` searches better ones in it, and the server is
started again with the flags that it prints, for the same requests. Shown are the simulator's shares of good requests
for the present settings and its promises, beside the measured ones.
"""

import os
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from backend.bound_process import bound
from labs.benchmarks import machine
from labs.benchmarks.overload_live import (
    FIRST_TOKEN,
    INTERVAL,
    SETTINGS,
    TENANTS,
    Conversations,
    capacity_of,
    figures_of,
    offer,
)
from labs.benchmarks.overload_loads import drawn_trace
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.benchmarks.served import served_afresh
from labs.simulation.arrival import Arrival

LOAD_SHARE_OF_CAPACITY = 0.7
PRESENT: Mapping[str, Mapping[str, object]] = {
    "few rows": {"max_num_seqs": 2, "max_num_batched_tokens": 64, "prefill_chunk": 64},
    "small steps": {"max_num_seqs": 8, "max_num_batched_tokens": 16, "prefill_chunk": 16},
    "its own": {},
}
BUDGET_SIMULATIONS = 8
MAX_PROMISE_ERROR_SHARE = 0.05  # of the requests, by which a promise may be off


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=2)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load, and of measuring capacity")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.seconds = 1, 2.0
    report, trace = Report("tune_live", options.quick), drawn_trace()
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    rows = [
        {"settings": name} | _measure(options, server_core, trace, run, present)
        for run in range(options.runs)
        for name, present in PRESENT.items()
    ]
    shares = {what: [float(str(row[what])) for row in rows] for what in ("before", "simulated", "promised", "live")}
    report.add_table("share of good requests, by run", rows)
    report.notes = [f"{what}: {Spread.of(values)}" for what, values in shares.items()]
    worse = [before - live for live, before in zip(shares["live"], shares["before"], strict=True)]
    report.at_most("worse than before, the worst run", max(worse), MAX_PROMISE_ERROR_SHARE)
    for told, held in (("simulated", "before"), ("promised", "live")):
        missing = [promised - live for promised, live in zip(shares[told], shares[held], strict=True)]
        report.at_most(f"{told} and not kept, median of runs", median(missing), MAX_PROMISE_ERROR_SHARE)
        report.at_most(f"{told} and not kept, the worst run", max(missing), 2 * MAX_PROMISE_ERROR_SHARE)
    return report.finish(options.results)


def _measure(
    options: Namespace, core: int, trace: Sequence[Arrival], run: int, present: Mapping[str, object]
) -> dict[str, object]:
    with TemporaryDirectory() as directory, served_afresh(core, TENANTS, Path(directory), **SETTINGS) as server:
        rate = LOAD_SHARE_OF_CAPACITY * capacity_of(server, Conversations(server, trace, run), options.seconds)
    with TemporaryDirectory() as directory:
        events = Path(directory) / "events"
        before = _good(options, core, trace, run, rate, {**present, "event_log": events})
        flags, simulated, promised = _tuned(events)
        live = _good(options, core, trace, run, rate, flags or present)
    shares = {"before": before, "simulated": simulated, "promised": promised, "live": live}
    return {"requests a second": rate, **shares, "flags": str(flags)}


def _good(
    options: Namespace, core: int, trace: Sequence[Arrival], run: int, rate: float, settings: Mapping[str, object]
) -> float:
    """Returns the share of good requests by these settings."""
    with (
        TemporaryDirectory() as directory,
        served_afresh(core, TENANTS, Path(directory), **{**SETTINGS, **settings}) as server,
    ):
        asked = Conversations(server, trace, 100 + run).poisson(rate, options.seconds)
        return figures_of(asked, offer(server, asked, options.seconds), options.seconds)["good"]


def _tuned(events: Path) -> tuple[dict[str, object], float, float]:
    """Returns the settings that `sluice tune` finds in a log, none where it keeps the present ones, and the shares of
    good requests that it gives the present ones, and promises.
    """
    targets = ("--good-first-token", str(FIRST_TOKEN), "--good-per-token", str(INTERVAL))
    command = (
        sys.executable,
        "-m",
        "sluice",
        "tune",
        "--log",
        str(events),
        "--budget",
        str(BUDGET_SIMULATIONS),
        *targets,
    )
    printed = subprocess.run(**bound(command), check=True, capture_output=True, text=True).stdout.strip().splitlines()
    goodput = next(line for line in printed if line.startswith("goodput"))
    _, simulated, _, promised, _ = goodput.split()
    line = printed[-2] if printed[-2].startswith("--") else ""
    words = shlex.split(line)
    found = {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    return dict(found), float(simulated) / 100, float(promised) / 100


if __name__ == "__main__":
    sys.exit(main())
