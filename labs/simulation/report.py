"""Renders a comparison as text for a terminal, and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from gateway.table import flush_left, flush_right, width
from labs.simulation.metrics import RunMetric, class_rows, escape_controls, groups, tenant_rows, with_spread
from labs.simulation.search.sweep import Sweep, sweep_rows
from labs.simulation.study import Results
from labs.simulation.summary import spread


def to_json(results: Results, facts: dict[str, object]) -> str:
    """Renders JSON. Durations are in seconds, shares in [0, 1]; numbers that were not measured are null."""
    return _json(facts | _facts(results) | {"policies": _policies(results)})


def sweep_json(sweep: Sweep, facts: dict[str, object]) -> str:
    """Renders the JSON of a sweep: that of a comparison for each load, and each policy's knee."""
    loads = [
        {"load": load, "requests_per_second": load * sweep.capacity, "policies": _policies(results)}
        for load, results in zip(sweep.loads, sweep.results, strict=True)
    ]
    knees = {name: sweep.knee(policy) for policy, name in enumerate(sweep.names)}
    return _json(facts | _facts(sweep.results[0]) | {"knees": knees, "loads": loads})


def _facts(results: Results) -> dict[str, object]:
    good = results.study.judged_by  # null: each policy's own targets
    return {"device": results.study.device.name, "objective": good and asdict(good)}


def _policies(results: Results) -> list[dict[str, object]]:
    return [
        {
            "name": policy.name,
            "core": asdict(policy.core),
            "engine": asdict(policy.engine),
            "runs": [asdict(summary) for summary in runs],
        }
        for policy, runs in zip(results.study.policies, results.runs, strict=True)
    ]


def _json(report: dict[str, object]) -> str:
    return json.dumps(report, indent=1, allow_nan=False)


MAX_TABLE_TENANTS = 12


def comparison_table(results: Results) -> str:
    """Renders figures by policy, then each policy's tenants; control characters in names are written out."""
    parts = [_figures(results)]
    for name, runs in zip(results.names, results.runs, strict=True):
        tenants, classes = runs[0].tenants, runs[0].classes
        if len(classes) > 1:
            parts.append(f"classes under {escape_controls(name)}\n{_aligned(class_rows(classes))}")
        if len(tenants) > 1:
            parts.append(f"tenants under {escape_controls(name)}\n{_aligned(tenant_rows(tenants[:MAX_TABLE_TENANTS]))}")
        if len(tenants) > MAX_TABLE_TENANTS:
            parts[-1] += f"\n  and {len(tenants) - MAX_TABLE_TENANTS} more"
    return "\n\n".join(parts)


def sweep_table(sweep: Sweep) -> str:
    """Renders the figures of each load, and the knees."""
    return _aligned(sweep_rows(sweep))


def _figures(results: Results) -> str:
    rows: list[list[str]] = [["", *results.names]]
    for group, metrics in groups(results.refusal_reasons, results.currencies).items():
        rows.append([group])
        rows += [[f"  {metric.label}", *_cells(metric, results)] for metric in metrics]
    return _aligned(rows)


def _cells(metric: RunMetric, results: Results) -> list[str]:
    return [with_spread(metric, spread(runs, metric.get)) for runs in results.runs]


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Aligns the first column to the left, the others to the right."""
    cells = [[escape_controls(cell) for cell in row] for row in rows]
    columns = max(len(row) for row in cells)
    widths = [max((width(row[n]) for row in cells if n < len(row)), default=0) for n in range(columns)]
    lines = []
    for first, *others in cells:
        right = map(flush_right, others, widths[1:])
        lines.append("  ".join([flush_left(first, widths[0]), *right]).rstrip())
    return "\n".join(lines)
