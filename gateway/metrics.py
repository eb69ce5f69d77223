"""What orchestrators and dashboards scrape, in Prometheus' text format under vLLM's names.

https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4); names as in vLLM 0.33, and the older ones
that dashboards still query.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from admission.outcome import Outcome
from backend.scheduler import Scheduler
from backend.sequence import Sequence
from gateway.policies import Policies
from gateway.telemetry.story import Story

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)  # seconds
GAP_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)  # seconds


class Histogram:
    """Cumulative buckets with upper bounds, a sum and a count."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{name}_bucket{{{labels},le="{le}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self.sum:.9g}"
        yield f"{name}_count{{{labels}}} {total}"


class Metrics:
    """Counts what passes through the gateway and reads the rest off the scheduler when asked.

    Times are those of delivery to the client, in seconds of `clock`.
    """

    def __init__(self, model: str, scheduler: Scheduler, clock: Callable[[], float], policies: Policies) -> None:
        self._labels = f'model_name="{_escaped(model)}"'
        self._scheduler = scheduler
        self._clock = clock
        self._policies = policies
        self._ttft = Histogram(TTFT_BUCKETS)
        self._gap = Histogram(GAP_BUCKETS)
        self._outcomes: Counter[Outcome] = Counter()

    def tokens_delivered(self, sequence: Sequence, before: int, count: int, last: float) -> float:
        """`count` tokens go out now, `before` went out earlier, the last of them at `last`; returns now."""
        now = self._clock()
        if before:
            self._gap.observe((now - last) / max(count, 1), count)
        elif count:
            self._ttft.observe(now - sequence.arrival)
            self._gap.observe(0.0, count - 1)
        return now

    def request_ended(self, story: Story) -> None:
        if story.outcome is not None and story.operation is not None:
            self._outcomes[story.outcome] += 1

    def render(self) -> bytes:
        lines: list[str] = []
        for name, kind, samples in self._families():
            lines.append(f"# TYPE {name} {kind}")
            lines += samples
        return "\n".join([*lines, ""]).encode()

    def _families(self) -> Iterable[tuple[str, str, Iterable[str]]]:
        scheduler, config = self._scheduler, self._scheduler.config
        counters = scheduler.counters
        used = 1 - scheduler.pool.num_free / config.num_blocks
        yield self._one("vllm:num_requests_running", "gauge", len(scheduler.running))
        yield self._one("vllm:num_requests_waiting", "gauge", len(scheduler.waiting))
        yield self._one("vllm:kv_cache_usage_perc", "gauge", used)
        yield self._one("vllm:gpu_cache_usage_perc", "gauge", used)
        yield self._one("vllm:prompt_tokens_total", "counter", counters.prompt_tokens)
        yield self._one("vllm:generation_tokens_total", "counter", counters.generation_tokens)
        yield self._one("vllm:num_preemptions_total", "counter", counters.preemptions)
        yield self._one("vllm:prefix_cache_queries_total", "counter", 0)  # no prefix is cached yet
        yield self._one("vllm:prefix_cache_hits_total", "counter", 0)
        yield self._one("sluice:recomputed_tokens_total", "counter", counters.recomputed_tokens)
        yield self._one("sluice:late_tokens_total", "counter", counters.late_tokens)
        yield self._one("sluice:kv_blocks", "gauge", config.num_blocks)
        yield self._one("sluice:kv_blocks_used", "gauge", config.num_blocks - scheduler.pool.num_free)
        yield self._one("sluice:policy_reloads_total", "counter", self._policies.num_reloads)
        yield self._one("sluice:policy_reload_failures_total", "counter", self._policies.num_failures)
        version = f'{self._labels},version="{self._policies.current.version}"'
        yield "sluice:policy_info", "gauge", [f"sluice:policy_info{{{version}}} 1"]
        info = f'{self._labels},block_size="{config.block_size}",num_gpu_blocks="{config.num_blocks}"'
        yield "vllm:cache_config_info", "gauge", [f"vllm:cache_config_info{{{info}}} 1"]
        yield self._histogram("vllm:time_to_first_token_seconds", self._ttft)
        yield self._histogram("vllm:inter_token_latency_seconds", self._gap)
        yield self._histogram("vllm:time_per_output_token_seconds", self._gap)
        yield (
            "sluice:requests_total",
            "counter",
            [
                f'sluice:requests_total{{{self._labels},outcome="{outcome}"}} {self._outcomes[outcome]}'
                for outcome in Outcome
            ],
        )

    def _one(self, name: str, kind: str, value: float) -> tuple[str, str, list[str]]:
        return name, kind, [f"{name}{{{self._labels}}} {value:.15g}"]

    def _histogram(self, name: str, histogram: Histogram) -> tuple[str, str, Iterable[str]]:
        return name, "histogram", histogram.lines(name, self._labels)


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
