"""The printed quantities of a run, a row each, with their formats."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from labs.simulation.summary import ClassSummary, Spread, Summary, TenantSummary

NOTHING = "\N{EN DASH}"  # an unmeasured quantity


@dataclass(frozen=True, slots=True)
class RunMetric:
    """One quantity of a run, and how a person reads it."""

    label: str
    get: Callable[[Summary], float | None]
    show: Callable[[float], str]


def escape_controls(text: str) -> str:
    """The text with control characters, which a tenant's name may hold, escaped."""
    return text if text.isprintable() else repr(text)[1:-1]


def escaped(text: str) -> str:
    """Escapes a text for HTML and SVG, inside elements and quoted attributes."""
    return escape(escape_controls(text))


def format_percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def format_duration(seconds: float) -> str:
    if 0 < seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms" if seconds < 0.09995 else f"{1000 * seconds:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def format_money(value: float) -> str:
    return f"{value:,.2f}" if value >= 0.01 or value == 0 else f"{value:.2g}"


def format_ratio(value: float) -> str:
    return f"{value:.3f}"


def with_spread(metric: RunMetric, value: Spread | None) -> str:
    """Writes the median, and the range over seeds if it is visible."""
    if value is None:
        return NOTHING
    shown = metric.show(value.median)
    low, high = metric.show(value.low), metric.show(value.high)
    return shown if low == high else f"{shown} ({_without_unit(low, high)} to {high})"


def _without_unit(low: str, high: str) -> str:
    figure, _, unit = low.partition(" ")
    return figure if unit and high.endswith(f" {unit}") else low


GROUPS: dict[str, tuple[RunMetric, ...]] = {
    "requests": (
        RunMetric("goodput", lambda s: s.goodput, format_percent),
        RunMetric("good requests a second", lambda s: s.good_rate, format_number),
        RunMetric("offered", lambda s: s.offered, format_number),
        RunMetric("completed", lambda s: s.completed, format_number),
        RunMetric("refused", lambda s: sum(s.refusals.values()), format_number),
        RunMetric("expired", lambda s: s.given_up, format_number),
        RunMetric("left waiting", lambda s: s.left, format_number),
        RunMetric("ended for lack of memory", lambda s: s.lost, format_number),
    ),
    "first token": (
        RunMetric("median", lambda s: s.first_token.p50, format_duration),
        RunMetric("p90", lambda s: s.first_token.p90, format_duration),
        RunMetric("p95", lambda s: s.first_token.p95, format_duration),
        RunMetric("p99", lambda s: s.first_token.p99, format_duration),
    ),
    "between tokens": (
        RunMetric("median", lambda s: s.interval.p50, format_duration),
        RunMetric("p90", lambda s: s.interval.p90, format_duration),
        RunMetric("p95", lambda s: s.interval.p95, format_duration),
        RunMetric("p99", lambda s: s.interval.p99, format_duration),
    ),
    "whole request": (
        RunMetric("median", lambda s: s.duration.p50, format_duration),
        RunMetric("p95", lambda s: s.duration.p95, format_duration),
        RunMetric("p99", lambda s: s.duration.p99, format_duration),
    ),
    "queue": (
        RunMetric("longest", lambda s: max(s.depth.values, default=None), format_number),
        RunMetric("oldest", lambda s: max(s.age.values, default=None), format_duration),
    ),
    "tenants": (
        RunMetric("service gap, tokens", lambda s: s.gap_tokens, format_number),
        RunMetric("service gap, engine time", lambda s: s.gap_seconds, format_duration),
        RunMetric("Jain index while waiting", lambda s: s.jain, format_ratio),
    ),
    "machine": (
        RunMetric("prompt tokens a second", lambda s: s.prompt_rate, format_number),
        RunMetric("output tokens a second", lambda s: s.output_rate, format_number),
        RunMetric("good output tokens a second", lambda s: s.good_output_rate, format_number),
        RunMetric("prompt tokens cached", lambda s: s.hit_rate, format_percent),
        RunMetric("cached blocks evicted", lambda s: s.evictions, format_number),
        RunMetric("device busy", lambda s: s.busy, format_percent),
        RunMetric("prompts, of the busy time", lambda s: s.prefill_share, format_percent),
        RunMetric("answers, of the busy time", lambda s: 1 - s.prefill_share if s.busy else None, format_percent),
        RunMetric("preemptions", lambda s: s.preemptions, format_number),
        RunMetric("tokens recomputed", lambda s: s.recomputed_tokens, format_number),
        RunMetric("padding, of computed tokens", lambda s: s.padding, format_percent),
        RunMetric("steps", lambda s: s.steps, format_number),
        RunMetric("simulated time", lambda s: s.seconds, format_duration),
    ),
}


def groups(reasons: Iterable[str], currencies: Iterable[str] = ()) -> dict[str, tuple[RunMetric, ...]]:
    """Returns all quantities by group, with a row for each of the `reasons` of refusals and for each currency."""
    spend = tuple(RunMetric(currency, _spent_in(currency), format_money) for currency in currencies)
    named = [RunMetric(f"refused: {reason}", _refused_for(reason), format_number) for reason in reasons]
    after = next(place for place, metric in enumerate(GROUPS["requests"], 1) if metric.label == "refused")
    requests = GROUPS["requests"]
    return GROUPS | {"requests": (*requests[:after], *named, *requests[after:])} | ({"spend": spend} if spend else {})


def _spent_in(currency: str) -> Callable[[Summary], float]:
    return lambda summary: summary.spend.get(currency, 0.0)


def _refused_for(reason: str) -> Callable[[Summary], float]:
    return lambda summary: summary.refusals.get(reason, 0)


def _or_dash(value: float | None) -> str:
    return NOTHING if value is None else format_duration(value)


TENANT_COLUMNS: dict[str, Callable[[TenantSummary], str]] = {
    "tenant": lambda t: t.name,
    "weight": lambda t: format_number(t.weight),
    "offered": lambda t: format_number(t.offered),
    "completed": lambda t: format_number(t.completed),
    "refused": lambda t: format_number(t.refused),
    "goodput": lambda t: format_percent(t.goodput),
    "engine time": lambda t: format_percent(t.time_share),
    "tokens": lambda t: format_percent(t.service_share),
    "had work waiting": lambda t: format_percent(t.backlogged_share),
    "first token p50": lambda t: _or_dash(t.first_token.p50),
    "p99": lambda t: _or_dash(t.first_token.p99),
}

CLASS_COLUMNS: dict[str, Callable[[ClassSummary], str]] = {
    "class": lambda c: c.name,
    "offered": lambda c: format_number(c.offered),
    "completed": lambda c: format_number(c.completed),
    "refused": lambda c: format_number(c.refused),
    "goodput": lambda c: format_percent(c.goodput),
    "first token p50": lambda c: _or_dash(c.first_token.p50),
    "p99": lambda c: _or_dash(c.first_token.p99),
}


def tenant_rows(tenants: Sequence[TenantSummary]) -> list[list[str]]:
    """Returns the headings, then a row for each tenant; with what it found cached and its spend, where any has some."""
    columns = dict(TENANT_COLUMNS)
    if any(tenant.hit_rate for tenant in tenants):
        columns["prompt cached"] = lambda t: format_percent(t.hit_rate)
    if any(tenant.spend is not None for tenant in tenants):
        columns["spend"] = lambda t: NOTHING if t.spend is None else f"{format_money(t.spend)} {t.currency}"
    return [list(columns), *([show(tenant) for show in columns.values()] for tenant in tenants)]


def class_rows(classes: Sequence[ClassSummary]) -> list[list[str]]:
    """Returns the headings, then a row for each class."""
    return [list(CLASS_COLUMNS), *([show(level) for show in CLASS_COLUMNS.values()] for level in classes)]
