import asyncio
import re

from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.metrics.labels import OTHER, TenantLabels
from gateway.telemetry.metrics.prometheus import exposition, exposition_in_turns
from gateway.telemetry.metrics.registry import Family, HistogramSeries, Kind, Registry
from tests.gateway.telemetry.metrics_rig import LABEL, Page

BOUNDS = (0.1, 0.5, 2.0)


def unescaped(value: str) -> str:
    return re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), value)


def name_of(name: str, kind: Kind, unit: str) -> str:
    return Family(name, kind, unit, "").prometheus_name


def test_names_follow_from_opentelemetrys() -> None:
    assert name_of("gen_ai.server.request.duration", Kind.HISTOGRAM, "s") == "gen_ai_server_request_duration_seconds"
    assert name_of("sluice.kv.wasted", Kind.GAUGE, "By") == "sluice_kv_wasted_bytes"
    assert name_of("sluice.kv.bytes", Kind.GAUGE, "By") == "sluice_kv_bytes"
    assert name_of("sluice.kv.byte_seconds", Kind.COUNTER, "By.s") == "sluice_kv_byte_seconds_total"
    assert name_of("sluice.estimate.coverage", Kind.GAUGE, "1") == "sluice_estimate_coverage_ratio"
    assert name_of("sluice.requests", Kind.COUNTER, "") == "sluice_requests_total"
    assert name_of("vllm:prompt_tokens_total", Kind.COUNTER, "") == "vllm:prompt_tokens_total"


@given(st.lists(st.floats(0, 10), max_size=50))
def test_a_histogram_is_cumulative_and_holds_all(values: list[float]) -> None:
    registry = Registry()
    histogram = registry.histogram("x.time", "Time.", BOUNDS).at()
    for value in values:
        histogram.observe(value)
    page = Page(exposition(registry.collect()).decode())
    counts = list(page.buckets("x_time_seconds"))
    assert counts == [sum(value <= bound for value in values) for bound in (*BOUNDS, float("inf"))]
    assert page.value("x_time_seconds_count") == len(values)
    assert abs(page.value("x_time_seconds_sum") - sum(values)) < 1e-6


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = HistogramSeries(BOUNDS)
    histogram.observe(0.5, 3)
    assert histogram.counts == [0, 3, 0, 0]


@given(st.text(), st.text(min_size=1))
def test_no_label_breaks_the_format(model: str, tenant: str) -> None:
    registry = Registry()
    registry.counter("x", 'A "count"\nof \\ things.', ("tenant",)).at(tenant).value += 2
    text = exposition(registry.collect(), (("model_name", model),)).decode()
    lines = text.split("\n")
    assert len(lines) == 4 and lines[-1] == ""
    labels = {name: unescaped(value) for name, value in LABEL.findall(lines[2])}
    assert labels == {"tenant": tenant} | ({"model_name": model} if model else {})


def test_a_lone_surrogate_in_a_name_is_replaced() -> None:
    registry = Registry()
    registry.counter("x", "X.", ("tenant",)).at("\ud800")
    assert b'x_total{tenant="?"} 0' in exposition(registry.collect())


def test_a_collected_family_does_not_change_any_more() -> None:
    registry = Registry()
    count, histogram = registry.counter("x", "X.").at(), registry.histogram("y", "Y.", BOUNDS).at()
    before = registry.collect()
    text = exposition(before)
    count.value += 1
    histogram.observe(1.0)
    assert exposition(before) == text != exposition(registry.collect())


async def test_a_page_that_is_written_in_turns_is_the_same() -> None:
    registry = Registry()
    for number in range(9):
        counts = registry.counter(f"x{number}", "X.", ("tenant",))
        for tenant in range(50):
            counts.at(f"t{tenant}")
    turns, constant = 0, (("model_name", "m"),)
    writing = asyncio.create_task(exposition_in_turns(readings := registry.collect(), constant))
    while not writing.done():
        await asyncio.sleep(0)
        turns += 1
    assert await writing == exposition(readings, constant)
    assert turns > 2


@given(st.lists(st.text()))
def test_tenants_have_a_bounded_number_of_labels(tenants: list[str]) -> None:
    labels = TenantLabels(3)
    given = [labels.of(tenant) for tenant in tenants]
    assert len(set(given) - {OTHER}) <= 3
    assert given == [labels.of(tenant) for tenant in tenants], "a label once given changes"
    assert all(label in (tenant, OTHER) for label, tenant in zip(given, tenants, strict=True))
