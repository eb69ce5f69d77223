"""`sluice route`: one address for several replicas."""

from argparse import Namespace, _SubParsersAction
from functools import partial
from typing import Any

from gateway.cli.flags import SettingsError, add_flags, load
from gateway.cli.fleet_flags import EPILOG, SETTINGS, add_fleet_flags, fleet_options
from gateway.settings.machine import SPARE_FILES, allow_files
from gateway.telemetry.logs.logs import STDERR, logging_to

CONNECTIONS = {
    "max_connections": "most connections at once",
    "max_connections_per_peer": "most connections of one address; auto: half of them, and all for this machine's own",
    "header_timeout": "time for a client to send its request's headers",
    "idle_timeout": "time a connection may stay open between two requests",
    "write_timeout": "time without progress after which a client that does not read is cut",
}
TELEMETRY = {
    "otlp_endpoint": "OpenTelemetry collector that spans are sent to; nothing is sent without one",
    "otlp_protocol": "protocol of the collector: OTLP over gRPC, or protobuf over HTTP",
    "trace_sample_ratio": "share of requests without a client's trace that are traced, here and at the replica",
    "trace_slow_seconds": "wait for the first byte of an answer that has a request traced anyway",
    "trace_max_per_second": "most requests traced in a second; a quarter of it for one tenant",
}


def add_route_command(commands: "_SubParsersAction[Any]") -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "route",
        help="serve one address for several replicas",
        description="Sends each request to the replica with the earliest predicted first token.",
        usage="sluice route (--replicas FILE | --replicas-dns NAME:PORT:ADMIN | --replicas-store MODEL) [flags]",
        epilog=EPILOG,
    )
    add_fleet_flags(parser)
    add_flags(parser, SETTINGS | CONNECTIONS | TELEMETRY)
    parser.set_defaults(run=_route, parser=parser)


def _route(namespace: Namespace) -> int:
    settings = load(namespace)
    connections = settings.max_connections
    if not allow_files(2 * connections + SPARE_FILES):
        raise SettingsError(
            f"--max-connections {connections} needs {2 * connections} + {SPARE_FILES} open files in a router, one for "
            "each side, and this process may not open as many: lower it, or raise that limit "
            "(`ulimit -Hn`, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container)"
        )
    options = fleet_options(namespace, settings)
    from fleet.router import run_router  # noqa: PLC0415 - no other command needs it

    with logging_to(STDERR, settings):
        return run_router(settings, options, announce=partial(print, flush=True))
