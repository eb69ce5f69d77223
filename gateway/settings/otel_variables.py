"""Reads the variables of OpenTelemetry's SDK that this gateway obeys, and warns of the others.

The specification: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

import math
import os
from collections.abc import Mapping
from typing import Literal

SAMPLERS = {
    "parentbased_always_on": 1.0,
    "parentbased_always_off": 0.0,
    "parentbased_traceidratio": None,  # None: OTEL_TRACES_SAMPLER_ARG
    "always_on": 1.0,
    "always_off": 0.0,
    "traceidratio": None,
}
_OTLP = "OTEL_EXPORTER_OTLP_"
_OF_THE_EXPORTER = (
    "ENDPOINT", "PROTOCOL", "HEADERS", "CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY", "COMPRESSION", "INSECURE",
    "TIMEOUT", "METRICS_TEMPORALITY_PREFERENCE",
)  # fmt: skip
_HONOURED = {
    "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS",
    "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG", "OTEL_METRIC_EXPORT_INTERVAL",
    *("OTEL_BSP_" + name for name in ("SCHEDULE_DELAY", "MAX_QUEUE_SIZE", "MAX_EXPORT_BATCH_SIZE", "EXPORT_TIMEOUT")),
    *(_OTLP + name for name in _OF_THE_EXPORTER),
}  # fmt: skip
_AS_WE_ARE = {  # values that match the gateway's behaviour
    "OTEL_TRACES_EXPORTER": {"otlp"},
    "OTEL_METRICS_EXPORTER": {"otlp"},
    "OTEL_LOGS_EXPORTER": {"none"},
    "OTEL_PROPAGATORS": {"tracecontext", "tracecontext,baggage"},
}
_REMEDIES = {
    "OTEL_TRACES_EXPORTER": "without --otlp-endpoint nothing is sent",
    "OTEL_METRICS_EXPORTER": "without --otlp-endpoint nothing is sent",
    "OTEL_METRIC_EXPORT_TIMEOUT": "set OTEL_EXPORTER_OTLP_TIMEOUT",
    "OTEL_LOGS_EXPORTER": "set --otlp-logs",
    "OTEL_PROPAGATORS": "traces are continued by W3C Trace Context alone",
    "OTEL_LOG_LEVEL": "set --log-level",
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
    asked = {name: value.strip() for name, value in environ.items() if name.startswith("OTEL_") and value.strip()}
    return [line for name, value in sorted(asked.items()) if (line := _objection(name, value))]


def _objection(name: str, value: str) -> str | None:
    shown = f"{name}={value:.40}"
    if value in _AS_WE_ARE.get(name, ()):
        return None
    if name not in _HONOURED:
        return f"{shown} is not obeyed{_remedy(name)}"
    if name == "OTEL_TRACES_SAMPLER":
        return _objection_to_sampler(shown, value)
    if name.startswith("OTEL_BSP_") or name in ("OTEL_METRIC_EXPORT_INTERVAL", "OTEL_EXPORTER_OTLP_TIMEOUT"):
        return None if _number(value) else f"{shown} is no number above 0, and the default holds"
    return None


def _objection_to_sampler(shown: str, value: str) -> str | None:
    if value not in SAMPLERS:
        return f"{shown} is no sampler known here, and --trace-sample-ratio holds; use one of {', '.join(SAMPLERS)}"
    if not value.startswith("parentbased_"):
        return f"{shown} is taken as parentbased_{value}: a client's own decision to trace is followed"
    return None


def _remedy(name: str) -> str:
    signal: Literal["TRACES", "METRICS", "LOGS"]
    for signal in ("TRACES", "METRICS", "LOGS"):
        prefix = f"{_OTLP}{signal}_"
        if name.startswith(prefix):
            return f": traces and metrics go one way, set {_OTLP}{name.removeprefix(prefix)}"
    return f": {_REMEDIES[name]}" if name in _REMEDIES else ""


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None
