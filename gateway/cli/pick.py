"""`sluice pick`: picks a replica for each request of a Kubernetes gateway."""

from argparse import Namespace, _SubParsersAction
from functools import partial
from typing import Any

from gateway.cli.flags import add_flags, load
from gateway.cli.fleet_flags import EPILOG, SETTINGS, add_fleet_flags, fleet_options
from gateway.telemetry.logs.logs import STDERR, logging_to

EXCHANGES = {"max_connections": "most concurrent requests"}


def add_pick_command(commands: "_SubParsersAction[Any]") -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "pick",
        help="pick endpoints for a gateway of Kubernetes",
        description="Picks the replica with the earliest predicted first token for each request of a gateway, by the\n"
        "endpoint picker protocol (Envoy's external processing over gRPC).",
        usage="sluice pick (--replicas-dns NAME:PORT:ADMIN | --replicas FILE | --replicas-store MODEL) [flags]",
        epilog=EPILOG,
    )
    add_fleet_flags(parser)
    add_flags(parser, SETTINGS | EXCHANGES)
    parser.set_defaults(run=_pick, parser=parser)


def _pick(namespace: Namespace) -> int:
    settings = load(namespace)
    options = fleet_options(namespace, settings, by_address=True)
    from fleet.ext_proc.server import run_picker  # noqa: PLC0415 - no other command needs it

    with logging_to(STDERR, settings):
        return run_picker(settings, options, announce=partial(print, flush=True))
