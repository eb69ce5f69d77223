"""Metrics under the names of vLLM 0.33, and older ones that dashboards still query; latencies are of delivery."""

from collections.abc import Callable

from admission.outcome import Outcome
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import FinishReason, Sequence
from gateway.telemetry.metrics.registry import Family, Kind, Registry
from gateway.telemetry.metrics.requests import TIME_PER_OUTPUT_TOKEN, TIME_TO_FIRST_TOKEN
from gateway.telemetry.request_record import RequestRecord

_STOP, _LENGTH = FinishReason.STOP, FinishReason.LENGTH

# upper bounds of buckets of vLLM 0.33, in seconds
FIRST_TOKEN = (*TIME_TO_FIRST_TOKEN, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
INTER_TOKEN_LATENCY = (*TIME_PER_OUTPUT_TOKEN, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class VllmMetrics:
    """Keeps the metrics that dashboards written for vLLM query."""

    def __init__(self, registry: Registry, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._show_state(registry, scheduler)
        self._show_totals(registry, scheduler)
        self._time(registry)
        successes = registry.counter("vllm:request_success_total", "Sequences that have ended.", ("finished_reason",))
        self._stopped, self._complete, self._aborted = (successes.at(reason) for reason in ("stop", "length", "abort"))

    def _show_state(self, registry: Registry, scheduler: Scheduler) -> None:
        config, pool = scheduler.config, scheduler.pool
        registry.gauge("vllm:num_requests_running", "Sequences in the batch.", lambda: len(scheduler.running))
        registry.gauge("vllm:num_requests_waiting", "Sequences that wait.", lambda: len(scheduler.waiting))
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            registry.gauge(name, "KV blocks used; 1 is all.", lambda: 1 - pool.num_free / config.num_blocks)
        info = Family("vllm:cache_config_info", Kind.GAUGE, "", "The KV pool.", ("block_size", "num_gpu_blocks"))
        registry.read(info, lambda: [((str(config.block_size), str(config.num_blocks)), 1)])

    def _show_totals(self, registry: Registry, scheduler: Scheduler) -> None:
        counters = scheduler.counters
        registry.total("vllm:prompt_tokens_total", "Prompt tokens computed.", lambda: counters.prompt_tokens)
        registry.total("vllm:generation_tokens_total", "Tokens generated.", lambda: counters.generation_tokens)
        registry.total("vllm:num_preemptions_total", "Preemptions.", lambda: sum(counters.all_preemptions))

    def _time(self, registry: Registry) -> None:
        first_tokens = registry.histogram(
            "vllm:time_to_first_token_seconds", "From arrival to first token.", FIRST_TOKEN
        )
        bounds = INTER_TOKEN_LATENCY
        gaps = registry.histogram("vllm:inter_token_latency_seconds", "Between two tokens.", bounds)
        older = "vllm:time_per_output_token_seconds"
        registry.read(Family(older, Kind.HISTOGRAM, "s", "Between two tokens.", (), bounds), gaps.read)
        latencies = registry.histogram(
            "vllm:e2e_request_latency_seconds", "Of requests that completed.", REQUEST_LATENCY
        )
        self._first_token, self._gap, self._latency = first_tokens.at(), gaps.at(), latencies.at()

    def tokens_delivered(self, sequence: Sequence, before: int, count: int, last: float) -> float:
        """Note `count` tokens sent now, after `before` others, the last of them at `last`. Returns the time now."""
        now = self._clock()
        if before:
            self._gap.observe((now - last) / (count or 1), count)
        elif count:
            self._first_token.observe(now - sequence.arrival)
            self._gap.observe(0.0, count - 1)
        return now

    def ended(self, record: RequestRecord) -> None:
        if record.outcome is Outcome.COMPLETED and record.operation is not None and record.ended is not None:
            self._latency.observe(record.ended - record.began)
        for timeline in record.timelines:
            reason = timeline.sequence.finish_reason
            success = self._stopped if reason is _STOP else self._complete if reason is _LENGTH else self._aborted
            success.value += 1
