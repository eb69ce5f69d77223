"""The collector that spans and metrics go to, as the settings name it, and who we are to it."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Literal, TypeVar
from urllib.parse import unquote
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.grpc import exporter as grpc_exporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from gateway.settings import otel_variables
from gateway.settings.settings import Settings
from gateway.telemetry import semconv

TIMEOUT = 5.0  # seconds for one export, its retries included
NAME = "sluice"  # by which receivers know us
SCOPE = InstrumentationScope(NAME)

Signal = Literal["traces", "metrics"]
Exporter = TypeVar("Exporter")


@dataclass(frozen=True, slots=True)
class Collector:
    """A receiver of OTLP (https://opentelemetry.io/docs/specs/otlp/)."""

    endpoint: str  # a base: over HTTP each signal has a path below it
    protocol: Literal["grpc", "http"]
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, settings: Settings) -> "Collector | None":
        if settings.otlp_endpoint is None or otel_variables.is_disabled():
            return None
        pairs = settings.otlp_headers.get_secret_value().split(",") if settings.otlp_headers else []
        headers = {name.lower(): unquote(value) for name, _, value in (pair.partition("=") for pair in pairs)}
        return cls(settings.otlp_endpoint, settings.otlp_protocol, headers)

    def url(self, signal: Signal) -> str:
        """Where to send it."""
        return self.endpoint if self.protocol == "grpc" else f"{self.endpoint.rstrip('/')}/v1/{signal}"

    def exporter(self, signal: Signal, grpc: Callable[..., Exporter], http: Callable[..., Exporter]) -> Exporter:
        """The SDK's exporter to this collector, of the two kinds that there are.

        TLS files, proxies and compression are as the standard variables say, such as OTEL_EXPORTER_OTLP_CERTIFICATE.
        """
        make = grpc if self.protocol == "grpc" else http
        timeout = otel_variables.milliseconds("OTEL_BSP_EXPORT_TIMEOUT", TIMEOUT) if signal == "traces" else TIMEOUT
        return make(
            endpoint=self.url(signal),
            headers=dict(self.headers),
            timeout=otel_variables.milliseconds("OTEL_EXPORTER_OTLP_TIMEOUT", timeout),
        )


@cache
def resource() -> Resource:
    """This process, as every span and metric names it. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` win over what
    we call ourselves.
    """
    ours = {
        semconv.SERVICE_NAME: NAME,
        semconv.SERVICE_VERSION: version("sluice"),
        semconv.SERVICE_INSTANCE_ID: str(uuid4()),
    }
    chosen = OTELResourceDetector().detect().attributes
    return Resource.create({name: value for name, value in ours.items() if name not in chosen})


class _Said(threading.local):
    first = ""


class Complaints(logging.Handler):
    """What the SDK's exporters say of a failed export: each thread's first message, and none of them in the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said = _Said()

    def emit(self, record: logging.LogRecord) -> None:
        self._said.first = self._said.first or record.getMessage()

    def take(self) -> str:
        """Of this thread since it last asked."""
        first, self._said.first = self._said.first, ""
        return first or "it gave no reason"


complaints = Complaints()
_exporters = logging.getLogger("opentelemetry.exporter")
_exporters.addHandler(complaints)
_exporters.propagate = False
grpc_exporter.logger.filters.clear()  # it drops, for 20 s, what another signal's exporter has said too
