"""The `sluice` command parses its arguments, runs a subcommand and turns errors into messages and exit statuses.

Exit status: 0 done, 1 it could not be done, 2 a usage error, 130 interrupted, 141 the reader closed the pipe.
"""

import logging
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from shutil import get_terminal_size
from typing import Any

from backend.errors import BackendError, ConfigError
from backend.extensions import extensions
from gateway.cli.flags import SettingsError, add_flags, load, misspelled, suggestion
from gateway.doctor.snapshot import DoctorError
from gateway.http.server import ListenError
from gateway.key_mask import masked
from gateway.settings import otel_variables
from gateway.settings.machine import allow_files
from gateway.settings.settings import FEW_FILES
from gateway.telemetry.event_log_file import EventLogError
from gateway.telemetry.logs.logs import STDERR, logging_to
from gateway.tenants.key_store import KeyStoreError
from gateway.version import VERSION
from quotas.embedded.errors import EmbeddedStoreError
from quotas.errors import QuotaError
from quotas.policy.policy_file import PolicyError

log = logging.getLogger(__name__)

NOTES = """\
Every flag is a variable too: --max-num-seqs is SLUICE_MAX_NUM_SEQS. A flag wins over its variable.
SLUICE_PEPPER has no flag, because other users of the machine can read a command line: it is the secret that API keys
are hashed with (default: DIR/pepper, made at first start); replicas that share keys share it.
Nor have SLUICE_ADMIN_KEY, the key of the admin port (default: made at first start, in DIR/admin-key), and
SLUICE_OTLP_HEADERS, headers for the collector: NAME=VALUE,NAME=VALUE, each VALUE URL-encoded."""

ADDED_BY = {
    "route": "gateway.cli.route:add_route_command",
    "pick": "gateway.cli.pick:add_pick_command",
    "keys": "gateway.cli.keys:add_keys_command",
    "admins": "gateway.cli.admins:add_admins_command",
    "policy": "gateway.cli.policy:add_policy_command",
    "usage": "gateway.cli.usage:add_usage_command",
    "plan": "gateway.cli.plan:add_plan_command",
    "doctor": "gateway.cli.doctor:add_doctor_command",
    "explain": "gateway.cli.event_log:add_event_log_commands",
    "replay": "gateway.cli.event_log:add_event_log_commands",
}
"""The function that adds each command. Its module is imported only for its command, or for the help."""

WITHOUT_OTHERS = ("serve", "version", "--version")

ASKED_WRONGLY = (SettingsError, ConfigError, PolicyError)
CANNOT_BE_DONE = (
    DoctorError, KeyStoreError, ListenError, EventLogError, EmbeddedStoreError, QuotaError, BackendError,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    namespace, unknown = _parser(words).parse_known_args(words)
    if unknown:
        namespace.parser.error(_unknown(unknown, namespace.parser))
    if not hasattr(namespace, "run"):  # a command with subcommands, given none
        namespace.parser.print_help()
        return 0
    try:
        status = int(namespace.run(namespace))
        sys.stdout.flush()
        return status
    except ASKED_WRONGLY as error:
        return _failed(error, 2)
    except CANNOT_BE_DONE as error:
        return _failed(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 141


def _serve(namespace: Namespace) -> int:
    settings = load(namespace)
    allow_files(settings.open_files)
    from gateway.app import run_gateway  # noqa: PLC0415 - brings torch, seconds that --help need not wait for

    with logging_to(STDERR, settings):
        for warning in [*misspelled(os.environ), *otel_variables.ignored(os.environ)]:
            log.warning("%s", warning)
        if settings.has_few_files:
            log.warning("at most %d connections: %s", settings.max_connections, FEW_FILES)
        return run_gateway(settings, announce=partial(print, flush=True))


def _version(_: Namespace) -> int:
    print(f"sluice {VERSION}")
    return 0


def _parser(words: Sequence[str]) -> ArgumentParser:
    """A parser that knows the command these words begin with; without a command, all commands."""
    parser = _Parser(
        prog="sluice",
        description="A multi-tenant LLM inference gateway with the engine inside.",
        epilog="Each command has its own --help.",
    )
    parser.add_argument("--version", action="version", help="print the version", version=f"sluice {VERSION}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over HTTP", usage="sluice serve [flags]", epilog=NOTES)
    add_flags(serve)
    serve.set_defaults(run=_serve, parser=serve)
    for place in _places(words):
        module, function = place.split(":")
        getattr(import_module(module), function)(commands)
    shown = commands.add_parser("version", help="print the version")
    shown.set_defaults(run=_version, parser=shown)
    return parser


def _places(words: Sequence[str]) -> list[str]:
    """The modules that add the command of these words; all, if the words may ask for help."""
    first = words[0] if words else ""
    if first in ADDED_BY:
        return [ADDED_BY[first]]
    if first in WITHOUT_OTHERS:
        return []
    added = {command: place for extension in extensions() for command, place in extension.COMMANDS.items()}
    return [added[first]] if first in added else [*dict.fromkeys([*ADDED_BY.values(), *added.values()])]


class _Parser(ArgumentParser):
    """An ArgumentParser whose help is as wide as the terminal, to a readable limit, and whose flags are not
    abbreviated.
    """

    def __init__(self, **options: Any) -> None:
        width = min(get_terminal_size().columns, 112)
        options.setdefault("formatter_class", partial(RawDescriptionHelpFormatter, width=width, max_help_position=34))
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)


def _unknown(unknown: Sequence[str], parser: ArgumentParser) -> str:
    known = [flag for action in parser._actions for flag in action.option_strings]
    named = [name.partition("=")[0] for name in unknown if name.startswith("-")] or unknown
    return "; ".join(f"unknown argument {name}{suggestion(name, known)}" for name in named)


def _failed(message: object, status: int) -> int:
    print(f"sluice: {masked(str(message))}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
