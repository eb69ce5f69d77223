"""`sluice admins`: admins with keys of their own and roles. Running gateways on the directory follow at once."""

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _SubParsersAction
from typing import Any

from gateway.admin.admins import MAX_NAME_CHARS, AdminStore, Role
from gateway.cli.audit import on_record
from gateway.cli.flags import add_flags, load
from gateway.table import table
from gateway.tenants.key_store import KeyStore

STATE_DIR = "the gateway's state directory, with the digests of admins' keys"
STORED = "Shown this once. It opens the admin page and API of gateways with this state directory."
ROLES = "viewer: reads; operator: also ends requests, has the policy read, drains; admin: also changes keys and policy"


def add_admins_command(commands: "_SubParsersAction[Any]") -> None:
    admins = commands.add_parser("admins", help="make, list and revoke admins' keys", description=__doc__)
    admins.set_defaults(parser=admins)
    actions = admins.add_subparsers(title="commands", metavar="COMMAND")
    create = actions.add_parser("create", help="make an admin's key and print it, this once")
    _add_name(create)
    create.add_argument("--role", choices=[*Role], default=Role.VIEWER, help=f"{ROLES} (default: {Role.VIEWER})")
    listing = actions.add_parser("list", help="list the admins, not their keys")
    revoking = actions.add_parser("revoke", help="revoke an admin's key")
    _add_name(revoking)
    for parser, run in ((create, _create), (listing, _list), (revoking, _revoke)):
        add_flags(parser, only={"state_dir": STATE_DIR})
        parser.set_defaults(run=run, parser=parser)


def _add_name(parser: ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", type=_name, help="the admin's name in the audit log")


def _name(text: str) -> str:
    if not (0 < len(text) <= MAX_NAME_CHARS and text.isprintable() and text == text.strip()):
        raise ArgumentTypeError(f"a name has 1 to {MAX_NAME_CHARS} printable characters, got {text!r:.100}")
    return text


def _create(namespace: Namespace) -> int:
    store = KeyStore(load(namespace).state_dir)
    with on_record(store, "admins.create", f"{namespace.name} as {namespace.role}"):
        key = AdminStore(store).create(namespace.name, Role(namespace.role))
    print(key)
    print(STORED, file=sys.stderr)
    return 0


def _list(namespace: Namespace) -> int:
    admins = AdminStore(KeyStore(load(namespace).state_dir)).read()
    rows = [(one.name, one.role.value, one.created[:16].replace("T", " ")) for one in admins.values()]
    print(table(("name", "role", "created"), rows), end="")
    return 0


def _revoke(namespace: Namespace) -> int:
    store = KeyStore(load(namespace).state_dir)
    with on_record(store, "admins.revoke", namespace.name):
        AdminStore(store).revoke(namespace.name)
    print("Gateways with this state directory refuse it from now on.", file=sys.stderr)
    return 0
