"""Renders the results of a benchmark: tables for a terminal and as Markdown, JSON, and one HTML page."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from gateway.table import table
from labs.bench.benchmark import Result, knee
from labs.bench.records import Record
from labs.bench.scenario import Scenario
from labs.bench.summary import BIN_SECONDS, Figures, Latency
from labs.simulation.metrics import NOTHING, escaped, format_duration, format_number, format_percent
from labs.simulation.page import document, table_row, wide_table
from labs.simulation.search.sweep import KNEE_GOODPUT
from quotas.policy.units import counted

MAX_TENANTS = 20  # in a table, those with most requests
CHART_WIDTH, CHART_HEIGHT, CHART_MARGIN = 720, 180, 28
COLOURS = ("#2f6fb0", "#b4552d", "#3b8f5a", "#8a5fb0")

Rows = list[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Section:
    """A table; its first row has the headings."""

    title: str
    rows: Rows


def facts(url: str, scenario: Scenario, models: Iterable[str]) -> str:
    """A line that describes the benchmark."""
    tenants = counted(len(scenario.tenants), "tenant")
    workloads = ", ".join(dict.fromkeys(tenant.workload for tenant in scenario.tenants.values()))
    warm_up = f" after {format_duration(scenario.warm_up)}" if scenario.warm_up else ""
    model = ", ".join(dict.fromkeys(models))
    return f"{url} · {model} · {tenants} · {workloads} · arrivals for {format_duration(scenario.seconds)}{warm_up}"


def sections(results: Sequence[Result], beside: Sequence[Record] = ()) -> list[Section]:
    """Return the tables of a benchmark: of its last result, or of a sweep's loads before it; `beside` are others'."""
    result = results[-1]
    parts = [_sweep(results)] if len(results) > 1 else []
    shown = knee(list(results)) or results[0] if len(results) > 1 else result
    at = f" at {shown.load:g} times the pace" if len(results) > 1 else ""
    figures = [shown.summary.all, *_largest(shown.summary.tenants)]
    parts += [Section(f"Requests{at}", _requests(figures)), Section(f"Latencies{at}", _latencies(figures))]
    if beside:
        parts.append(Section("Latencies beside other tools'", _beside(figures[0], beside)))
    refusals = _codes(figures[0])
    if refusals:
        parts.append(Section(f"Refusals and failures{at}", refusals))
    if len(shown.summary.tenants) > 1:
        parts.append(Section(f"Shares{at}", _shares(shown)))
    if shown.settlements:
        parts.append(Section(f"Settlement{at}", _settlement(shown)))
    parts.append(Section(f"The generator{at}", _generator(shown)))
    return parts


def as_text(parts: Iterable[Section]) -> str:
    """Render tables for a terminal."""
    tables = (f"{part.title}\n{table(part.rows[0], part.rows[1:], frozenset(part.rows[0][1:]))}" for part in parts)
    return "\n".join(tables).rstrip()


def as_markdown(title: str, said: str, doubts: Sequence[str], parts: Iterable[Section]) -> str:
    lines = [f"# {title}", "", said, ""]
    lines += [f"- {doubt}" for doubt in doubts] + ([""] if doubts else [])
    for part in parts:
        head, *rows = ["|".join(["", *(cell.replace("|", "\\|") for cell in cells), ""]) for cells in part.rows]
        lines += [f"## {part.title}", "", head, "|-" + "|-:" * (len(part.rows[0]) - 1) + "|", *rows, ""]
    return "\n".join(lines)


def as_json(said: Mapping[str, object], results: Sequence[Result]) -> str:
    """Render JSON. Durations are in seconds, shares in [0, 1]; numbers that were not measured are null."""
    best = knee(list(results)) if len(results) > 1 else None
    return json.dumps(
        {**said, "knee": best and best.load, "results": [asdict(result) for result in results]},
        indent=1,
        allow_nan=False,
    )


def as_page(title: str, said: str, doubts: Sequence[str], parts: Iterable[Section], results: Sequence[Result]) -> str:
    tables = "".join(
        wide_table(part.title, part.rows[0], [table_row(cells) for cells in part.rows[1:]]) for part in parts
    )
    return document(title, said, doubts, _charts(results) + tables)


def _largest(tenants: Sequence[Figures]) -> list[Figures]:
    if len(tenants) == 1:
        return []
    return sorted(tenants, key=lambda figures: (-figures.offered, figures.name))[:MAX_TENANTS]


def _sweep(results: Sequence[Result]) -> Section:
    heading = ("load", "requests/s", "good", "good/s", "tokens/s", "TTFT p50", "p99", "per token p50", "p99")
    rows: Rows = [heading]
    for result in results:
        every = result.summary.all
        rows.append(
            (
                f"{result.load:g}",
                format_number(every.request_rate),
                format_percent(every.goodput),
                format_number(every.good_rate),
                format_number(every.output_rate),
                *(_duration(value) for value in (every.ttft.p50, every.ttft.p99)),
                *(_duration(value) for value in (every.per_token.p50, every.per_token.p99)),
            )
        )
    best = knee(list(results))
    found = f"{best.load:g}" if best else "below all"
    return Section(f"By load; the knee, the largest with {format_percent(KNEE_GOODPUT)} good: {found}", rows)


def _requests(figures: Sequence[Figures]) -> Rows:
    columns: dict[str, Callable[[Figures], str]] = {
        "": lambda one: one.name,
        "offered": lambda one: format_number(one.offered),
        "answered": lambda one: format_number(one.answered),
        "refused": lambda one: format_number(sum(one.refusals.values())),
        "failed": lambda one: format_number(sum(one.failures.values())),
        "left": lambda one: format_number(one.left),
        "unfinished": lambda one: format_number(one.unfinished),
        "retries": lambda one: format_number(one.retries),
        "good": lambda one: format_percent(one.goodput),
        "good/s": lambda one: format_number(one.good_rate),
        "right": lambda one: format_percent(one.right / one.judged) if one.judged else NOTHING,
        "prompt tokens": lambda one: format_number(one.prompt_tokens),
        "cached": lambda one: format_percent(one.cached_tokens / max(1, one.prompt_tokens)),
        "output tokens": lambda one: format_number(one.output_tokens),
        "output tokens/s": lambda one: format_number(one.output_rate),
    }
    return [list(columns), *([show(one) for show in columns.values()] for one in figures)]


def _latencies(figures: Sequence[Figures]) -> Rows:
    rows: Rows = [("", "mean", "p50", "p95", "p99", "count")]
    for one in figures:
        named = (
            ("TTFT", one.ttft),
            ("between chunks", one.between),
            ("per token", one.per_token),
            ("end to end", one.total),
        )
        rows += [(f"{one.name}: {what}", *_latency(latency)) for what, latency in named]
    return rows


def _beside(every: Figures, records: Sequence[Record]) -> Rows:
    rows: Rows = [("", "mean", "p50", "p95", "p99", "count")]
    for one in (Record("sluice bench", every.ttft, every.per_token, every.total), *records):
        named = (("TTFT", one.ttft), ("per token", one.per_token), ("end to end", one.total))
        rows += [(f"{one.tool}: {what}", *_latency(latency)) for what, latency in named]
    return rows


def _latency(latency: Latency) -> Iterable[str]:
    yield from (_duration(value) for value in (latency.mean, latency.p50, latency.p95, latency.p99))
    yield format_number(latency.count)


def _codes(every: Figures) -> Rows:
    named = [*every.refusals.items(), *every.failures.items()]
    return [("code", "requests"), *((code, format_number(number)) for code, number in named)] if named else []


def _shares(result: Result) -> Rows:
    rows: Rows = [("tenant", "weight", "share by weight", "share of the tokens while all waited")]
    for one in _largest(result.summary.tenants):
        shares = (one.fair_share, one.token_share)
        rows.append((one.name, format_number(one.weight), *(_percent(share) for share in shares)))
    gap = result.summary.gap_tokens
    rows.append(("largest gap, tokens by weight", "", "", NOTHING if gap is None else format_number(gap)))
    return rows


def _settlement(result: Result) -> Rows:
    rows: Rows = [("tenant", "tokens told", "tokens charged", "difference", "streams cut")]
    for one in result.settlements:
        figures = (one.told, one.charged, one.charged - one.told, one.num_cut)
        rows.append((one.tenant, *(f"{figure:,}" for figure in figures)))
    return rows


def _generator(result: Result) -> Rows:
    summary = result.summary
    rows: Rows = [
        ("", "figure"),
        ("of one core", format_percent(summary.cpu_share)),
        ("requests in flight, at most", format_number(summary.peak_in_flight)),
        ("sent late, p99", _duration(summary.sent_late.p99)),
    ]
    if summary.fault_at is not None:
        after = "never" if summary.recovered_after is None else format_duration(summary.recovered_after)
        rows += [("the fault, at", format_duration(summary.fault_at)), ("recovered after", after)]
    return rows


def _duration(seconds: float | None) -> str:
    return NOTHING if seconds is None else format_duration(seconds)


def _percent(share: float | None) -> str:
    return NOTHING if share is None else format_percent(share)


def _charts(results: Sequence[Result]) -> str:
    if len(results) > 1:
        points = [(result.summary.all.request_rate, result.summary.all.good_rate) for result in results]
        offered = [(rate, rate) for rate, _ in points]
        return _chart("Good requests a second by those that come", "a second", {"good": points, "offered": offered})
    course = results[-1].summary.course
    moments = [BIN_SECONDS * place for place in range(len(course.offered))]
    requests = {
        "offered": list(zip(moments, map(float, course.offered), strict=True)),
        "good": list(zip(moments, map(float, course.good), strict=True)),
    }
    tokens = {"tokens": list(zip(moments, course.output_tokens, strict=True))}
    return _chart("Requests in each second", "s", requests) + _chart("Output tokens in each second", "s", tokens)


def _chart(title: str, unit: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw lines over one axis each way, from 0; `unit` is the horizontal one's."""
    right = max((x for line in lines.values() for x, _ in line), default=0) or 1
    top = max((y for line in lines.values() for _, y in line), default=0) or 1
    width, height = CHART_WIDTH - 2 * CHART_MARGIN, CHART_HEIGHT - 2 * CHART_MARGIN
    drawn, legend = [], []
    for (name, line), colour in zip(lines.items(), COLOURS, strict=False):
        points = " ".join(
            f"{CHART_MARGIN + width * x / right:.1f},{CHART_HEIGHT - CHART_MARGIN - height * y / top:.1f}"
            for x, y in line
        )
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        legend.append(f'<tspan fill="{colour}">{escaped(name)} </tspan>')
    label = 'font-size="12" fill="currentColor"'
    bottom = CHART_HEIGHT - CHART_MARGIN
    axes = f"M{CHART_MARGIN} {CHART_MARGIN}V{bottom}H{CHART_WIDTH - CHART_MARGIN}"
    scale = f"0 to {right:.4g} {unit}, highest {top:.4g}"
    return (
        f'<svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}" style="display:block;max-width:{CHART_WIDTH}px" '
        f'role="img" aria-label="{escaped(title)}">'
        f'<path d="{axes}" fill="none" stroke="currentColor" opacity="0.4"/>{"".join(drawn)}'
        f'<text x="{CHART_MARGIN}" y="16" {label}>{escaped(title)}: {"".join(legend)}</text>'
        f'<text x="{CHART_MARGIN}" y="{CHART_HEIGHT - 8}" {label}>{scale}</text></svg>\n'
    )
