"""`sluice keys`: make, edit, list, rotate and revoke API keys. Gateways on the directory follow within a second."""

import json
import sys
from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml

from gateway.cli import arguments
from gateway.cli.audit import on_record
from gateway.cli.flags import SettingsError, add_flags, load
from gateway.settings.settings import Settings
from gateway.table import table
from gateway.tenants.auth import new_key, pepper_of
from gateway.tenants.key_source import UnknownKey, edit, revoke, rotate
from gateway.tenants.key_store import KeyRecord, KeyStore
from gateway.tenants.unnamed_tenants import unnamed_tenant_lines
from quotas.policy.key_settings import key_settings, read_key_settings
from quotas.policy.policy import DEFAULT_POLICY, SCOPES
from quotas.policy.policy_file import PolicyError, read_policy
from quotas.policy.problems import did_you_mean

STATE_DIR = "the gateway's state directory, with the pepper and the hashes of keys"
POLICY = "the gateway's policy; warn if the tenant is not in it"
OVERLAP = "24h"
STORED = "Shown this once. Running gateways with this state directory take it within a second."
PRINTED = "Shown this once, and stored nowhere. The lines below let it in, from a policy file."
EDITED = "Running gateways with this state directory take it within a second."
REVOKED = "Running gateways with this state directory refuse it within a second."


def add_keys_command(commands: "_SubParsersAction[Any]") -> None:
    keys = commands.add_parser("keys", help="make, list, rotate and revoke API keys", description=__doc__)
    keys.set_defaults(parser=keys)
    actions = keys.add_subparsers(title="commands", metavar="COMMAND")
    _add(actions, "create", _create, "make a key and print it, this once", _create_arguments)
    _add(actions, "edit", _edit, "change a key but for its secret", _edit_arguments)
    _add(actions, "list", _list, "list the stored keys, not their secrets", _list_arguments)
    _add(
        actions,
        "rotate",
        _rotate,
        "give a key a new secret and print it; the old one stays valid for a while",
        _rotate_arguments,
    )
    _add(actions, "revoke", _revoke, "revoke a key", _id_argument)


def _add(
    actions: "_SubParsersAction[Any]",
    name: str,
    run: Callable[[Namespace], int],
    summary: str,
    add_arguments: Callable[[ArgumentParser], object],
) -> None:
    parser = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    add_arguments(parser)
    add_flags(parser, only={"state_dir": STATE_DIR} | ({"policy": POLICY} if name in {"create", "edit"} else {}))
    parser.set_defaults(run=run, parser=parser)


def _create_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("tenant", metavar="TENANT", type=arguments.tenant, help="the tenant of its requests")
    _add_expiry(parser, "it does not expire")
    listed = f"what the key is for (default: all, {','.join(SCOPES)})"
    parser.add_argument("--scopes", metavar="SCOPES", type=arguments.scopes, default=SCOPES, help=listed)
    parser.add_argument(
        "--name",
        type=arguments.key_name,
        action="append",
        dest="names",
        help="a label, shown by `sluice keys list`; given several times, a key is made for each",
    )
    _add_settings(parser)
    parser.add_argument(
        "--print-policy",
        action="store_true",
        help="store nothing: print lines for a policy file, and the key to standard error",
    )


def _edit_arguments(parser: ArgumentParser) -> None:
    _id_argument(parser)
    _add_expiry(parser, "as it is")
    parser.add_argument("--scopes", metavar="SCOPES", type=arguments.scopes, help="what the key is for")
    parser.add_argument("--name", type=arguments.key_name, help="a label")
    _add_settings(parser)


def _add_settings(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--settings",
        metavar="YAML",
        help="its own limits, models, classes and tags, in a policy's words and checked against --policy, such as "
        "'{limits: {cost: 50/month}, models: [smollm2], classes: [batch], tags: {project: search}}'",
    )


def _list_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--tenant", metavar="TENANT", type=arguments.tenant, help="only the keys of this tenant")


def _rotate_arguments(parser: ArgumentParser) -> None:
    _id_argument(parser)
    parser.add_argument(
        "--overlap",
        metavar="TIME",
        type=arguments.duration,
        default=OVERLAP,
        help=f"time for which the old secret stays valid; 0s: none (default: {OVERLAP})",
    )
    _add_expiry(parser, "its present lifetime, from now")


def _id_argument(parser: ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="the id of the key, as `sluice keys list` shows it")


def _add_expiry(parser: ArgumentParser, default: str) -> None:
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--expires-days", metavar="DAYS", type=arguments.days, help=f"days until it expires (default: {default})"
    )
    ways.add_argument(
        "--expires",
        metavar="DATE",
        type=arguments.expires,
        help="when it expires: a day, at its first moment in UTC, or a time with its zone",
    )


def _create(namespace: Namespace) -> int:
    settings = load(namespace)
    store = KeyStore(settings.state_dir)
    expires, pepper = _expiry(namespace, datetime.now(UTC)), pepper_of(settings, store)
    own = _settings(namespace, settings, namespace.tenant)
    made = [new_key(namespace.tenant, pepper, expires, namespace.scopes, name, own) for name in namespace.names or [""]]
    if namespace.print_policy:
        print(*(key for key, _ in made), PRINTED, sep="\n", file=sys.stderr)
        print(_policy_lines([record for _, record in made]), end="")
        return 0
    for line in _doubts(made[0][1], settings, store):
        print(f"sluice: {line}", file=sys.stderr)
    for key, record in made:
        with on_record(store, "keys.create", f"{record.id} of {record.tenant}"):
            store.add(record)
        print(key)
    print(STORED, file=sys.stderr)
    return 0


def _edit(namespace: Namespace) -> int:
    settings = load(namespace)
    store = KeyStore(settings.state_dir)
    target, now = _target(store, namespace.id), datetime.now(UTC)
    own = _settings(namespace, settings, store.by_id()[namespace.id].tenant)
    asked = {"expires": _expiry(namespace, now), "scopes": namespace.scopes, "name": namespace.name}
    fields = {name: value for name, value in asked.items() if value is not None}
    if namespace.settings is not None:
        fields["settings"] = own
    with on_record(store, "keys.edit", f"{target}: {', '.join(fields) or 'nothing'}"):
        edit(store, namespace.id, fields)
    print(EDITED, file=sys.stderr)
    return 0


def _settings(namespace: Namespace, settings: Settings, tenant: str) -> str:
    """The key's own settings as they are stored. Raises `SettingsError`."""
    if not namespace.settings:
        return ""
    try:
        policy = DEFAULT_POLICY if settings.policy is None else read_policy(settings.policy)
        found = key_settings(read_key_settings(namespace.settings, "new", policy, tenant))
    except PolicyError as error:
        raise SettingsError(f"--settings: {error.problems[0].path}: {error.problems[0].message}") from None
    return json.dumps(found) if found else ""


def _doubts(record: KeyRecord, settings: Settings, store: KeyStore) -> list[str]:
    """Warnings about the tenant's name: a mistyped one is a tenant of its own."""
    if settings.policy is None:
        others = {other.tenant for other in store.records()}
        near = "" if record.tenant in others else did_you_mean(record.tenant, others)
        return [f"{record.tenant} has no other key{near}"] if near else []
    try:
        return [
            f"{settings.policy} does not name {line}"
            for line in unnamed_tenant_lines(read_policy(settings.policy), [record])
        ]
    except PolicyError as error:
        return [f"whether the policy names {record.tenant} cannot be told: {error.problems[0]}"]


def _list(namespace: Namespace) -> int:
    records = KeyStore(load(namespace).state_dir).records()
    rows = [_row(record) for record in records if namespace.tenant in {None, record.tenant}]
    print(table(("id", "tenant", "created", "expires", "scopes", "name", "settings", ""), rows), end="")
    return 0


def _rotate(namespace: Namespace) -> int:
    settings = load(namespace)
    store = KeyStore(settings.state_dir)
    pepper, now = pepper_of(settings, store), datetime.now(UTC)
    until = now + timedelta(seconds=namespace.overlap)
    with on_record(store, "keys.rotate", _target(store, namespace.id)):
        key, new = rotate(store, pepper, namespace.id, now, until, _expiry(namespace, now))
    print(key)
    print(f"{STORED} {_old_secret_end(new, now)}", file=sys.stderr)
    return 0


def _revoke(namespace: Namespace) -> int:
    store = KeyStore(load(namespace).state_dir)
    with on_record(store, "keys.revoke", _target(store, namespace.id)):
        revoke(store, namespace.id)
    print(REVOKED, file=sys.stderr)
    return 0


def _target(store: KeyStore, key_id: str) -> str:
    """The name of a stored key in the audit log. Raises `UnknownKey` and `KeyStoreError`."""
    record = store.by_id().get(key_id)
    if record is None:
        raise UnknownKey(key_id)
    return f"{record.id} of {record.tenant}"


def _expiry(namespace: Namespace, now: datetime) -> datetime | None:
    """The expiry from the command line; None without one."""
    expires: datetime | None = namespace.expires
    return now + timedelta(days=namespace.expires_days) if namespace.expires_days else expires


def _old_secret_end(record: KeyRecord, now: datetime) -> str:
    """A sentence with the end of the replaced secret's validity."""
    old = record.replaced
    return (
        f"The old one is valid until {_minute(old.expires)} UTC."
        if old and old.expires > now
        else "The old one is no longer valid."
    )


def _row(record: KeyRecord) -> tuple[str, ...]:
    old = record.replaced
    overlap = f"old secret until {_minute(old.expires)}" if old and old.expires > datetime.now(UTC) else ""
    expires = _minute(record.expires) if record.expires else "never"
    scopes = ",".join(record.scopes) or "none"
    return record.id, record.tenant, _minute(record.created), expires, scopes, record.name, record.settings, overlap


def _minute(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M}"


def _policy_lines(records: list[KeyRecord]) -> str:
    keys = dict[str, Any]()
    for record in records:
        fields: dict[str, Any] = {"hmac": record.digest.hex()}
        if record.expires:
            fields["expires"] = record.expires.isoformat(timespec="seconds")
        keys[record.id] = fields | {"scopes": list(record.scopes), **json.loads(record.settings or "{}")}
    content = {"tenants": {records[0].tenant: {"keys": keys}}}
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=200)
