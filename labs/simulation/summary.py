"""Sums up one simulated run in numbers, and several runs of one policy by their spread."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from backend.scheduler.batch import Counters
from backend.scheduler.sequence import SPARE_CLASS
from gateway.telemetry.metrics.tenants import jain_fairness_index
from labs.simulation.recorder import ClassRecord, Recorder, TenantRecord
from labs.simulation.statistics import quantile
from quotas.policy.policy import SPARE_CLASS_NAME

CURVE = tuple(n / 100 for n in range(1, 101))  # shares at which distributions are drawn
_TAIL = (0.5, 0.9, 0.95, 0.99)
MAX_SUMMARY_TENANTS = 100  # listed in a summary, the most served first


@dataclass(frozen=True, slots=True)
class Tail:
    """The quantiles of a duration in seconds; None where nothing was measured."""

    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class RunSeries:
    """The largest value in each interval of a run."""

    interval: float  # seconds
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TenantSummary:
    name: str
    weight: float
    offered: int
    completed: int
    refused: int
    goodput: float  # share of its offered requests
    service_share: float  # of all weighted tokens
    time_share: float  # of the device's busy seconds
    backlogged_share: float  # of the run, with work waiting
    first_token: Tail
    spend: float | None = None  # None: its policy has no price for it
    currency: str = ""
    hit_rate: float = 0.0  # share of its prompt tokens that were cached


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """The served or refused requests of one class."""

    name: str  # the policy's name of it; else its number
    offered: int
    completed: int
    refused: int
    goodput: float  # share of its offered requests
    first_token: Tail


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Times are in seconds, rates a second of simulated time."""

    seed: int
    offered: int
    completed: int
    refusals: dict[str, int]
    left: int
    lost: int
    given_up: int
    goodput: float  # share of offered requests, refused ones included
    good_rate: float
    seconds: float
    prompt_rate: float
    output_rate: float
    good_output_rate: float  # of answers of good requests
    busy: float  # share of the time
    prefill_share: float  # of the busy time; decodes have the rest
    steps: int
    preemptions: int
    recomputed_tokens: int
    first_token: Tail
    interval: Tail
    per_token: Tail
    duration: Tail
    gap_tokens: float
    gap_seconds: float
    jain: float | None
    depth: RunSeries
    age: RunSeries
    first_token_curve: tuple[float | None, ...]
    interval_curve: tuple[float | None, ...]
    tenants: tuple[TenantSummary, ...]
    classes: tuple[ClassSummary, ...]  # the most urgent first; without classes of no request
    spend: dict[str, float]  # of all tenants, by currency
    hit_rate: float = 0.0  # share of the prompt tokens that were cached, and not computed
    evictions: int = 0  # evicted cached blocks
    sessions: int = 0  # of several turns each, all answered
    padding: float = 0.0  # share of computed tokens
    session_seconds: float = 0.0  # from a session's first request to the end of its last answer, mean


Cost = Callable[[str, int, int, int], tuple[float, str] | None]
"""Returns the cost of a tenant's computed prompt tokens, cached ones and output tokens, with the currency; None:
free.
"""
FREE: Cost = lambda *_: None  # noqa: E731 - a constant


def summarise(
    recorder: Recorder,
    seed: int,
    seconds: float,
    counters: Counters,
    evictions: int,
    class_names: Sequence[str] = (),
    cost: Cost = FREE,
) -> Summary:
    tenants = list(recorder.tenants.values())
    offered = sum(tenant.offered for tenant in tenants)
    good = sum(tenant.good for tenant in tenants)
    first = sorted(recorder.first_token_times)
    answered = len(first) / offered if offered else 0.0
    return Summary(
        seed=seed,
        offered=offered,
        completed=sum(tenant.completed for tenant in tenants),
        refusals=dict(sorted(recorder.refusals.items())),
        left=recorder.left,
        lost=recorder.lost,
        given_up=recorder.given_up,
        goodput=good / offered if offered else 0.0,
        good_rate=good / seconds if seconds else 0.0,
        seconds=seconds,
        prompt_rate=sum(tenant.prompt_tokens for tenant in tenants) / seconds if seconds else 0.0,
        output_rate=sum(tenant.output_tokens for tenant in tenants) / seconds if seconds else 0.0,
        good_output_rate=recorder.good_tokens / seconds if seconds else 0.0,
        busy=recorder.busy / seconds if seconds else 0.0,
        prefill_share=recorder.prefill_seconds / recorder.busy if recorder.busy else 0.0,
        steps=recorder.steps,
        preemptions=recorder.preemptions,
        recomputed_tokens=counters.recomputed_tokens,
        padding=_padding(counters),
        first_token=tail_of(first),
        interval=Tail(*recorder.intervals.quantiles(_TAIL)),
        per_token=tail_of(sorted(recorder.token_times)),
        duration=tail_of(sorted(recorder.durations)),
        gap_tokens=recorder.gap_tokens.largest,
        gap_seconds=recorder.gap_seconds.largest,
        jain=_evenness(tenants),
        depth=RunSeries(recorder.depth.interval, tuple(recorder.depth.values)),
        age=RunSeries(recorder.age.interval, tuple(recorder.age.values)),
        first_token_curve=tuple(quantile(first, s / answered) if s <= answered else None for s in CURVE),
        interval_curve=tuple(recorder.intervals.quantiles(CURVE)),
        tenants=_tenants(tenants, recorder.busy, seconds, cost),
        classes=tuple(_class(level, recorder.classes[level], class_names) for level in sorted(recorder.classes)),
        spend=_spend(tenants, cost),
        hit_rate=_hit_rate(tenants),
        evictions=evictions,
        sessions=len(recorder.session_times),
        session_seconds=sum(recorder.session_times) / max(1, len(recorder.session_times)),
    )


def _hit_rate(tenants: Sequence[TenantRecord]) -> float:
    cached = sum(tenant.cached_tokens for tenant in tenants)
    return cached / (cached + sum(tenant.prompt_tokens for tenant in tenants)) if cached else 0.0


def _cost_of(tenant: TenantRecord, cost: Cost) -> tuple[float, str] | None:
    return cost(tenant.name, tenant.prompt_tokens, tenant.cached_tokens, tenant.output_tokens)


def _spend(tenants: Sequence[TenantRecord], cost: Cost) -> dict[str, float]:
    total: dict[str, float] = {}
    for tenant in tenants:
        spent = _cost_of(tenant, cost)
        if spent is not None:
            total[spent[1]] = total.get(spent[1], 0.0) + spent[0]
    return dict(sorted(total.items()))


def tail_of(ordered: Sequence[float]) -> Tail:
    """Returns the quantiles of durations that are in order."""
    return Tail(*(quantile(ordered, share) for share in _TAIL))


def _evenness(tenants: Sequence[TenantRecord]) -> float | None:
    """Jain's index of the tenants' weighted service rates while they had work waiting."""
    return jain_fairness_index(
        tenant.backlogged_service / tenant.backlogged_seconds / tenant.weight
        for tenant in tenants
        if tenant.backlogged_seconds > 0
    )


def _tenants(tenants: Sequence[TenantRecord], busy: float, seconds: float, cost: Cost) -> tuple[TenantSummary, ...]:
    service = sum(tenant.service for tenant in tenants)
    largest = sorted(tenants, key=lambda tenant: tenant.service, reverse=True)[:MAX_SUMMARY_TENANTS]
    return tuple(
        _tenant(tenant, service, busy, seconds, _cost_of(tenant, cost))
        for tenant in sorted(largest, key=lambda tenant: tenant.name)
    )


def _tenant(
    tenant: TenantRecord, service: float, busy: float, seconds: float, spent: tuple[float, str] | None
) -> TenantSummary:
    return TenantSummary(
        name=tenant.name,
        weight=tenant.weight,
        offered=tenant.offered,
        completed=tenant.completed,
        refused=tenant.refused,
        goodput=tenant.good / tenant.offered,
        service_share=tenant.service / service if service else 0.0,
        time_share=tenant.seconds / busy if busy else 0.0,
        backlogged_share=tenant.backlogged_seconds / seconds if seconds else 0.0,
        first_token=tail_of(sorted(tenant.first_token_times)),
        spend=spent[0] if spent else None,
        currency=spent[1] if spent else "",
        hit_rate=_hit_rate([tenant]),
    )


def _class(level: int, record: ClassRecord, names: Sequence[str]) -> ClassSummary:
    return ClassSummary(
        name=SPARE_CLASS_NAME if level >= SPARE_CLASS else names[level] if level < len(names) else str(level),
        offered=record.offered,
        completed=record.completed,
        refused=record.refused,
        goodput=record.good / record.offered if record.offered else 0.0,
        first_token=tail_of(sorted(record.first_token_times)),
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the range of a quantity over seeds."""

    median: float
    low: float
    high: float


def spread(summaries: Sequence[Summary], get: Callable[[Summary], float | None]) -> Spread | None:
    """Returns the spread over the runs that have a value; None when none has."""
    values = [value for summary in summaries if (value := get(summary)) is not None]
    return Spread(median(values), min(values), max(values)) if values else None


def _padding(counters: Counters) -> float:
    padding = counters.padding_tokens
    computed = counters.prompt_tokens + counters.recomputed_tokens + counters.generation_tokens + padding
    return padding / computed if computed else 0.0
