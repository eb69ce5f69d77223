"""More work than the machine can do, live: `python -m labs.benchmarks.overload_live [--seconds 30] [--runs 3]`.

`sluice serve` with the embedded model on one core, clients on another, real HTTP. Four tenants with Poisson arrivals,
lengths drawn from quantiles of Azure's conversations of 2023 (see `overload`) and divided by `SCALE` to fit
the model's context. Every request is a stream, says in its headers how long it will wait for its first token and
between two, and is good when both held; waits are counted from the moment it was due.

Capacity is what the server completes a second while `CROWD_REQUESTS` requests are always there. As many are then
offered, and twice as many, in an open loop; requests due in the first tenth of that time are not counted. A refusal
takes from before its request is written, over a connection that is there already, until its last byte is read.
"""

import gc
import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

from labs.benchmarks import machine
from labs.benchmarks.load import OK, post
from labs.benchmarks.overload_loads import drawn_trace
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.benchmarks.served import Served, served_afresh
from labs.benchmarks.traffic import ClosedLoop, Due, Exchange, Heard, Traffic
from labs.simulation.arrival import Arrival

TENANTS = tuple(f"tenant-{number}" for number in range(4))
SCALE = 8  # the longest conversation has 15,050 tokens, the model's context 2,048
FIRST_TOKEN, INTERVAL = 1.0, 0.1  # seconds, until the first token and on average between two
IMPATIENT = {"x_sluice_ttft_ms": FIRST_TOKEN * 1e3, "x_llm_d_slo_tpot_ms": INTERVAL * 1e3}
WORDS = range(16, 1024)  # token ids behind the special ones
CROWD_REQUESTS = 128  # twice as many as run at once
LOADS = {"1x": 1.0, "2x": 2.0}
UNCOUNTED_SHARE_OF_TIME = 0.1  # of the time
TOO_MANY, UNAVAILABLE, GIVEN_UP = 429, 503, 504
CONNECTIONS = 512  # made before the first request
DRAIN = 60.0  # seconds, for what is in flight when the time is over
SETTINGS = {
    "max_num_seqs": CROWD_REQUESTS // 2,
    "max_waiting": 10_000,
    "max_connections": 16_000,
    "header_timeout": 600,
}

GOOD, TOKENS = "good a second", "good tokens a second"
REFUSAL_P50, REFUSAL_P99 = "refusal p50, ms", "refusal p99, ms"

Figures = dict[str, dict[str, list[float]]]


class Asked(NamedTuple):
    """A request, and the tokens of its prompt and of its answer."""

    due: Due
    prompt_tokens: int
    output_tokens: int

    def is_good(self, exchange: Exchange) -> bool:
        """True if its whole answer came, with its tokens in time."""
        if exchange.first is None or exchange.done is None:
            return False
        interval = (exchange.done - exchange.first) / max(1, self.output_tokens - 1)
        return exchange.first - exchange.due <= FIRST_TOKEN and interval <= INTERVAL


class Conversations:
    """Requests of random tokens, so that no two share a prefix."""

    def __init__(self, server: Served, trace: Sequence[Arrival], seed: int) -> None:
        self._server, self._trace, self._random = server, trace, Random(seed)

    def patient(self, tenant: str) -> Iterator[bytes]:
        """Yield requests without deadlines, without end."""
        while True:
            yield self._next(0.0, tenant).due.request

    def poisson(self, rate: float, seconds: float) -> list[Asked]:
        """A timetable of requests with deadlines."""
        asked, at = [], 0.0
        while (at := at + self._random.expovariate(rate)) < seconds:
            asked.append(self._next(at, self._random.choice(TENANTS), **IMPATIENT))
        return asked

    def _next(self, at: float, tenant: str, **headers: object) -> Asked:
        lengths = self._random.choice(self._trace)
        prompt = self._random.choices(WORDS, k=max(1, lengths.prompt_tokens // SCALE))
        tokens = max(2, lengths.output_tokens // SCALE)
        body = {"model": "embedded", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        request = post("/v1/completions", body, self._server.keys[tenant], **headers)
        return Asked(Due(at, tenant, request), len(prompt), tokens)


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load, and of measuring capacity")
    options = parser.parse_args(arguments)
    if options.quick:
        options.runs, options.seconds = 1, 2.0
    report = Report("overload_live", options.quick)
    server_core, load_core = machine.two_cores()
    os.sched_setaffinity(0, {load_core})
    trace = drawn_trace()
    figures: Figures = {name: {} for name in LOADS}
    capacities = [_measure(options, server_core, trace, run, figures) for run in range(options.runs)]
    _tell(report, capacities, figures)
    return report.finish(options.results)


def _measure(options: Namespace, core: int, trace: Sequence[Arrival], run: int, figures: Figures) -> float:
    """One run against a server of its own; returns its capacity, in requests a second."""
    with TemporaryDirectory() as directory, served_afresh(core, TENANTS, Path(directory), **SETTINGS) as server:
        conversations = Conversations(server, trace, run)
        capacity = capacity_of(server, conversations, options.seconds)
        for name, factor in LOADS.items():
            asked = conversations.poisson(factor * capacity, options.seconds)
            worked, heard = machine.cpu_seconds(server.pid), offer(server, asked, options.seconds)
            row = figures_of(asked, heard, options.seconds)
            row["server busy"] = (machine.cpu_seconds(server.pid) - worked) / heard.seconds
            for what, value in row.items():
                figures[name].setdefault(what, []).append(value)
    return capacity


def capacity_of(server: Served, conversations: Conversations, seconds: float) -> float:
    """The capacity over the second half of that time; or over twice as long if no request was served by then."""
    loops = {tenant: ClosedLoop(CROWD_REQUESTS // len(TENANTS), conversations.patient(tenant)) for tenant in TENANTS}
    with Traffic(server.port) as clients:
        heard = clients.run(seconds, loops=loops)
    late = [one for one in heard.exchanges if one.done is not None and one.done > seconds / 2]
    return len(late) / (heard.seconds - seconds / 2) or capacity_of(server, conversations, 2 * seconds)


def offer(server: Served, asked: Sequence[Asked], seconds: float) -> Heard:
    """Collecting garbage would make requests late, and refusals look so."""
    with Traffic(server.port, refusals=(TOO_MANY, UNAVAILABLE, GIVEN_UP)) as clients:
        clients.connect(CONNECTIONS)
        gc.collect()
        gc.disable()
        try:
            return clients.run(seconds + DRAIN, (one.due for one in asked), until_answered=True)
        finally:
            gc.enable()


def figures_of(asked: Sequence[Asked], heard: Heard, seconds: float) -> dict[str, float]:
    """The figures of requests due after the uncounted time, perhaps none; exchanges are in the order of their
    timetable.
    """
    start = UNCOUNTED_SHARE_OF_TIME * seconds
    pairs = [pair for pair in zip(asked, heard.exchanges, strict=True) if pair[0].due.at >= start]
    good = [one for one, exchange in pairs if one.is_good(exchange)]
    exchanges = [exchange for _, exchange in pairs]
    statuses = Counter(exchange.status for exchange in exchanges)
    lags = sorted(exchange.sent - exchange.due for exchange in exchanges)
    all_ = len(pairs) or 1
    return {
        "offered a second": len(pairs) / (seconds - start),
        GOOD: len(good) / (seconds - start),
        TOKENS: sum(one.prompt_tokens + one.output_tokens for one in good) / (seconds - start),
        "good": len(good) / all_,
        "refused": (statuses[TOO_MANY] + statuses[UNAVAILABLE]) / all_,
        "given up": statuses[GIVEN_UP] / all_,
        "served late": (statuses[OK] - len(good)) / all_,
        **_refusal_times(exchanges),
        "sent late p99, ms": quantile(lags, 0.99) * 1e3,
        "sent late at most, ms": max(lags, default=0.0) * 1e3,
        "client busy": heard.busy,
    }


def _refusal_times(exchanges: Iterable[Exchange]) -> dict[str, float]:
    times = sorted(
        exchange.refused - exchange.sent
        for exchange in exchanges
        if exchange.refused is not None and exchange.status != GIVEN_UP
    )
    return {REFUSAL_P50: quantile(times, 0.5) * 1e3, REFUSAL_P99: quantile(times, 0.99) * 1e3}


def _tell(report: Report, capacities: list[float], figures: Figures) -> None:
    rows: list[dict[str, object]] = [
        {"offered": name, **{what: Spread.of(values) for what, values in own.items()}} for name, own in figures.items()
    ]
    report.add_table("shares of requests, median over runs (extremes)", rows)
    report.notes = [
        f"capacity: {Spread.of(capacities)} requests a second",
        "refused: 429 and 503; given up: 504, when its time had passed",
        f"good tokens at 2x over those at 1x: {_beyond(figures, TOKENS):.3g}",
    ]
    report.at_least("goodput at 2x over goodput at 1x", _beyond(figures, GOOD), 0.95)
    report.at_most("refusals on the wire at 2x, p99 in ms", median(figures["2x"][REFUSAL_P99]), 25)


def _beyond(figures: Figures, what: str) -> float:
    """At 2x over 1x, median over runs; 0 of a run that had none at 1x, which shows nothing."""
    at_capacity, beyond = (figures[name][what] for name in LOADS)
    return median(more / less if less else 0.0 for more, less in zip(beyond, at_capacity, strict=True))


if __name__ == "__main__":
    sys.exit(main())
