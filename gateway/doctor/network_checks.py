"""Checks of the network: ports to listen on, and the collector to reach."""

import os
import socket
from urllib.parse import urlsplit

from gateway.doctor.check import Check, ok, problem, warning
from gateway.http.connection import bound_socket
from gateway.http.server import why_not_listening
from gateway.settings import otel_variables
from gateway.settings.settings import Settings

CONNECT_SECONDS = 3.0
GRPC_PORT, HTTP_PORTS = 443, {"http": 80, "https": 443}
"""Ports to which the exporters connect where an address has none."""


def ports(settings: Settings) -> list[Check]:
    checks = [_port("port", settings.host, settings.port, "--")]
    if settings.admin_port == "off":
        return [*checks, ok("admin port", "off: no metrics, no page, and no `sluice doctor --live`")]
    return [*checks, _port("admin port", settings.admin_host, settings.admin_port, "--admin-")]


def _port(name: str, host: str, port: int, prefix: str) -> Check:
    try:
        bound_socket(host, port).close()
    except OSError as error:
        return problem(name, why_not_listening(error, host, port, prefix))
    return ok(name, f"{host}:{port} is free" if port else f"any free one of {host}")


def otel() -> Check:
    """Check that every OpenTelemetry variable is obeyed."""
    objections = otel_variables.ignored(os.environ)
    if not objections:
        return ok("otel", "every OTEL_* variable that is set is obeyed")
    return warning("otel", "; ".join(objections), "unset the variables that are not meant for this gateway")


def collector(settings: Settings) -> Check:
    """Check that the collector can be reached; a warning at most, as requests do not depend on it."""
    if otel_variables.is_disabled():
        return ok("collector", "none: OTEL_SDK_DISABLED is true, so nothing is sent anywhere")
    if settings.otlp_endpoint is None:
        return ok("collector", "none: spans are not sent anywhere (--otlp-endpoint)")
    parts = urlsplit(settings.otlp_endpoint)
    port = parts.port or (GRPC_PORT if settings.otlp_protocol == "grpc" else HTTP_PORTS[parts.scheme])
    host = parts.hostname or ""
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        return warning(
            "collector",
            f"{host}:{port} cannot be reached ({error.strerror or error})",
            "spans and pushed metrics are lost until it can; see --otlp-endpoint",
        )
    return ok("collector", f"{host}:{port} accepts connections")
