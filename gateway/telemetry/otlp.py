"""The collector of spans, metrics and log records, and the resource that identifies this process."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, TypeVar
from urllib.parse import unquote
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.grpc import exporter as grpc_exporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from gateway.settings import otel_variables
from gateway.settings.settings import Settings
from gateway.version import VERSION

log = logging.getLogger(__name__)

EXPORT_TIMEOUT_SECONDS = 5.0  # for one export, its retries included
NAME = "sluice"  # of the service
SCOPE = InstrumentationScope(NAME)

Signal = Literal["traces", "metrics", "logs"]
Exporter = TypeVar("Exporter")


@dataclass(frozen=True, slots=True)
class Collector:
    """A receiver of OTLP, as the settings name it (https://opentelemetry.io/docs/specs/otlp/)."""

    endpoint: str  # a base: over HTTP each signal has a path below it
    protocol: Literal["grpc", "http"]
    headers: dict[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, settings: Settings) -> "Collector | None":
        """Returns the collector of these settings; None if they name none."""
        if settings.otlp_endpoint is None or otel_variables.is_disabled():
            return None
        pairs = settings.otlp_headers.get_secret_value().split(",") if settings.otlp_headers else []
        headers = {name.lower(): unquote(value) for name, _, value in (pair.partition("=") for pair in pairs)}
        return cls(settings.otlp_endpoint, settings.otlp_protocol, headers)

    def url(self, signal: Signal) -> str:
        """Returns the address to send a signal to."""
        return self.endpoint if self.protocol == "grpc" else f"{self.endpoint.rstrip('/')}/v1/{signal}"

    def exporter(self, signal: Signal, grpc: Callable[..., Exporter], http: Callable[..., Exporter]) -> Exporter:
        """Returns the SDK's exporter to this collector, of the kind that its protocol asks for.

        TLS files, proxies and compression are as the standard variables say, such as OTEL_EXPORTER_OTLP_CERTIFICATE.
        """
        make = grpc if self.protocol == "grpc" else http
        timeout = (
            otel_variables.milliseconds("OTEL_BSP_EXPORT_TIMEOUT", EXPORT_TIMEOUT_SECONDS)
            if signal == "traces"
            else EXPORT_TIMEOUT_SECONDS
        )
        return make(
            endpoint=self.url(signal),
            headers=dict(self.headers),
            timeout=otel_variables.milliseconds("OTEL_EXPORTER_OTLP_TIMEOUT", timeout),
        )


@cache
def resource() -> Resource:
    """Returns the resource that every span and metric names as its origin. `OTEL_SERVICE_NAME` and
    `OTEL_RESOURCE_ATTRIBUTES` take precedence over our own names.
    """
    ours = {
        "service.name": NAME,
        "service.version": VERSION,
        "service.instance.id": str(uuid4()),
    }
    chosen = OTELResourceDetector().detect().attributes
    return Resource.create({name: value for name, value in ours.items() if name not in chosen})


class _FirstMessage(threading.local):
    text = ""


class _ExportErrors(logging.Handler):
    """Keeps each thread's first message of the SDK's exporters about a failed export, out of the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._first = _FirstMessage()

    def emit(self, record: logging.LogRecord) -> None:
        self._first.text = self._first.text or record.getMessage()

    def take(self) -> str:
        """Returns this thread's first message since the last call, or says that there was none."""
        message, self._first.text = self._first.text, ""
        return message or "it gave no reason"


_export_errors = _ExportErrors()
_exporters = logging.getLogger("opentelemetry.exporter")
_exporters.addHandler(_export_errors)
_exporters.propagate = False
grpc_exporter.logger.filters.clear()  # they drop for 20 s a message logged by another signal's exporter


class DeliveryLog:
    """Logs the first failed export of a signal and the recovery, not each failure between. One thread exports."""

    def __init__(self, what: str, interval: float) -> None:
        self._what = what
        self._interval = interval  # seconds between exports
        self._failing = False

    def log(self, delivered: bool) -> None:
        reason = _export_errors.take()
        if delivered and self._failing:
            log.info("the collector takes %s again", self._what)
        elif not delivered and not self._failing:
            what, interval = self._what, self._interval
            log.warning("the collector does not take %s, and is tried again every %g s: %s", what, interval, reason)
        self._failing = not delivered
