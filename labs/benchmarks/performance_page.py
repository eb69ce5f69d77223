"""Writes docs/performance.md from the results: `python -m labs.benchmarks.performance_page`.

Each figure has its bound, and each result its command, date, commit, machine and load. Misses come first and none is
left out. `tests/labs/benchmarks/test_performance_page.py` holds the page to the results.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from labs.benchmarks.report import RESULTS, format_number

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
SHOWN_MET = 8  # targets met that a result shows; its file has all
SCRIPTS = {  # results of programs that are no benchmark by their name
    "agent_clients": "scripts/check_agents.py",
    "embedding_vectors": "scripts/check_embeddings.py",
    "fault_guards": "python -m labs.faults.suite --without-guard",
    "faults": "python -m labs.faults.suite",
    "fleet": "scripts/check_fleet.py",
    "fuzz": "python -m scripts.fuzz_requests",
    "models": "scripts/check_models.py",
    "ray": "scripts/check_ray.py",
    "soak": "python -m scripts.soak",
}
HEAD = """\
# Performance: what was measured, misses first

This page is written by `python -m labs.benchmarks.performance_page` from the files of
[labs/benchmarks/results](../labs/benchmarks/results), and a test fails where it differs from them. A target is a bound
that a benchmark judges by; most are ratios of two things measured side by side in one run, which hold on other machines
as well. What each benchmark does is in [its list](../labs/benchmarks/README.md); what published schedulers claim, in
[claims](claims.md). A result of an older commit was not measured again since; `-dirty` means that the checkout had
changes of its own.
"""


def page(results: Path = RESULTS) -> str:
    """Return the page's Markdown."""
    kept = sorted({*results.glob("*.json")} - {*results.glob("*.quick.json")})
    reports = {path.stem: json.loads(path.read_text()) for path in kept}
    reports = {name: report for name, report in reports.items() if "targets" in report}
    visits = {path.stem: json.loads(path.read_text()) for path in sorted((results / "gpu").glob("*.json"))}
    visits = {name: visit for name, visit in visits.items() if "acceptance" in visit}
    return "\n".join([HEAD, *_missed(reports), *_on_gpus(visits), *_all(reports)]).rstrip() + "\n"


def _missed(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    judged = [target for report in reports.values() for target in report["targets"]]
    missed = sum(not target["met"] for target in judged)
    yield f"## Missed: {missed} of {len(judged)} targets\n"
    yield "| result | figure | measured | bound |\n|---|---|---|---|"
    for name, report in reports.items():
        for target in report["targets"]:
            if not target["met"]:
                yield f"| [{name}](#{name}) | {_cells(target)} |"
    yield ""


def _on_gpus(visits: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, visit in reversed([*visits.items()]):
        yield f"## {visit['device']}, {visit['date'][:10]}\n"
        made = f"torch {visit['torch']}, triton {visit['triton']}"
        yield f"`{visit['command']}`, {made}; figures: `results/gpu/{name}.json`.\n"
        yield "| row | claim | verdict | targets judged | missed |\n|---|---|---|---|---|"
        for row in visit["acceptance"]:
            yield f"| {row['row']} | {row['claim']} | {row['said']} | {row['judged']} | {row['missed']} |"
        yield ""


def _all(reports: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "## Every result\n"
    for name, report in reports.items():
        targets = sorted(report["targets"], key=lambda target: bool(target["met"]))
        missed = sum(not target["met"] for target in targets)
        machine = report["machine"]
        core = f", core {machine['core']}" if "core" in machine else ""
        yield f"### {name}\n"
        command = SCRIPTS.get(name) or f"python -m labs.benchmarks.{report['scenario']}"
        yield (
            f"`{command}`, {report['measured_at'][:10]}, commit "
            f"{machine['commit']}, {machine['cpu']}{core}, load {machine['load average']}: {len(targets) - missed} of "
            f"{len(targets)} met.\n"
        )
        yield from _table(targets, missed + SHOWN_MET)


def _table(targets: Sequence[Mapping[str, Any]], most: int) -> Iterator[str]:
    yield "| figure | measured | bound | |\n|---|---|---|---|"
    for target in targets[:most]:
        yield f"| {_cells(target)} | {'met' if target['met'] else '**missed**'} |"
    if len(targets) > most:
        yield f"\nand {len(targets) - most} more that are met."
    yield ""


def _cells(target: Mapping[str, Any]) -> str:
    bound = f"{'≥' if target['sense'] == '>=' else '≤'} {format_number(target['bound'])}"
    return f"{target['what'].replace('|', '&#124;')} | {format_number(target['value'])} | {bound}"


if __name__ == "__main__":
    PAGE.write_text(page())
