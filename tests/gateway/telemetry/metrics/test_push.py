import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric

from gateway.settings.settings import Settings
from gateway.telemetry.metrics.prometheus import exposition
from gateway.telemetry.metrics.push import MODEL, MetricPush, metric_exporter, pushing
from gateway.telemetry.metrics.registry import Reading
from gateway.telemetry.otlp import Collector, resource
from tests.gateway.telemetry.metrics_rig import Page, Rig
from tests.gateway.telemetry.otlp_receiver import Manner, Receiver, plain
from tests.gateway.telemetry.records import a_record

CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
PATIENCE = 240.0  # seconds


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


def push_of(
    rig: Rig, endpoint: str, protocol: Any = "grpc", collect: Callable[[], list[Reading]] | None = None
) -> MetricPush:
    exporter = metric_exporter(Collector(endpoint, protocol, {"authorization": "Bearer secret"}))
    return MetricPush(exporter, collect or rig.metrics.registry.collect, rig.metrics.process.pushed, resource(), 3600.0)


def results(rig: Rig) -> dict[str, float]:
    page = rig.page()
    names = page.labels("sluice_metric_exports_total", "result")
    return {name: page.value("sluice_metric_exports_total", result=name) for name in names}


def points(metric: Metric) -> Any:
    return getattr(metric, metric.WhichOneof("data") or "").data_points


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_push_carries_what_a_scrape_shows(rig: Rig, receiver: Receiver, protocol: str) -> None:
    rig.tell(a_record())
    readings = rig.metrics.registry.collect()  # once: what the kernel says changes meanwhile
    page = Page(exposition(readings, (("model_name", "embedded"),)).decode())
    push = push_of(rig, receiver.endpoint(protocol), protocol, lambda: readings)
    push.push()
    await until(lambda: results(rig)["exported"] == 1)
    families = {family.name: family for family in rig.metrics.registry.families if not family.is_foreign}
    metrics = {metric.name: metric for metric in receiver.metrics}
    assert metrics.keys() == families.keys()
    for name, family in families.items():
        assert metrics[name].unit == family.unit and metrics[name].description == family.meaning
        _assert_equal(metrics[name], page, family.prometheus_name)
    assert receiver.metadata[0]["authorization"] == "Bearer secret"
    await push.close()


def _assert_equal(metric: Metric, page: Page, name: str) -> None:
    for point in points(metric):
        labels = {key.replace(".", "_"): value for key, value in plain(point.attributes).items()}
        pairs = frozenset({*labels.items(), ("model_name", "embedded")})
        if metric.WhichOneof("data") == "histogram":
            assert metric.histogram.aggregation_temporality == CUMULATIVE
            assert page.samples[f"{name}_count", pairs] == point.count == sum(point.bucket_counts)
            assert page.samples[f"{name}_sum", pairs] == pytest.approx(point.sum)
            assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
        else:
            assert page.samples[name, pairs] == pytest.approx(point.as_double or point.as_int)
        if metric.WhichOneof("data") == "sum":
            assert metric.sum.is_monotonic and metric.sum.aggregation_temporality == CUMULATIVE
        if metric.WhichOneof("data") != "gauge":
            assert 0 < point.start_time_unix_nano <= point.time_unix_nano


async def test_the_resource_names_the_process_and_its_model(receiver: Receiver) -> None:
    settings = Settings(otlp_endpoint=receiver.endpoint("grpc"), metrics_interval=3600)
    async with pushing(settings, Rig().metrics):
        pass
    (resource,) = receiver.resources
    assert resource["service.name"] == "sluice"
    assert resource["service.instance.id"] and resource[MODEL] == "embedded"


async def test_without_a_collector_nothing_is_pushed(rig: Rig) -> None:
    async with pushing(Settings(otlp_endpoint=None), rig.metrics):
        pass
    assert set(results(rig).values()) == {0}


async def test_the_next_push_is_skipped_while_a_collector_hangs(receiver: Receiver) -> None:
    receiver.manner = Manner.HANG
    rig = Rig()
    push = push_of(rig, receiver.endpoint("grpc"))
    push.push()
    await until(lambda: receiver.attempts == 1)
    push.push()
    push.push()
    assert results(rig) == {"exported": 0, "failed": 0, "skipped": 2}
    await push.close(seconds=0.01)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_refusal_is_counted_and_said_once(
    receiver: Receiver, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.manner = Manner.REFUSE
    rig = Rig()
    push = push_of(rig, receiver.endpoint(protocol), protocol)
    for number in (1, 2):
        push.push()
        await until(lambda number=number: results(rig)["failed"] == number)  # type: ignore[misc]
    receiver.manner = Manner.ACCEPT
    push.push()
    await until(lambda: results(rig)["exported"] == 1)
    await push.close()
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("gateway")]
    (said,) = [line for line in ours if "does not take metrics" in line]
    assert "every 3600 s: Failed to export" in said
    assert "secret" not in caplog.text


async def test_a_collector_that_is_away_costs_neither_the_loop_nor_the_end(rig: Rig) -> None:
    push = push_of(rig, "http://127.0.0.1:9")
    push.push()
    await asyncio.sleep(0)
    await push.close(seconds=0.05)
