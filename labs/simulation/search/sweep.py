"""Runs a comparison at several loads: goodput over load."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from labs.simulation.errors import OptionError
from labs.simulation.metrics import NOTHING, format_duration, format_number, format_percent
from labs.simulation.study import Progress, Results, Study
from labs.simulation.summary import Summary, spread

KNEE_GOODPUT = 0.9  # share of the requests that are good at the knee
NUM_LOADS = 6
MOST_LOADS = 50


def parse_loads(text: str) -> tuple[float, ...]:
    """Reads a value of `--sweep`: `0.5:3`, or with the number of loads, `0.5:3:11`. Raises `OptionError`."""
    parts = text.split(":")
    try:
        low, high = float(parts[0]), float(parts[1])
        number = int(parts[2]) if len(parts) > 2 else NUM_LOADS
        if len(parts) > 3 or not (0 < low < high < float("inf") and 2 <= number <= MOST_LOADS):
            raise ValueError
    except (ValueError, IndexError):
        form = f"write LOW:HIGH or LOW:HIGH:N, N from 2 to {MOST_LOADS}, such as 0.5:3 or 0.5:3:11"
        raise OptionError("--sweep", text, form) from None
    return tuple(round(low + (high - low) * n / (number - 1), 6) for n in range(number))


@dataclass(frozen=True, slots=True)
class Sweep:
    """The results of one study at several loads, ascending.

    A load is a multiple of the throughput with all requests present from the start, `capacity` requests a second.
    """

    loads: tuple[float, ...]
    capacity: float
    results: tuple[Results, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.results[0].names

    def curve(self, policy: int, get: Callable[[Summary], float | None]) -> tuple[tuple[float, float], ...]:
        """A policy's median over seeds at each load that has one."""
        medians = [spread(results.runs[policy], get) for results in self.results]
        return tuple((load, one.median) for load, one in zip(self.loads, medians, strict=True) if one is not None)

    def knee(self, policy: int) -> float | None:
        """The largest load with at least `KNEE_GOODPUT` good requests; None: no load of the sweep is as low."""
        good = [
            load for load, goodput in self.curve(policy, lambda summary: summary.goodput) if goodput >= KNEE_GOODPUT
        ]
        return max(good, default=None)


def run_sweep(
    study: Study, loads: tuple[float, ...], capacity: float, progress: Progress = lambda requests: None
) -> Sweep:
    """Runs a study at all loads; its workload is at the first of them."""
    speedup = study.workload.speedup / loads[0]
    studies = [replace(study, workload=replace(study.workload, speedup=load * speedup)) for load in loads]
    return Sweep(loads, capacity, tuple(study.run(progress) for study in studies))


def sweep_rows(sweep: Sweep) -> list[list[str]]:
    """Returns the headings, a row for each load, and the knees."""
    columns: tuple[tuple[str, Callable[[Summary], float | None], Callable[[float], str]], ...] = (
        ("good", lambda s: s.goodput, format_percent),
        ("good a second", lambda s: s.good_rate, format_number),
        ("first token p95", lambda s: s.first_token.p95, format_duration),
    )
    policies = range(len(sweep.names))
    curves = [(show, dict(sweep.curve(policy, get))) for policy in policies for _, get, show in columns]
    heads = [
        f"{name}: {columns[0][0]}" if not n else columns[n][0] for name in sweep.names for n in range(len(columns))
    ]
    rows = [["load", "requests a second", *heads]]
    for load in sweep.loads:
        cells = [show(curve[load]) if load in curve else NOTHING for show, curve in curves]
        rows.append([f"{load:g}", format_number(load * sweep.capacity), *cells])
    knees = [sweep.knee(policy) for policy in policies]
    written = [["below all" if knee is None else f"{knee:g}", *[""] * (len(columns) - 1)] for knee in knees]
    return [
        *rows,
        [f"largest load with {format_percent(KNEE_GOODPUT)} good", "", *(cell for row in written for cell in row)],
    ]
