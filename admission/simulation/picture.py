"""A comparison as a PNG, drawn by matplotlib (the extra `plots`)."""

from collections.abc import Sequence
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any
from warnings import catch_warnings, filterwarnings

from admission.simulation.charts import Bars, Lines, charts
from admission.simulation.errors import SimulationError
from admission.simulation.metrics import escape_controls
from admission.simulation.study import Results
from admission.simulation.svg import linear_ticks, log_ticks, shortened

_COLOURS = ("#2a6fdb", "#d9662b", "#1c8a6a", "#9457b8")
_INK, _SOFT, _RULE = "#1b1b19", "#66665f", "#e4e3de"
_COLUMNS = 2


def require() -> None:
    """Raises `SimulationError` when matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise SimulationError("a PNG needs matplotlib: install the extra with `pip install 'sluice[plots]'`")


def save(results: Results, title: str, facts: str, path: Path) -> None:
    """Raises `SimulationError` when matplotlib is not installed."""
    require()
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to import

    drawn = charts(results)
    rows = [drawn[n : n + _COLUMNS] for n in range(0, len(drawn), _COLUMNS)]
    heights = [max(_height(chart) for chart in row) for row in rows]
    figure = Figure(figsize=(13, sum(heights) + 1.5), dpi=110, layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(1.2, sum(heights)))
    head, body = parts
    head.text(0.02, 0.72, _plain(shortened(title, 84)), fontsize=17, fontweight="bold", color=_INK)
    head.text(0.02, 0.64, fill(_plain(facts), 160), fontsize=10, color=_SOFT, va="top")
    _key(head, results.names)
    axes = body.subplots(ceil(len(drawn) / _COLUMNS), _COLUMNS, squeeze=False, height_ratios=heights)
    for place, chart in zip(axes.flat, drawn, strict=False):
        place.set_title(f"{chart.title}\n", loc="left", fontsize=12, fontweight="bold", color=_INK)
        place.text(0, 1.02, chart.note, transform=place.transAxes, fontsize=9, color=_SOFT)
        _draw_lines(place, chart) if isinstance(chart, Lines) else _draw_bars(place, chart)
    for place in axes.flat[len(drawn) :]:
        place.set_axis_off()
    with catch_warnings():
        filterwarnings("ignore", "Glyph .* missing")  # a name in a script that the font lacks
        figure.savefig(path, facecolor="white")


def _key(head: Any, names: Sequence[str]) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415 - as above

    labels = [_plain(shortened(name, 128 // len(names))) for name in names]
    patches = [Patch(color=colour, label=label) for label, colour in zip(labels, _COLOURS, strict=False)]
    head.legend(handles=patches, loc="lower left", bbox_to_anchor=(0.012, 0.0), ncols=4, frameon=False, fontsize=11)


def _height(chart: Lines | Bars) -> float:
    """Inches."""
    if isinstance(chart, Lines):
        return 3.2
    return 1.0 + sum(0.24 * len(group) + 0.2 for group in chart.bars)


def _draw_lines(axes: Any, chart: Lines) -> None:
    for curve, colour in reversed(list(zip(chart.curves, _COLOURS, strict=False))):
        axes.plot([x / chart.x.divisor for x, _ in curve], [y / chart.y.divisor for _, y in curve], color=colour)
    points = [point for curve in chart.curves for point in curve]
    if not points:
        return
    if chart.x.log:
        axes.set_xscale("log")
        axes.minorticks_off()
        low, high = min(x for x, _ in points), max(x for x, _ in points)
        axes.set_xticks(log_ticks(low, high))
    else:
        axes.set_xlim(0, max(x for x, _ in points) / chart.x.divisor)
    ticks = linear_ticks(max(y for _, y in points) / chart.y.divisor)
    axes.set_yticks(ticks)
    axes.set_ylim(0, ticks[-1])
    axes.xaxis.set_major_formatter(lambda value, _: chart.x.show(value))
    axes.yaxis.set_major_formatter(lambda value, _: chart.y.show(value))
    axes.set_xlabel(chart.x.label, loc="right", color=_SOFT, fontsize=9)
    axes.grid(axis="y", color=_RULE)
    axes.tick_params(colors=_SOFT, labelsize=9, length=3)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_bars(axes: Any, chart: Bars) -> None:
    place, labels = 0.0, []
    longest = max((bar.high for group in chart.bars for bar in group if bar is not None), default=1.0) or 1.0
    for label, group, mark in zip(chart.groups, chart.bars, chart.marks, strict=True):
        top = place
        if mark is not None:
            axes.plot([mark, mark], [top - 0.55, top + len(group) - 0.45], color=_INK, linewidth=2)
        for bar, colour in zip(group, _COLOURS, strict=False):
            if bar is not None:
                axes.barh(place, bar.median, height=0.8, color=colour)
                axes.plot([bar.low, bar.high], [place, place], color=_INK, alpha=0.55, linewidth=1.5)
                axes.text(max(bar.median, bar.high) + 0.012 * longest, place, chart.show(bar.median),
                          va="center", fontsize=9, color=_INK,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8}, zorder=3)  # fmt: skip
            place += 1
        labels.append(((top + place - 1) / 2, _plain(shortened(label, 28))))
        place += 0.8
    axes.set_ylim(place - 0.9, -0.9)
    axes.set_xlim(0, 1.16 * max(longest, *(mark or 0.0 for mark in chart.marks), 0.0))
    axes.set_yticks([place for place, _ in labels], [label for _, label in labels])
    axes.set_xticks([])
    axes.tick_params(colors=_INK, labelsize=10, length=0)
    axes.spines[:].set_visible(False)


def _plain(text: str) -> str:
    """A dollar sign would begin a formula."""
    return escape_controls(text).replace("$", r"\$")
