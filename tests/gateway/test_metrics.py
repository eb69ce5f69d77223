"""What orchestrators and dashboards read: Prometheus' text format, vLLM's names, true numbers."""

import re
from collections.abc import Iterator

import httpx
import pytest

from admission.outcome import Outcome
from backend.sampling import SamplingParams
from backend.scheduler import Scheduler
from backend.sequence import Sequence
from backend.waiting import FirstComeFirstServed
from gateway.metrics import GAP_BUCKETS, TTFT_BUCKETS, Histogram, Metrics
from gateway.policies import Policies
from tests.backend.test_scheduler import make_config
from tests.gateway.raw_client import completion
from tests.gateway.server_process import ServerProcess
from tests.gateway.telemetry.stories import a_story

SAMPLE = re.compile(r'([a-z_:]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)')
EXPECTED = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:num_preemptions_total": "counter",
    "vllm:prefix_cache_queries_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "sluice:requests_total": "counter",
    "sluice:kv_blocks": "gauge",
    "sluice:kv_blocks_used": "gauge",
}


class Exposition:
    """A parsed page of metrics; parsing fails where the format is broken."""

    def __init__(self, text: str) -> None:
        assert text.endswith("\n")
        self.kinds: dict[str, str] = {}
        self.samples: dict[tuple[str, str], float] = {}
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                assert name not in self.kinds
                self.kinds[name] = kind
                family = name
            elif not line.startswith("# HELP "):
                match = SAMPLE.fullmatch(line)
                assert match, line
                assert match[1].startswith(family), "a sample outside its family"
                assert (match[1], match[2]) not in self.samples
                self.samples[match[1], match[2]] = float(match[3])

    def value(self, name: str, label: str = "") -> float:
        return sum(value for (found, labels), value in self.samples.items() if found == name and label in labels)

    def buckets(self, name: str) -> Iterator[float]:
        return (value for (found, _), value in self.samples.items() if found == f"{name}_bucket")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(make_config(), FirstComeFirstServed())


@pytest.fixture
def metrics(scheduler: Scheduler, clock: Clock) -> Metrics:
    return Metrics('a "model" \\ of\nmine', scheduler, clock, Policies(None))


def page(metrics: Metrics) -> Exposition:
    return Exposition(metrics.render().decode())


def sequence(name: str = "r", prompt_length: int = 6) -> Sequence:
    return Sequence(name, "tenant", [3] * prompt_length, SamplingParams(), 4, 0, frozenset())


def test_every_expected_name_is_there_with_its_type(metrics: Metrics) -> None:
    assert EXPECTED.items() <= page(metrics).kinds.items()


def test_a_models_name_is_escaped(metrics: Metrics) -> None:
    assert r'model_name="a \"model\" \\ of\nmine"' in metrics.render().decode()


def test_gauges_follow_the_scheduler(metrics: Metrics, scheduler: Scheduler) -> None:
    scheduler.add(sequence("a"))
    scheduler.add(sequence("b"))
    assert page(metrics).value("vllm:num_requests_waiting") == 2
    assert scheduler.plan() is not None
    now = page(metrics)
    used = scheduler.config.num_blocks - scheduler.pool.num_free
    assert used > 0
    assert now.value("vllm:num_requests_running") == len(scheduler.running)
    assert now.value("sluice:kv_blocks_used") == used
    assert now.value("vllm:kv_cache_usage_perc") == pytest.approx(used / scheduler.config.num_blocks)
    assert now.value("vllm:gpu_cache_usage_perc") == now.value("vllm:kv_cache_usage_perc")


def test_the_block_size_and_count_are_labels(metrics: Metrics, scheduler: Scheduler) -> None:
    config = scheduler.config
    for label in (f'block_size="{config.block_size}"', f'num_gpu_blocks="{config.num_blocks}"'):
        assert page(metrics).value("vllm:cache_config_info", label) == 1


def test_each_outcome_is_counted_and_all_are_shown_from_the_start(metrics: Metrics) -> None:
    metrics.request_ended(a_story())
    metrics.request_ended(a_story())
    metrics.request_ended(a_story(operation=None))
    for outcome in Outcome:
        expected = 2 if outcome is Outcome.COMPLETED else 0
        assert page(metrics).value("sluice:requests_total", f'outcome="{outcome}"') == expected
        assert f'outcome="{outcome}"' in metrics.render().decode()


def test_every_token_but_the_first_has_a_gap_however_they_are_delivered(metrics: Metrics) -> None:
    last = metrics.tokens_delivered(sequence(), 0, 3, 0.0)
    metrics.tokens_delivered(sequence(), 3, 2, last)
    metrics.tokens_delivered(sequence(), 5, 0, last)
    assert page(metrics).value("vllm:time_to_first_token_seconds_count") == 1
    assert page(metrics).value("vllm:inter_token_latency_seconds_count") == 4


def test_the_first_token_and_the_gaps_between_the_others_are_timed(metrics: Metrics, clock: Clock) -> None:
    request = sequence()
    request.arrival = 10.0
    clock.now = 10.5
    last = metrics.tokens_delivered(request, 0, 1, 0.0)
    clock.now = 10.9
    metrics.tokens_delivered(request, 1, 4, last)
    now = page(metrics)
    assert now.value("vllm:time_to_first_token_seconds_sum") == 0.5
    assert now.value("vllm:time_to_first_token_seconds_count") == 1
    assert now.value("vllm:inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert now.value("vllm:inter_token_latency_seconds_count") == 4
    assert now.value("vllm:time_per_output_token_seconds_count") == 4


@pytest.mark.parametrize("name", ["vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"])
def test_buckets_are_cumulative_and_end_with_the_count(metrics: Metrics, clock: Clock, name: str) -> None:
    for seconds in (0.0001, 0.02, 0.3, 5.0, 1000.0):
        clock.now = seconds
        metrics.tokens_delivered(sequence(), 1, 1, 0.0)
        metrics.tokens_delivered(sequence(), 0, 1, 0.0)
    counts = list(page(metrics).buckets(name))
    assert counts == sorted(counts)
    assert counts[-1] == page(metrics).value(f"{name}_count") == 5


@pytest.mark.parametrize("bounds", [TTFT_BUCKETS, GAP_BUCKETS])
def test_a_value_on_a_bound_belongs_below_it(bounds: tuple[float, ...]) -> None:
    histogram = Histogram(bounds)
    histogram.observe(bounds[3])
    assert histogram.counts[3] == 1


def test_a_live_server_counts_what_it_did(server: ServerProcess) -> None:
    def scrape() -> Exposition:
        reply = httpx.get(f"{server.url}/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        return Exposition(reply.text)

    before = scrape()
    body = completion(prompt=[5, 6, 7], max_tokens=9, ignore_eos=True)
    for _ in range(3):
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=server.headers).status_code == 200
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 401
    after = scrape()

    def grown(name: str, label: str = "") -> float:
        return after.value(name, label) - before.value(name, label)

    assert EXPECTED.items() <= after.kinds.items()
    assert grown("vllm:prompt_tokens_total") == 9
    assert grown("vllm:generation_tokens_total") == 27
    assert grown("vllm:time_to_first_token_seconds_count") == 3
    assert grown("vllm:inter_token_latency_seconds_count") == 24
    assert grown("sluice:requests_total", 'outcome="completed"') == 3
    assert grown("sluice:requests_total", 'outcome="invalid"') == 1
