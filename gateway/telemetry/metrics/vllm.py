"""Metrics under the names of vLLM 0.33 and of older versions, for existing dashboards; latencies are of delivery."""

from admission.outcome import Outcome
from backend.scheduler.kv_accounts import KVAccounts
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import FinishReason
from gateway.telemetry.metrics.delivery import DeliveryMetrics
from gateway.telemetry.metrics.registry import Family, HistogramSeries, Kind, Registry
from gateway.telemetry.request_record import RequestRecord

_STOP, _LENGTH = FinishReason.STOP, FinishReason.LENGTH

# upper bounds of buckets of vLLM 0.33, in seconds
REQUEST_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


class VllmMetrics:
    """Keeps the metrics that dashboards written for vLLM query."""

    def __init__(self, registry: Registry, scheduler: Scheduler, deliveries: DeliveryMetrics) -> None:
        self._show_state(registry, scheduler)
        self._show_totals(registry, scheduler)
        self._time(registry, deliveries)
        successes = registry.counter("vllm:request_success_total", "Sequences that have ended.", ("finished_reason",))
        self._stopped, self._complete, self._aborted = (successes.at(reason) for reason in ("stop", "length", "abort"))

    def _show_state(self, registry: Registry, scheduler: Scheduler) -> None:
        config, kv = scheduler.config, scheduler.kv_manager
        registry.gauge("vllm:num_requests_running", "Sequences in the batch.", lambda: len(scheduler.running))
        registry.gauge("vllm:num_requests_waiting", "Sequences that wait.", lambda: len(scheduler.waiting))
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            registry.gauge(name, "KV blocks used; 1 is all.", lambda: kv.num_held / config.num_blocks)
        info = Family("vllm:cache_config_info", Kind.GAUGE, "", "The KV pool.", ("block_size", "num_gpu_blocks"))
        num_blocks = config.short_tokens(config.num_blocks) // config.block_size  # a reader multiplies them again
        registry.read(info, lambda: [((str(config.block_size), str(num_blocks)), 1)])

    def _show_totals(self, registry: Registry, scheduler: Scheduler) -> None:
        counters, accounts = scheduler.counters, KVAccounts(scheduler.kv_manager)
        registry.total("vllm:prompt_tokens_total", "Prompt tokens computed.", lambda: counters.prompt_tokens)
        registry.total(
            "vllm:prefix_cache_queries_total",
            "Prompt tokens looked for in the prefix cache.",
            lambda: accounts.num_queried_tokens,
        )
        registry.total("vllm:prefix_cache_hits_total", "Prompt tokens found there.", lambda: counters.cached_tokens)
        registry.total("vllm:generation_tokens_total", "Tokens generated.", lambda: counters.generation_tokens)
        registry.total("vllm:num_preemptions_total", "Preemptions.", lambda: sum(counters.all_preemptions))

    def _time(self, registry: Registry, deliveries: DeliveryMetrics) -> None:
        _show(registry, "vllm:time_to_first_token_seconds", "From arrival to first token.", deliveries.first_token)
        _show(registry, "vllm:inter_token_latency_seconds", "Between two tokens.", deliveries.gap)
        _show(registry, "vllm:time_per_output_token_seconds", "Between two tokens.", deliveries.gap)
        self._latency = registry.histogram(
            "vllm:e2e_request_latency_seconds", "Of requests that completed.", REQUEST_LATENCY
        ).at()

    def ended(self, record: RequestRecord) -> None:
        if record.outcome is Outcome.COMPLETED and record.operation is not None and record.ended is not None:
            self._latency.observe(record.ended - record.began)
        for timeline in record.engine.timelines:
            reason = timeline.sequence.finish_reason
            success = self._stopped if reason is _STOP else self._complete if reason is _LENGTH else self._aborted
            success.value += 1


def _show(registry: Registry, name: str, meaning: str, series: HistogramSeries) -> None:
    family = Family(name, Kind.HISTOGRAM, "s", meaning, (), series.bounds)
    registry.read(family, lambda: [((), series.read())])
