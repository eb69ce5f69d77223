"""The results of a scenario: spreads over its runs, targets met or missed, on the terminal and as JSON."""

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Literal

from labs.benchmarks import machine

RESULTS = Path(__file__).parent / "results"


def scenario_parser(description: str | None, runs: int) -> ArgumentParser:
    """The flags that every scenario has."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--quick", action="store_true", help="one short run, to see that it works; judges nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the JSON file")
    return parser


def quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of several runs, and their extremes."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values), len(values))

    def __str__(self) -> str:
        return f"{format_number(self.median)} ({format_number(self.low)}-{format_number(self.high)})"


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and its bound."""

    what: str
    value: float
    bound: float
    sense: Literal[">=", "<="]

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.sense == ">=" else self.value <= self.bound

    def __str__(self) -> str:
        verdict = "met " if self.met else "MISS"
        return f"{verdict}  {self.what}: {format_number(self.value)} (target {self.sense} {format_number(self.bound)})"


@dataclass(slots=True)
class Report:
    """Tables and targets of one scenario. A quick run is too short to judge by: its targets do not count."""

    scenario: str
    quick: bool = False
    tables: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, str] = field(default_factory=machine.describe)

    def add_table(self, title: str, rows: list[dict[str, object]]) -> None:
        """Keep it, and show it now: the rest may take long."""
        self.tables[title] = rows
        print("\n".join(["", title, *_table(rows)]), flush=True)

    def at_least(self, what: str, value: float, bound: float) -> None:
        self.targets.append(Target(what, value, bound, ">="))

    def at_most(self, what: str, value: float, bound: float) -> None:
        self.targets.append(Target(what, value, bound, "<="))

    def finish(self, results: Path) -> int:
        """Print the verdicts, write `results`/<scenario>.json, return the exit status: 1 when a target was missed."""
        print(self.text())
        results.mkdir(parents=True, exist_ok=True)
        path = results / f"{self.scenario}{'.quick' if self.quick else ''}.json"
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n")
        print(f"\nwritten to {path}")
        return int(not self.quick and not all(target.met for target in self.targets))

    def text(self) -> str:
        lines = [f"{self.scenario}{' (quick: too short to judge by)' if self.quick else ''}"]
        lines += [f"  {name}: {value}" for name, value in self.machine.items()]
        return "\n".join([*lines, "", *self.notes, *map(str, self.targets)])

    def to_json(self) -> dict[str, object]:
        return {
            "scenario": self.scenario,
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self.machine,
            "tables": {title: [_plain(row) for row in rows] for title, rows in self.tables.items()},
            "targets": [{**asdict(target), "met": target.met} for target in self.targets],
            "notes": self.notes,
        }


def _table(rows: Sequence[dict[str, object]]) -> list[str]:
    heads = [*dict.fromkeys(name for row in rows for name in row)]  # some rows may tell more
    cells = [heads, *([_cell(row.get(head, "")) for head in heads] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def _cell(value: object) -> str:
    return format_number(value) if isinstance(value, float) else str(value)


def _plain(row: dict[str, object]) -> dict[str, object]:
    return {name: asdict(value) if isinstance(value, Spread) else value for name, value in row.items()}


def format_number(value: float) -> str:
    """Three significant digits, thousands marked."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
