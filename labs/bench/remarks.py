"""Doubts about a benchmark's own figures, each with its remedy."""

from collections.abc import Iterator

from labs.bench.exchange import Outcome
from labs.bench.generator import Run
from labs.bench.scenario import Scenario
from labs.bench.summary import Figures, Latency, Summary, lengths_vary
from labs.bench.workloads import WORKLOADS
from labs.simulation.metrics import format_duration, format_percent

BUSY_SHARE = 0.7  # of a core, from which the generator delays what it reads
LATE_SHARE = 0.05  # of the median first token, that requests may be sent late (p99)
LATE_SECONDS = 0.002  # which is never held against a generator
UNIFORM_VARIATION = 0.1  # coefficient of variation
TAIL_RATIO = 5.0  # p99 of p50
MIN_P99_COUNT = 100
CACHED_SHARE = 0.02  # of prompt tokens, found although prompts are to differ


def remarks(run: Run, scenario: Scenario, summary: Summary) -> list[str]:
    """Return a sentence for each doubt."""
    return [*_generator(summary), *_lengths(run, scenario), *_tails(summary.all), *_cache(scenario, summary)]


def _generator(summary: Summary) -> Iterator[str]:
    if summary.cpu_share > BUSY_SHARE:
        yield (
            f"the generator used {format_percent(summary.cpu_share)} of a core: it may have been measured instead of "
            "the server; use fewer requests, or several generators on other cores"
        )
    late, ttft = summary.sent_late.p99, summary.all.ttft.p50
    if late is not None and ttft is not None and late > max(LATE_SECONDS, LATE_SHARE * ttft):
        yield (
            f"requests were sent up to {format_duration(late)} late (p99), which first tokens include: the generator's "
            "core is shared or too slow"
        )


def _lengths(run: Run, scenario: Scenario) -> Iterator[str]:
    for name in scenario.tenants:
        answered = [one for one in run.exchanges if one.tenant == name and one.outcome is Outcome.ANSWERED]
        kind = WORKLOADS[scenario.tenants[name].workload].kind
        outputs = [one.num_tokens for one in answered] if kind != "embeddings" else []
        for what, values in (("prompts", [one.prompt_tokens for one in answered]), ("answers", outputs)):
            if lengths_vary(values) < UNIFORM_VARIATION:
                yield (
                    f"the {what} of {name} are all of one length, about {values[0]} tokens: real ones are not, and "
                    "batches of equal ones flatter a server"
                )


def _tails(figures: Figures) -> Iterator[str]:
    tails: tuple[tuple[str, Latency], ...] = (("first tokens", figures.ttft), ("tokens of a stream", figures.between))
    for what, latency in tails:
        if latency.p50 and latency.p99 is not None and latency.p99 > TAIL_RATIO * latency.p50:
            yield (
                f"{what}: p99 ({format_duration(latency.p99)}) is {latency.p99 / latency.p50:.1f} times p50 "
                f"({format_duration(latency.p50)}): look at queues and long prompts before the mean"
            )
    if 0 < figures.ttft.count < MIN_P99_COUNT:
        yield f"{figures.ttft.count} requests are too few for a p99: {MIN_P99_COUNT} at least, --seconds says how long"


def _cache(scenario: Scenario, summary: Summary) -> Iterator[str]:
    for figures in summary.tenants:
        tenant = scenario.tenants[figures.name]
        cached = figures.cached_tokens / figures.prompt_tokens if figures.prompt_tokens else 0.0
        found = f"{format_percent(cached)} of {figures.name}'s prompt tokens were"
        if cached > CACHED_SHARE and (tenant.trace is not None or WORKLOADS[tenant.workload].repeats):
            yield f"{found} cached, as its workload repeats them"
        elif cached > CACHED_SHARE:
            yield (
                f"{found} found in a prefix cache, though its prompts differ: were they sent before? Restart the "
                "server, or change --seed"
            )
