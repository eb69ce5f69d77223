"""`sluice route`: one address for several replicas."""

import re
from argparse import Namespace, _SubParsersAction
from functools import partial
from pathlib import Path
from typing import Any

from gateway.cli.arguments import argument
from gateway.cli.flags import SettingsError, add_flags, load
from gateway.settings.machine import SPARE_FILES, allow_files
from gateway.telemetry.logs.logs import STDERR, logging_to

SETTINGS = {
    "policy": "the replicas' policy file, or folder of them; edits take effect while routing",
    "host": "address to listen on",
    "port": "port to listen on; 0: any free one",
    "max_connections": "most connections at once",
    "max_connections_per_peer": "most connections of one address; auto: half of them, and all for this machine's own",
    "max_body_bytes": "largest request body; a larger one is answered 413",
    "max_unparsed_bytes": "most bytes of one tenant's bodies that are being read, and half as many of one key",
    "refused_per_second": "most requests of a key or an address that are refused in a second; further answers wait",
    "header_timeout": "time for a client to send its request's headers",
    "idle_timeout": "time a connection may stay open between two requests",
    "body_timeout": "time without progress after which a request's body is given up",
    "write_timeout": "time without progress after which a client that reads nothing is cut",
    "drain_delay": "how long a router that is told to stop serves on while it says it is not ready",
    "drain_timeout": "time for requests in flight to end by themselves, before they are ended with an error",
    "tls_cert_file": "certificate chain (PEM); turns TLS on",
    "tls_key_file": "private key of the certificate (PEM)",
    "state_dir": "where the replicas' pepper and hashes of API keys are, and the admin key",
    "demo_key": "API key of the tenant demo",
    "admin_host": "address that the admin port listens on",
    "admin_port": "port of the admin API, with /metrics and /admin/v1/fleet; 0: any free one; off: none",
    "log_level": "least severe message that is logged",
    "log_format": "of the messages on stderr",
    "dev": "for development: readable logs, down to debug messages",
}
ROUTINGS = ("predicted", "round_robin", "least_load", "weighted")
EPILOG = """\
SLUICE_PEPPER and SLUICE_ADMIN_KEY, which have no flags, are those of the replicas: the first opens the keys that they
open, and with the second the router asks their admin ports for their states. See docs/fleet.md."""


def _name_and_ports(text: str) -> tuple[str, int, int]:
    match = re.fullmatch(r"([\w.-]{1,253}):([0-9]{1,5}):([0-9]{1,5})", text, re.ASCII)
    if match is None or not all(0 < int(port) < 65_536 for port in match.groups()[1:]):
        raise ValueError("is no NAME:PORT:ADMIN, such as replicas.internal:8000:8001")
    return match[1], int(match[2]), int(match[3])


def add_route_command(commands: "_SubParsersAction[Any]") -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "route",
        help="serve one address for several replicas",
        description="Sends each request to the replica with the earliest predicted first token.",
        usage="sluice route (--replicas FILE | --replicas-dns NAME:PORT:ADMIN) [flags]",
        epilog=EPILOG,
    )
    fleet = parser.add_argument_group("fleet")
    which = fleet.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--replicas",
        metavar="FILE",
        type=Path,
        help="YAML file of the replicas' addresses; edits take effect while routing",
    )
    which.add_argument(
        "--replicas-dns",
        metavar="NAME:PORT:ADMIN",
        type=argument(_name_and_ports),
        help="name each of whose addresses is a replica's, with their API's and admin ports; asked for every second",
    )
    fleet.add_argument(
        "--routing",
        choices=ROUTINGS,
        default="predicted",
        help="how a replica is picked (default: predicted); the others are there to be measured against",
    )
    fleet.add_argument(
        "--state-interval",
        metavar="SECONDS",
        type=_interval,
        default=0.1,
        help="time between two questions for a replica's state (default: 0.1)",
    )
    fleet.add_argument(
        "--replica-ca-file",
        metavar="FILE",
        type=Path,
        help="certificate (PEM) of who signs those of the replicas (default: whom the system trusts)",
    )
    add_flags(parser, SETTINGS)
    parser.set_defaults(run=_route, parser=parser)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds <= 1:
        raise ValueError("is no interval: 0.01 to 1 seconds")
    return seconds


_interval = argument(_seconds)


def _route(namespace: Namespace) -> int:
    settings = load(namespace)
    connections = settings.max_connections
    if not allow_files(2 * connections + SPARE_FILES):
        raise SettingsError(
            f"--max-connections {connections} needs {2 * connections} + {SPARE_FILES} open files in a router, one for "
            "each side, and this process may not open as many: lower it, or raise that limit "
            "(`ulimit -Hn`, LimitNOFILE= of a systemd unit, --ulimit nofile= of a container)"
        )
    from fleet.membership import DnsMembership, FileMembership, Membership  # noqa: PLC0415 - no other command needs it
    from fleet.picker import Routing  # noqa: PLC0415
    from fleet.process import FleetOptions  # noqa: PLC0415
    from fleet.replicas import ReplicasError  # noqa: PLC0415
    from fleet.router import run_router  # noqa: PLC0415

    dns = namespace.replicas_dns
    try:
        membership: Membership = FileMembership(namespace.replicas) if dns is None else DnsMembership(*dns)
    except ReplicasError as error:
        raise SettingsError(f"--replicas {error}") from None
    routing, interval, ca_file = Routing(namespace.routing), namespace.state_interval, namespace.replica_ca_file
    with logging_to(STDERR, settings):
        return run_router(
            settings, FleetOptions(membership, routing, interval, ca_file), announce=partial(print, flush=True)
        )
