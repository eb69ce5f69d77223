"""Draws charts as SVG for a page that has the style sheet of `page`: colours come from its variables."""

from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor, log10

from labs.simulation.charts import Axis, Bars, Chart, Lines, Point
from labs.simulation.metrics import NOTHING, escaped
from labs.simulation.summary import Spread


def linear_ticks(high: float, most: int = 5) -> list[float]:
    """Returns ticks from 0 to at least `high`, `most` steps at most, each 1, 2 or 5 times a power of ten."""
    if high <= 0:
        return [0.0, 1.0]
    power = 10.0 ** floor(log10(high / most))
    step = next(power * unit for unit in (1, 2, 5, 10, 20) if power * unit * most >= high)
    return [step * n for n in range(ceil(round(high / step, 9)) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns the powers of ten within [low, high]; 1, 2 and 5 times them when those are few; at least one."""
    decades = [10.0**n for n in range(floor(log10(low)), ceil(log10(high)) + 1)]
    whole = [tick for tick in decades if low <= tick <= high]
    if len(whole) >= 3:
        return whole
    return [tick for decade in decades for tick in _within(decade, low, high)] or [low]


def _within(decade: float, low: float, high: float) -> Iterator[float]:
    return (decade * unit for unit in (1, 2, 5) if low <= decade * unit <= high)


WIDTH = 540
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 10, 44
_PLOT_HEIGHT = 210
_BAR, _BAR_GAP, _GROUP_GAP, _LABEL_HEIGHT = 15, 3, 12, 17

Scale = Callable[[float], float]


def svg(chart: Chart) -> str:
    """Draws a chart as one `<svg>` element. Names in it are escaped."""
    return _lines(chart) if isinstance(chart, Lines) else _bars(chart)


def _element(height: float, label: str, parts: Sequence[str]) -> str:
    """Returns an element that scales with its column, its text included."""
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escaped(label)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "tick") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escaped(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


# lines


def _lines(chart: Lines) -> str:
    points = [point for curve in chart.curves for point in curve]
    if not points:
        return _element(60, chart.title, [_text(WIDTH / 2, 34, "nothing to show", "middle")])
    bottom, right = _TOP + _PLOT_HEIGHT, WIDTH - _RIGHT
    x_ticks, x = _scale(chart.x, [x for x, _ in points], _LEFT, right)
    y_ticks, y = _scale(chart.y, [y for _, y in points], bottom, _TOP)
    parts = [_line(_LEFT, y(tick), right, y(tick), "grid") for tick in y_ticks]
    parts += [_text(_LEFT - 8, y(tick) + 4, chart.y.show(tick), "end") for tick in y_ticks]
    parts += [_text(x(tick), bottom + 18, chart.x.show(tick), "middle") for tick in x_ticks]
    parts += [_line(x(tick), bottom, x(tick), bottom + 4, "axis") for tick in x_ticks]
    parts += [_line(_LEFT, bottom, right, bottom, "axis"), _text(right, bottom + 36, chart.x.label, "end", "label")]
    for policy, curve in reversed(list(enumerate(chart.curves))):
        parts.append(f'<path d="{_path(curve, chart, x, y)}" class="curve p{policy}"/>')
    return _element(_TOP + _PLOT_HEIGHT + _BOTTOM, chart.title, parts)


def _path(curve: Sequence[Point], chart: Lines, x: Scale, y: Scale) -> str:
    places = [f"{x(a / chart.x.divisor):.1f} {y(b / chart.y.divisor):.1f}" for a, b in curve]
    return "M" + " L".join(places) if places else ""


def _scale(axis: Axis, values: Sequence[float], start: float, end: float) -> tuple[list[float], Scale]:
    """Returns the ticks, and a function from a value to its place between `start` and `end`, both in the
    label's units.
    """
    if axis.log:
        low, high = max(min(values), 1e-6), max(*values, 2e-6)
        ticks = log_ticks(low, high)
        low, high = min(low, ticks[0]), max(high, ticks[-1], 1.01 * low)
        return ticks, lambda value: start + (end - start) * log10(max(value, low) / low) / log10(high / low)
    high = max(values) / axis.divisor or 1.0
    ticks = linear_ticks(high)
    if axis.closed:
        high = ticks[-1]
    return [tick for tick in ticks if tick <= high], lambda value: start + (end - start) * value / high


# bars


def _bars(chart: Bars) -> str:
    known = [bar.high for group in chart.bars for bar in group if bar is not None]
    longest = max([*known, *(mark for mark in chart.marks if mark is not None)], default=0.0) or 1.0
    plot = WIDTH - 150

    def x(value: float) -> float:
        return plot * value / longest

    parts: list[str] = []
    y = 4.0
    for label, group, mark in zip(chart.groups, chart.bars, chart.marks, strict=True):
        parts.append(_text(0, y + 12, shortened(label), kind="group"))
        y += _LABEL_HEIGHT
        top, figures = y, []
        for policy, bar in enumerate(group):
            if bar is None:
                parts.append(_text(4, y + 12, NOTHING))
            else:
                parts += _bar(x, y, policy, bar)
                figures.append(_text(x(max(bar.median, bar.high)) + 7, y + 12, chart.show(bar.median), kind="value"))
            y += _BAR + _BAR_GAP
        if mark is not None:
            parts.append(_line(x(mark), top - 2, x(mark), y - _BAR_GAP + 2, "mark"))
        parts += figures
        y += _GROUP_GAP
    return _element(y, chart.title, parts)


def _bar(x: Scale, y: float, policy: int, bar: Spread) -> list[str]:
    width, low, high = max(1.0, x(bar.median)), x(bar.low), x(bar.high)
    parts = [f'<rect x="0" y="{y:.1f}" width="{width:.1f}" height="{_BAR}" rx="2" class="bar p{policy}"/>']
    if high - low > 2:
        parts.append(_line(low, y + _BAR / 2, high, y + _BAR / 2, "whisker"))
    return parts


def shortened(label: str, most: int = 60) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"
