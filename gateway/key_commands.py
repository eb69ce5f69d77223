"""`sluice keys`: make, list and revoke API keys. A running gateway learns of a change when it restarts."""

import re
import sys
from argparse import ArgumentTypeError, Namespace, _SubParsersAction
from datetime import UTC, datetime, timedelta
from typing import Any

from gateway.auth import new_key, pepper_of
from gateway.flags import add_flags, load
from gateway.key_store import KeyStore, KeyStoreError

TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_DAYS = 36_500


def add_to(commands: "_SubParsersAction[Any]") -> None:
    keys = commands.add_parser("keys", help="make, list and revoke API keys", description=__doc__)
    actions = keys.add_subparsers(title="commands", metavar="COMMAND", required=True)
    create = actions.add_parser("create", help="make a key and print it, this once")
    create.add_argument("tenant", metavar="TENANT", type=_tenant, help="on whose behalf its requests run")
    create.add_argument("--expires-days", metavar="DAYS", type=_days, help="(default: it does not expire)")
    create.set_defaults(run=_create)
    actions.add_parser("list", help="list the keys, not their secrets").set_defaults(run=_list)
    revoke = actions.add_parser("revoke", help="forget a key")
    revoke.add_argument("id", metavar="ID", help="as `sluice keys list` shows it")
    revoke.set_defaults(run=_revoke)
    for action in actions.choices.values():
        add_flags(action, only=("state_dir",))
        action.set_defaults(parser=action)


def _tenant(text: str) -> str:
    if TENANT.fullmatch(text):
        return text
    raise ArgumentTypeError("1 to 64 letters, digits, dots, dashes and underscores, the first a letter or a digit")


def _days(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= MAX_DAYS:
        return int(text)
    raise ArgumentTypeError(f"whole days, 1 to {MAX_DAYS}")


def _create(namespace: Namespace) -> int:
    settings = load(namespace)
    store = KeyStore(settings.state_dir)
    expires = datetime.now(UTC) + timedelta(days=namespace.expires_days) if namespace.expires_days else None
    key, record = new_key(namespace.tenant, pepper_of(settings, store), expires)
    store.add(record)
    print(key)
    print("Shown this once. A running gateway knows it after a restart.", file=sys.stderr)
    return 0


def _list(namespace: Namespace) -> int:
    print(f"{'id':10}{'tenant':24}{'created':22}expires")
    for record in KeyStore(load(namespace).state_dir).records():
        expires = f"{record.expires:%Y-%m-%d %H:%M}" if record.expires else "never"
        print(f"{record.id:10}{record.tenant:24}{record.created:%Y-%m-%d %H:%M}      {expires}")
    return 0


def _revoke(namespace: Namespace) -> int:
    if not KeyStore(load(namespace).state_dir).remove(namespace.id):
        raise KeyStoreError(f"there is no key {namespace.id}: see `sluice keys list`")
    print("A running gateway forgets it after a restart.", file=sys.stderr)
    return 0
