"""The charts of a comparison, as data that the page draws."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from labs.simulation.metrics import format_duration, format_number, format_percent, format_whole_percent
from labs.simulation.recorder import Objective
from labs.simulation.search.sweep import Sweep
from labs.simulation.study import Results
from labs.simulation.summary import CURVE, Spread, Summary, TenantSummary, spread

MOST_TENANTS = 10  # in one chart, those served most

Point = tuple[float, float]
Runs = Sequence[Summary]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis. `show` writes a tick; `divisor` brings values to the unit in the label before ticks are chosen."""

    label: str
    show: Callable[[float], str] = format_number
    divisor: float = 1.0
    log: bool = False
    closed: bool = True  # ends at a tick, not at the largest value


@dataclass(frozen=True, slots=True)
class Lines:
    """A curve for each policy."""

    title: str
    note: str
    x: Axis
    y: Axis
    curves: tuple[tuple[Point, ...], ...]


@dataclass(frozen=True, slots=True)
class Bars:
    """A group of bars for each label, a bar for each policy; a mark where the ideal is."""

    title: str
    note: str
    show: Callable[[float], str]
    groups: tuple[str, ...]
    bars: tuple[tuple[Spread | None, ...], ...]  # [group][policy]
    marks: tuple[float | None, ...]


Chart = Lines | Bars


def charts(results: Results) -> list[Chart]:
    runs = results.runs
    good = f"good: {describe_objective(results.study.judged_by)}"
    drawn: list[Chart] = [
        _outcomes(runs, results.refusal_reasons, good),
        _distribution("Time to first token", "share of offered requests", runs, lambda s: s.first_token_curve),
        _distribution("Time between tokens", "share of tokens", runs, lambda s: s.interval_curve),
        _over_time("Requests waiting", "requests", format_number, runs, lambda s: (s.depth.interval, s.depth.values)),
        _over_time("Age of the oldest waiting", "age", format_duration, runs, lambda s: (s.age.interval, s.age.values)),
    ]
    if any(summary.hit_rate for summaries in runs for summary in summaries):
        drawn.append(_cached(runs))
    if len(_names(runs)) > 1:
        drawn += [*_by_tenant(runs), *_gaps(runs)]
    return drawn


def sweep_charts(sweep: Sweep) -> list[Chart]:
    """Draws what becomes of the requests as the load rises."""
    good = f"good: {describe_objective(sweep.results[0].study.judged_by)}"
    load = Axis("load, of what the device completes when all is there at once", format_number, closed=False)

    def lines(title: str, note: str, y: Axis, get: Callable[[Summary], float | None]) -> Lines:
        return Lines(title, note, load, y, tuple(sweep.curve(policy, get) for policy in range(len(sweep.names))))

    seconds = Axis("seconds", format_duration, log=True)
    return [
        lines("Goodput by load", good, Axis("share", format_whole_percent), lambda s: s.goodput),
        lines("Good requests a second", good, Axis("a second", format_number), lambda s: s.good_rate),
        lines("Time to first token, p95", "of completed requests", seconds, lambda s: s.first_token.p95),
        lines("Time between tokens, p95", "of all tokens", seconds, lambda s: s.interval.p95),
    ]


def describe_objective(objective: Objective | None) -> str:
    """Describes in words when a request counts as good."""
    if objective is None:
        return "as its class is promised by each policy"
    first, later = format_duration(objective.first_token), format_duration(objective.per_token)
    return f"first token within {first}, then {later} a token"


def _outcomes(runs: Sequence[Runs], reasons: Sequence[str], good: str) -> Bars:
    outcomes: dict[str, Callable[[Summary], float]] = {
        "good": lambda s: s.goodput,
        "completed, too slow": lambda s: s.completed / s.offered - s.goodput,
        **{f"refused: {reason}": _refused_for(reason) for reason in reasons},
    }
    if any(s.given_up for summaries in runs for s in summaries):
        outcomes["given up, too late"] = lambda s: s.given_up / s.offered
    if any(s.left for summaries in runs for s in summaries):
        outcomes["left waiting"] = lambda s: s.left / s.offered
    if any(s.lost for summaries in runs for s in summaries):
        outcomes["ended for lack of memory"] = lambda s: s.lost / s.offered
    return _bars("What became of the requests", good, format_percent, runs, outcomes)


def _refused_for(reason: str) -> Callable[[Summary], float]:
    return lambda summary: summary.refusals.get(reason, 0) / summary.offered


def _cached(runs: Sequence[Runs]) -> Bars:
    """Draws what the prefix cache saved: for all, and by tenant where there are several."""
    names = _names(runs)
    quantities: dict[str, Callable[[Summary], float | None]] = {"all": lambda s: s.hit_rate}
    if len(names) > 1:
        quantities |= {name: _of_tenant(name, lambda tenant: tenant.hit_rate) for name in names}
    note = "share of the prompt tokens that were found, and not computed"
    return _bars("Prompt tokens cached", note, format_percent, runs, quantities)


def _distribution(
    title: str, label: str, runs: Sequence[Runs], get: Callable[[Summary], Sequence[float | None]]
) -> Lines:
    curves = tuple(_median_curve([get(summary) for summary in summaries]) for summaries in runs)
    note = f"{label} within a time"
    return Lines(title, note, Axis("time", format_duration, log=True), Axis(label, format_whole_percent), curves)


def _median_curve(curves: Sequence[Sequence[float | None]]) -> tuple[Point, ...]:
    """Returns the median over seeds of each quantile that all of them have."""
    points = []
    for share, values in zip(CURVE, zip(*curves, strict=True), strict=True):
        known = [value for value in values if value is not None]
        if len(known) == len(curves):
            points.append((median(known), share))
    return tuple(points)


def _over_time(
    title: str,
    label: str,
    show: Callable[[float], str],
    runs: Sequence[Runs],
    get: Callable[[Summary], tuple[float, Sequence[float]]],
) -> Lines:
    """Draws the first seed alone, since the peaks of several fall at different times."""
    curves = []
    for summaries in runs:
        interval, values = get(summaries[0])
        curves.append(tuple(((n + 0.5) * interval, value) for n, value in enumerate(values)))
    longest = max((curve[-1][0] for curve in curves if curve), default=0.0)
    note = "largest in each interval" + (", seed 1" if len(runs[0]) > 1 else "")
    return Lines(title, note, _time_axis(longest), Axis(label, show), tuple(curves))


def _time_axis(longest: float) -> Axis:
    for unit, seconds in (("hours", 3600.0), ("minutes", 60.0)):
        if longest > 4 * seconds:
            return Axis(unit, format_number, seconds, closed=False)
    return Axis("seconds", format_number, closed=False)


def _by_tenant(runs: Sequence[Runs]) -> list[Chart]:
    names = _names(runs)[:MOST_TENANTS]
    weights = "weight" if len(runs) == 1 else "weight under the first policy"
    shares = {name: _of_tenant(name, lambda tenant: tenant.time_share) for name in names}
    tails = {name: _of_tenant(name, lambda tenant: tenant.first_token.p99) for name in names}
    goodput = {name: _of_tenant(name, lambda tenant: tenant.goodput) for name in names}
    return [
        _bars("Engine time by tenant", f"share of the busy time; the mark: by {weights}", format_percent, runs, shares,
              marks=_fair_shares(runs, names)),
        _bars("First token by tenant, p99", "", format_duration, runs, tails),
        _bars("Goodput by tenant", "share of its offered requests", format_percent, runs, goodput),
    ]  # fmt: skip


def _of_tenant(name: str, get: Callable[[TenantSummary], float | None]) -> Callable[[Summary], float | None]:
    return lambda summary: next((get(tenant) for tenant in summary.tenants if tenant.name == name), None)


def _names(runs: Sequence[Runs]) -> list[str]:
    """Returns the names of the tenants that were served most, in the order of names."""
    served: dict[str, float] = {}
    for summaries in runs:
        for tenant in summaries[0].tenants:
            served[tenant.name] = max(served.get(tenant.name, 0.0), tenant.service_share)
    most = sorted(served, key=lambda name: (-served[name], name))[:MOST_TENANTS]
    return sorted(most)


def _fair_shares(runs: Sequence[Runs], names: Sequence[str]) -> tuple[float, ...]:
    """Returns the tenants' shares by the weights of the first policy."""
    weights = {tenant.name: tenant.weight for tenant in runs[0][0].tenants}
    total = sum(weights.values())
    return tuple(weights.get(name, 1.0) / total for name in names)


def _gaps(runs: Sequence[Runs]) -> list[Chart]:
    note = "how far two tenants with work waiting drew apart, at most"
    tokens: dict[str, Callable[[Summary], float]] = {"weighted tokens": lambda s: s.gap_tokens}
    seconds: dict[str, Callable[[Summary], float]] = {"engine time": lambda s: s.gap_seconds}
    return [
        _bars("Service gap in tokens", note, format_number, runs, tokens),
        _bars("Service gap in engine time", note, format_duration, runs, seconds),
    ]


def _bars(
    title: str,
    note: str,
    show: Callable[[float], str],
    runs: Sequence[Runs],
    quantities: "dict[str, Callable[[Summary], float | None]] | dict[str, Callable[[Summary], float]]",
    marks: tuple[float | None, ...] = (),
) -> Bars:
    bars = tuple(tuple(spread(summaries, get) for summaries in runs) for get in quantities.values())
    return Bars(title, note, show, tuple(quantities), bars, marks or (None,) * len(bars))
