"""The figures of a benchmark, from the records of its requests."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt

from labs.bench.exchange import Exchange, Outcome
from labs.bench.generator import Run
from labs.bench.scenario import Scenario, Targets
from labs.simulation.statistics import ServiceGap, quantile

BIN_SECONDS = 1.0  # of the course over time
SERVICE_BIN_SECONDS = 0.1  # in which a tenant's service is compared
RECOVERED_SHARE = 0.9  # of the goodput before a fault
ALL = "all"


@dataclass(frozen=True, slots=True)
class Latency:
    """A duration in seconds; None where nothing was measured."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Latency":
        ordered = sorted(values)
        mean = sum(ordered) / len(ordered) if ordered else None
        p50, p95, p99 = (quantile(ordered, share) for share in (0.5, 0.95, 0.99))
        return cls(mean, p50, p95, p99, len(ordered))


@dataclass(frozen=True, slots=True)
class Figures:
    """The requests of one tenant, or of all. Rates are a second of the counted time."""

    name: str
    weight: float
    offered: int
    answered: int
    refusals: dict[str, int]  # by code
    failures: dict[str, int]
    left: int
    unfinished: int
    retries: int
    good: int
    right: int
    judged: int  # answers that a check has judged
    goodput: float  # share of the offered requests, without those that were to be left
    good_rate: float
    request_rate: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_rate: float  # tokens that came in the counted time, not in the drain
    ttft: Latency  # of unanswered requests that were not refused, how long they have waited
    between: Latency  # of two chunks of a stream
    per_token: Latency  # of a request, after its first token
    total: Latency
    token_share: float | None = None  # of the tokens served while all tenants had requests waiting; None: never
    fair_share: float | None = None  # by weight


@dataclass(frozen=True, slots=True)
class Course:
    """What happened in each bin of `BIN_SECONDS`, by when a request was due."""

    offered: tuple[int, ...]
    good: tuple[int, ...]
    output_tokens: tuple[float, ...]  # by when they came


@dataclass(frozen=True, slots=True)
class Summary:
    all: Figures
    tenants: tuple[Figures, ...]
    course: Course
    seconds: float  # counted
    gap_tokens: float | None  # largest difference in tokens by weight while two tenants had requests waiting
    sent_late: Latency  # after a request was due: the generator's own delay
    cpu_share: float
    peak_in_flight: int
    fault_at: float | None
    recovered_after: float | None  # seconds; None without a fault, or never


def is_good(exchange: Exchange, targets: Targets) -> bool:
    """Return True if the request was answered within its targets, and rightly."""
    if exchange.outcome is not Outcome.ANSWERED or exchange.is_right is False:
        return False
    measured = ((exchange.ttft, targets.ttft), (exchange.per_token, targets.per_token), (exchange.total, targets.total))
    return all(value is None or target is None or value <= target for value, target in measured)


def summarise(run: Run, scenario: Scenario) -> Summary:
    """Sum up the requests that were due after the warm-up."""
    counted = [one for one in run.exchanges if one.due >= scenario.warm_up]
    seconds = scenario.seconds - scenario.warm_up
    good = {id(one) for one in counted if is_good(one, scenario.targets_of(one.tenant))}
    by_tenant = {name: [one for one in counted if one.tenant == name] for name in scenario.tenants}
    weights = {name: tenant.weight for name, tenant in scenario.tenants.items()}
    window = scenario.warm_up, scenario.seconds
    shares, gap = _service(by_tenant, weights, scenario) if len(weights) > 1 else ({}, None)
    tenants = tuple(
        _figures(name, weights[name], mine, good, window, shares.get(name), weights[name] / sum(weights.values()))
        for name, mine in by_tenant.items()
    )
    course = _course(run.exchanges, good, scenario)
    return Summary(
        all=_figures(ALL, sum(weights.values()), counted, good, window),
        tenants=tenants,
        course=course,
        seconds=seconds,
        gap_tokens=gap,
        sent_late=Latency.of(one.sent - one.due for one in counted),
        cpu_share=run.cpu_share,
        peak_in_flight=run.peak_in_flight,
        fault_at=run.fault_at,
        recovered_after=None if run.fault_at is None else recovery(course, run.fault_at, scenario.warm_up),
    )


def phases_of(run: Run, scenario: Scenario) -> dict[str, Summary]:
    """Sum up each phase of the scenario: the requests that were due in it."""
    phases = {}
    for name, (begin, end) in scenario.phases.items():
        due = [one for one in run.exchanges if one.due < end]
        part = replace(run, exchanges=due, fault_at=None)
        phases[name] = summarise(part, scenario.model_copy(update={"warm_up": begin, "seconds": end}))
    return phases


def _figures(
    name: str,
    weight: float,
    exchanges: Sequence[Exchange],
    good: set[int],
    window: tuple[float, float],
    token_share: float | None = None,
    fair_share: float | None = None,
) -> Figures:
    outcomes = Counter(one.outcome for one in exchanges)
    answered = [one for one in exchanges if one.outcome is Outcome.ANSWERED]
    judged = [one for one in answered if one.is_right is not None]
    read = [one for one in exchanges if not one.is_slow]  # a slow reader's waits are its own
    num_good, num_staying = sum(id(one) in good for one in exchanges), len(exchanges) - outcomes[Outcome.LEFT]
    seconds = window[1] - window[0]
    arrived = sum(_tokens_a_chunk(one) * sum(moment < window[1] for moment in one.token_times) for one in exchanges)
    return Figures(
        name=name,
        weight=weight,
        offered=len(exchanges),
        answered=len(answered),
        refusals=_codes(exchanges, Outcome.REFUSED),
        failures=_codes(exchanges, Outcome.FAILED),
        left=outcomes[Outcome.LEFT],
        unfinished=outcomes[Outcome.UNFINISHED],
        retries=sum(max(0, one.attempts - 1) for one in exchanges),
        good=num_good,
        right=sum(one.is_right is True for one in judged),
        judged=len(judged),
        goodput=num_good / num_staying if num_staying else 0.0,
        good_rate=num_good / seconds,
        request_rate=len(exchanges) / seconds,
        prompt_tokens=sum(one.prompt_tokens for one in exchanges),
        cached_tokens=sum(one.cached_tokens for one in exchanges),
        output_tokens=sum(one.num_tokens for one in exchanges),
        output_rate=arrived / seconds,
        ttft=Latency.of(map(_waited, filter(_is_admitted, exchanges))),
        between=Latency.of(
            after - before for one in read for before, after in zip(one.token_times, one.token_times[1:], strict=False)
        ),
        per_token=Latency.of(one.per_token for one in read if one.per_token is not None),
        total=Latency.of(one.total for one in answered if not one.is_slow),
        token_share=token_share,
        fair_share=fair_share,
    )


def _tokens_a_chunk(exchange: Exchange) -> float:
    return exchange.num_tokens / len(exchange.token_times) if exchange.token_times else 0.0


def _codes(exchanges: Iterable[Exchange], outcome: Outcome) -> dict[str, int]:
    return dict(Counter(one.code for one in exchanges if one.outcome is outcome).most_common())


def _is_admitted(exchange: Exchange) -> bool:
    return bool(exchange.token_times) or exchange.outcome in (Outcome.UNFINISHED, Outcome.FAILED)


def _waited(exchange: Exchange) -> float:
    return exchange.total if exchange.ttft is None else exchange.ttft


def _course(exchanges: Sequence[Exchange], good: set[int], scenario: Scenario) -> Course:
    num_bins = max(1, round(scenario.seconds / BIN_SECONDS))
    offered, num_good, tokens = [0] * num_bins, [0] * num_bins, [0.0] * num_bins
    for one in exchanges:
        place = min(num_bins - 1, int(one.due / BIN_SECONDS))
        if one.outcome is not Outcome.LEFT:
            offered[place] += 1
            num_good[place] += id(one) in good or (one.due < scenario.warm_up and one.outcome is Outcome.ANSWERED)
        each = _tokens_a_chunk(one)
        for moment in one.token_times:
            if moment < num_bins * BIN_SECONDS:
                tokens[int(moment / BIN_SECONDS)] += each
    return Course(tuple(offered), tuple(num_good), tuple(tokens))


def recovery(course: Course, fault_at: float, warm_up: float) -> float | None:
    """Return the seconds from a fault until goodput stays at `RECOVERED_SHARE` of what it was before; None: never.

    Goodput is of the requests that were due in a bin, so that one which waits for a restarted server counts where it
    was due.
    """
    first, fault = int(warm_up / BIN_SECONDS), int(fault_at / BIN_SECONDS)
    before = sum(course.offered[first:fault])
    if not before:
        return None
    enough = RECOVERED_SHARE * sum(course.good[first:fault]) / before
    bad = [
        place
        for place in range(fault, len(course.offered))
        if course.offered[place] and course.good[place] / course.offered[place] < enough
    ]
    if not bad:
        return 0.0
    return None if bad[-1] == len(course.offered) - 1 else (bad[-1] + 1) * BIN_SECONDS - fault_at


def _service(
    by_tenant: Mapping[str, Sequence[Exchange]], weights: Mapping[str, float], scenario: Scenario
) -> tuple[dict[str, float], float | None]:
    """Each tenant's share of the tokens that were served while all had requests waiting, and the largest gap.

    A tenant has requests waiting in a bin if one waits for its first token throughout.
    """
    num_bins = int(scenario.seconds / SERVICE_BIN_SECONDS) + 1
    served = {name: _binned_tokens(mine, num_bins) for name, mine in by_tenant.items()}
    waiting = {name: _waiting_bins(mine, num_bins) for name, mine in by_tenant.items()}
    gap, totals, together = ServiceGap(), dict.fromkeys(by_tenant, 0.0), dict.fromkeys(by_tenant, 0.0)
    for place in range(num_bins):
        for name in by_tenant:
            totals[name] += served[name][place] / weights[name]
        gap.observe(list(totals.values()), [waiting[name][place] for name in by_tenant])
        if all(waiting[name][place] for name in by_tenant):
            for name in by_tenant:
                together[name] += served[name][place]
    whole = sum(together.values())
    return ({name: tokens / whole for name, tokens in together.items()} if whole else {}), gap.largest or None


def _binned_tokens(exchanges: Iterable[Exchange], num_bins: int) -> list[float]:
    """The tokens served in each bin: the prompt's with the first of the answer."""
    bins = [0.0] * num_bins
    for one in exchanges:
        each = _tokens_a_chunk(one)
        for moment in one.token_times:
            if (place := int(moment / SERVICE_BIN_SECONDS)) < num_bins:
                bins[place] += each
        if one.token_times and (place := int(one.token_times[0] / SERVICE_BIN_SECONDS)) < num_bins:
            bins[place] += one.prompt_tokens - one.cached_tokens
    return bins


def _waiting_bins(exchanges: Iterable[Exchange], num_bins: int) -> list[bool]:
    """True for each bin in which one request or another waits all the time."""
    intervals = sorted((one.due, one.token_times[0] if one.token_times else one.ended) for one in exchanges)
    covered: list[tuple[float, float]] = []
    for begin, end in intervals:
        if covered and begin <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(covered[-1][1], end)
        else:
            covered.append((begin, end))
    begins = [begin for begin, _ in covered]
    waits = []
    for place in range(num_bins):
        after = bisect_left(begins, place * SERVICE_BIN_SECONDS + 1e-9) - 1
        waits.append(after >= 0 and covered[after][1] >= (place + 1) * SERVICE_BIN_SECONDS)
    return waits


def lengths_vary(values: Sequence[int]) -> float:
    """Return the coefficient of variation; infinite for fewer than two values."""
    if len(values) < 2 or not (mean := sum(values) / len(values)):
        return inf
    return sqrt(sum((value - mean) ** 2 for value in values) / len(values)) / mean
