import re

import pytest
from opentelemetry.sdk import environment_variables

from gateway.cli.flags import SettingsError, load
from gateway.settings import otel_variables
from gateway.settings.settings import Settings
from gateway.telemetry.otlp import Collector, resource
from gateway.telemetry.tracing.exporter import background_exporter


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in vars(environment_variables):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name, raising=False)
    resource.cache_clear()


@pytest.mark.parametrize(
    ("sampler", "argument", "ratio"),
    [
        (None, None, 0.01),
        ("parentbased_always_on", None, 1.0),
        ("parentbased_always_off", None, 0.0),
        ("parentbased_traceidratio", "0.25", 0.25),
        ("parentbased_traceidratio", None, 1.0),
        ("always_on", "0.5", 1.0),
        ("jaeger_remote", "0.5", 0.01),
    ],
)
def test_the_sampler_is_the_default_of_the_ratio(
    sampler: str | None, argument: str | None, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("OTEL_TRACES_SAMPLER", sampler), ("OTEL_TRACES_SAMPLER_ARG", argument)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert Settings().trace_sample_ratio == ratio
    assert Settings(trace_sample_ratio=0.125).trace_sample_ratio == 0.125


def test_a_ratio_that_is_none_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from argparse import Namespace  # noqa: PLC0415

    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1 in 10")
    with pytest.raises(SettingsError, match=r"--trace-sample-ratio .*got '1 in 10'"):
        load(Namespace())


def test_a_disabled_sdk_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(otlp_endpoint="http://localhost:4317")
    assert Collector.of(settings) is not None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "TRUE")
    assert Collector.of(settings) is None


def test_the_resource_is_named_as_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resource().attributes["service.name"] == "sluice"
    resource.cache_clear()
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=one,service.version=9,team=ml")
    attributes = resource().attributes
    assert (attributes["service.name"], attributes["service.version"], attributes["team"]) == ("one", "9", "ml")
    resource.cache_clear()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "two")
    assert resource().attributes["service.name"] == "two"
    resource.cache_clear()


def test_batches_of_spans_are_as_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "20")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "7")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "250")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "60000")
    exporter = background_exporter(Collector("http://127.0.0.1:1", "http"))
    try:
        batches = exporter._processor._batch_processor
        bounds = batches._max_queue_size, batches._max_export_batch_size, batches._schedule_delay
        assert bounds == (exporter._max_waiting, 7, 0.25) == (20, 7, 0.25)
    finally:
        exporter._close(0.0)
    assert Settings().metrics_interval == 60.0


def test_every_variable_of_the_sdk_is_obeyed_or_named() -> None:
    every = {name: "1" for name in vars(environment_variables) if name.startswith("OTEL_")}
    named = {re.split("[= ]", line)[0] for line in otel_variables.ignored(every)}
    assert {"OTEL_SPAN_LINK_COUNT_LIMIT", "OTEL_TRACES_SAMPLER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"} <= named
    assert not named & {"OTEL_BSP_SCHEDULE_DELAY", "OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_ENDPOINT"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_SAMPLER", "xray"),
        ("OTEL_BSP_SCHEDULE_DELAY", "soon"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
    ],
)
def test_a_variable_that_is_not_obeyed_is_named_with_what_is(name: str, value: str) -> None:
    (line,) = otel_variables.ignored({name: value})
    assert line.startswith(f"{name}={value} is not obeyed") and "docs/tracing.md" in line


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"])
def test_no_value_that_may_be_a_secret_is_told(name: str) -> None:
    (line,) = otel_variables.ignored({name: "api-key=s3cret"})
    assert line.startswith(f"{name} is not obeyed") and "s3cret" not in line


def test_a_variable_that_asks_for_the_present_behaviour_is_not_named() -> None:
    said = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_PROPAGATORS": "tracecontext,baggage", "OTEL_LOGS_EXPORTER": "none"}
    assert otel_variables.ignored(said | {"OTEL_BSP_MAX_QUEUE_SIZE": ""}) == []
