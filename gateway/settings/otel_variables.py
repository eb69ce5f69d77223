"""Reads the variables of OpenTelemetry's SDK that this gateway obeys, and warns of the others.

The specification: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

import math
import os
from collections.abc import Mapping

SAMPLERS = {
    "parentbased_always_on": 1.0,
    "parentbased_always_off": 0.0,
    "parentbased_traceidratio": None,  # None: OTEL_TRACES_SAMPLER_ARG
    "always_on": 1.0,
    "always_off": 0.0,
    "traceidratio": None,
}
_OTLP_NAMES = (
    "ENDPOINT", "PROTOCOL", "HEADERS", "CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY", "COMPRESSION", "INSECURE",
    "TIMEOUT", "METRICS_TEMPORALITY_PREFERENCE",
)  # fmt: skip
_BSP_NAMES = ("SCHEDULE_DELAY", "MAX_QUEUE_SIZE", "MAX_EXPORT_BATCH_SIZE", "EXPORT_TIMEOUT")
_NUMBERS = {*["OTEL_BSP_" + name for name in _BSP_NAMES], "OTEL_METRIC_EXPORT_INTERVAL", "OTEL_EXPORTER_OTLP_TIMEOUT"}
_OBEYED = {
    "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS",
    "OTEL_TRACES_SAMPLER_ARG", *_NUMBERS, *["OTEL_EXPORTER_OTLP_" + name for name in _OTLP_NAMES],
}  # fmt: skip
_OBEYED_VALUES = {
    "OTEL_TRACES_SAMPLER": SAMPLERS.keys(),
    "OTEL_TRACES_EXPORTER": {"otlp"},
    "OTEL_METRICS_EXPORTER": {"otlp"},
    "OTEL_LOGS_EXPORTER": {"none"},
    "OTEL_PROPAGATORS": {"tracecontext", "tracecontext,baggage"},
}


def is_disabled() -> bool:
    """True if `OTEL_SDK_DISABLED` forbids all telemetry by OTLP."""
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def sample_ratio(default: float) -> float | str:
    """The share of requests to trace by `OTEL_TRACES_SAMPLER`, or a text that the setting then refuses."""
    sampler = os.environ.get("OTEL_TRACES_SAMPLER", "").strip()
    ratio = SAMPLERS.get(sampler, default)
    return (os.environ.get("OTEL_TRACES_SAMPLER_ARG") or 1.0) if ratio is None else ratio


def positive(name: str, default: float, unit: float = 1.0) -> float:
    """A variable's number, times `unit`; the default without a number above 0."""
    number = _number(os.environ.get(name, ""))
    return default if number is None else number * unit


def milliseconds(name: str, default: float) -> float:
    """A variable's milliseconds, in seconds."""
    return positive(name, default, 0.001)


def ignored(environ: Mapping[str, str]) -> list[str]:
    """A line for each variable of OpenTelemetry that has no effect."""
    asked = [(name, value.strip()) for name, value in sorted(environ.items()) if name.startswith("OTEL_")]
    return [
        f"{name}{_shown(name, value)} is not obeyed: docs/tracing.md lists the variables and the values that are"
        for name, value in asked
        if value and not _is_obeyed(name, value)
    ]


def _is_obeyed(name: str, value: str) -> bool:
    if name in _NUMBERS:
        return _number(value) is not None
    return name in _OBEYED or value in _OBEYED_VALUES.get(name, ())


def _shown(name: str, value: str) -> str:
    """The value, where it cannot be a secret, such as headers with an API key are."""
    return f"={value:.40}" if name in _NUMBERS or name in _OBEYED_VALUES else ""


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None
