"""API keys of tenants on the admin port: list, create, edit, rotate and revoke.

A secret is in the answer to its creation, and nowhere else: not in the audit log, not in a list.
"""

import asyncio
import json
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from heapq import nlargest, nsmallest
from typing import Any, TypeVar

import orjson
from pydantic import Field

from gateway.admin.audit_log import AuditLog
from gateway.admin.rows import MAX_ROWS, Row
from gateway.background import map_in_slices
from gateway.cli import arguments
from gateway.errors import BadRequest, KeyChanged, KeyNotFound, KeysUnavailable, TenantNotNamed
from gateway.http.json_body import Wire
from gateway.quoting import quoted
from gateway.tenants.auth import Principal, new_key
from gateway.tenants.effective_policy import EffectivePolicy
from gateway.tenants.key_source import (
    EditedSince,
    KeySource,
    RotatedAlready,
    UnknownKey,
    edit,
    narrowed,
    revoke,
    rotate,
)
from gateway.tenants.key_store import KeyRecord, KeyStoreError
from gateway.tenants.live_policy import LivePolicy
from gateway.tenants.unnamed_tenants import describe_unnamed
from quotas.policy.key_settings import both, key_settings, read_key_settings
from quotas.policy.policy import SCOPES, Policy
from quotas.policy.policy_diff import receiver
from quotas.policy.policy_file import PolicyError

OVERLAP = "24h"
NEVER = "never"
EDITION_DIGITS = 16  # hexadecimal
MAX_KNOWN_PROBLEMS = 10_000  # of keys' settings, which take half a millisecond to read

T = TypeVar("T")


Settings = dict[str, Any] | str
"""Limits, models, classes and tags of a key, in a policy's words: an object, or its YAML."""


class NewKey(Wire):
    tenant: str
    name: str | None = None
    scopes: list[str] = Field(default_factory=lambda: [*SCOPES], max_length=len(SCOPES))
    expires_days: int | None = Field(default=None, ge=1, le=arguments.MAX_DAYS)
    settings: Settings = ""
    unnamed: bool = False  # the tenant need not be in the policy


class KeyEdit(Wire):
    """An edit of a key. What is left out stays, and settings are replaced whole. With the `edition` that a list told,
    it is refused if the key was edited since.
    """

    name: str | None = None
    scopes: list[str] | None = Field(default=None, max_length=len(SCOPES))
    expires: str | None = None  # a day, a time with its zone, or never
    settings: Settings | None = None
    edition: str | None = None
    dry_run: bool = False


class Rotation(Wire):
    overlap: str = OVERLAP
    expires_days: int | None = Field(default=None, ge=1, le=arguments.MAX_DAYS)


class Keys:
    """Lists and changes API keys. A change is in force here before its answer, and on replicas that share the directory
    within a second.
    """

    def __init__(self, source: KeySource, policies: LivePolicy, audit: AuditLog) -> None:
        self._source = source
        self._policies = policies
        self._audit = audit
        self._changing = asyncio.Lock()
        self._problems: dict[Principal, str | None] = {}  # of keys' settings, under the policy of this version
        self._version = ""

    async def listed(self, words: str) -> Row:
        """Return the keys in whose id, tenant or name `words` occur, the newest first, and the names of all tenants."""
        records, policy = self._source.in_force, self._policies.current
        found, truncated = await asyncio.to_thread(_found, records, words.lower())
        tenants = await asyncio.to_thread(_first_tenants, records, policy)
        now = datetime.now(UTC)
        return {
            "keys": await map_in_slices(found, lambda record: self._row(record, now)),
            "truncated": truncated,
            "tenants": tenants,
            "unnamed_tenants": policy.unnamed_tenants,
        }

    async def create(self, actor: str, asked: NewKey) -> Row:
        """Create a key and return it with its secret, this once. Raises `BadRequest`, `TenantNotNamed`,
        `AuditUnavailable` and `KeysUnavailable`.
        """
        tenant = _argument("tenant", arguments.tenant, asked.tenant)
        name = _argument("name", arguments.key_name, asked.name) if asked.name else ""
        scopes = _argument("scopes", arguments.scopes, ",".join(asked.scopes)) if asked.scopes else ()
        self._confirm(tenant, asked.unnamed)
        key, record = new_key(tenant, self._source.pepper, _in_days(asked.expires_days), scopes, name)
        record = replace(record, settings=await self._settings(asked.settings, record))
        await self._change(actor, "keys.create", f"{record.id} of {tenant}", lambda: self._source.store.add(record))
        return {"key": key, **self._row(record, datetime.now(UTC))}

    async def edit(self, actor: str, key_id: str, asked: KeyEdit) -> Row:
        """Change a key but for its secret, and return it with `changes`; a dry run only tells them.

        Raises `BadRequest`, `KeyNotFound`, `KeyChanged`, `AuditUnavailable` and `KeysUnavailable`.
        """
        fields, record, now = await self._edited(key_id, asked), self._stored(key_id), datetime.now(UTC)
        if asked.edition not in (None, _edition(record)):  # a dry run is refused as well
            raise _translated(EditedSince(key_id), "")

        def is_expected(stored: KeyRecord) -> bool:
            tenant = self._policies.current.tenant(stored.tenant)
            return asked.edition in (None, _edition(narrowed(stored, tenant)))

        before, after = (self._row(one, now) for one in (record, replace(record, **fields)))
        pairs = [(name, before[name], after[name]) for name in fields if before[name] != after[name]]
        changes = [f"{name}: {_shown(old)} -> {_shown(new)}" for name, old, new in pairs]
        if changes and not asked.dry_run:
            target = f"{record.id} of {record.tenant}: {'; '.join(changes)}"
            store = self._source.store
            await self._change(actor, "keys.edit", target, lambda: edit(store, key_id, fields, is_expected))
        return after | {"changes": changes}

    async def _edited(self, key_id: str, asked: KeyEdit) -> dict[str, Any]:
        """The fields of a key's record that an edit replaces. Raises `BadRequest`."""
        fields = dict[str, Any]()
        if asked.name is not None:
            fields["name"] = _argument("name", arguments.key_name, asked.name) if asked.name else ""
        if asked.scopes is not None:
            fields["scopes"] = _argument("scopes", arguments.scopes, ",".join(asked.scopes)) if asked.scopes else ()
        if asked.expires is not None:
            is_never = asked.expires == NEVER
            fields["expires"] = None if is_never else _argument("expires", arguments.expires, asked.expires)
        if asked.settings is not None:
            fields["settings"] = await self._settings(asked.settings, self._stored(key_id))
        return fields

    async def policies(self, key_id: str, asked: KeyEdit) -> tuple[Policy, Policy]:
        """The policy in force as it would be with the key's settings in it, as they are and as they are edited. Raises
        `BadRequest` and `KeyNotFound`.
        """
        record, policy = self._stored(key_id), self._policies.current
        fields = await self._edited(key_id, asked)
        edited = fields.get("settings", record.settings)
        try:
            base = await asyncio.to_thread(_with_settings, policy, record, record.settings)
        except PolicyError as error:
            told = (
                f"The key's present settings do not fit the policy in force, so that it is not served: {_told(error)}"
            )
            raise BadRequest(f"{told}. Put the edit into force without a trial.", "settings") from None
        return base, await asyncio.to_thread(_with_settings, policy, record, edited)

    async def rotate(self, actor: str, key_id: str, asked: Rotation) -> Row:
        """Give a key a new secret and return it.

        Raises `BadRequest`, `KeyNotFound`, `AuditUnavailable` and `KeysUnavailable`.
        """
        overlap = _argument("overlap", arguments.duration, asked.overlap)
        record, now = self._stored(key_id), datetime.now(UTC)
        store, pepper = self._source.store, self._source.pepper
        until, expires = now + timedelta(seconds=overlap), _in_days(asked.expires_days)
        key, new = await self._change(
            actor,
            "keys.rotate",
            f"{record.id} of {record.tenant}",
            lambda: rotate(store, pepper, key_id, now, until, expires),
        )
        return {"key": key, **self._row(new, now)}

    async def revoke(self, actor: str, key_id: str) -> Row:
        """Forget a key. Raises `KeyNotFound`, `AuditUnavailable` and `KeysUnavailable`."""
        record = self._stored(key_id)
        target = f"{record.id} of {record.tenant}"
        await self._change(actor, "keys.revoke", target, lambda: revoke(self._source.store, key_id))
        return {"revoked": True}

    async def _change(self, actor: str, action: str, target: str, change: Callable[[], T]) -> T:
        """Make a change: in the audit log first, then on the disk, then in force."""
        async with self._changing:
            await self._audit.record(actor, action, target, "begun")
            try:
                changed = await asyncio.to_thread(change)
            except KeyStoreError as error:
                await self._audit.record(actor, action, target, f"failed: {error!s:.500}")
                await self._source.reload()  # for an admin who reads again
                raise _translated(error, target) from None
            await self._source.reload()
            return changed

    def _confirm(self, tenant: str, is_confirmed: bool) -> None:
        """Raise `TenantNotNamed` for a tenant outside the policy, unless the admin confirmed it."""
        if is_confirmed or self._is_named(tenant):
            return
        holds = describe_unnamed(self._policies.current, tenant)
        raise TenantNotNamed(
            f"The policy does not name the tenant {tenant!r}: {holds}. Send unnamed: true to create "
            "the key nevertheless.",
            "tenant",
        )

    async def _settings(self, given: Settings, record: KeyRecord) -> str:
        """The settings of a key as they are stored. Raises `BadRequest` for settings that the policy does not allow."""
        text = given if isinstance(given, str) else orjson.dumps(given).decode()
        policy = self._policies.current
        try:
            read = await asyncio.to_thread(read_key_settings, text, record.id, policy, record.tenant)
        except PolicyError as error:
            raise BadRequest(f"settings: {_told(error)}.", "settings") from None
        found = key_settings(read)
        return json.dumps(found) if found else ""

    def _stored(self, key_id: str) -> KeyRecord:
        """The stored record. Raises `KeyNotFound` for a key that is unknown, or not in the directory."""
        record = self._source.in_force.get(key_id)
        if record is None:
            raise KeyNotFound(f"There is no API key with the id {quoted(key_id)}.")
        if (origin := self._origin(record)) != "stored":
            where = (
                "in a policy file, and is changed there"
                if origin == "policy"
                else "the demo key, and follows from the pepper"
            )
            raise KeyNotFound(f"The key {quoted(key_id)} is {where}.")
        return record

    def _origin(self, record: KeyRecord) -> str:
        if record.id in self._source.demo_ids:
            return "demo"
        key = self._policies.current.tenant(record.tenant).key(record.id)
        return "policy" if key is not None and key.hmac else "stored"

    def _row(self, record: KeyRecord, now: datetime) -> Row:
        old, origin = record.replaced, self._origin(record)
        return {
            "id": record.id,
            "tenant": record.tenant,
            "name": record.name,
            "origin": origin,
            "created": None if origin == "policy" else record.created.timestamp(),
            "expires": record.expires.timestamp() if record.expires else None,
            "expired": record.expires is not None and record.expires <= now,
            "old_until": old.expires.timestamp() if old and old.expires > now else None,
            "scopes": record.scopes,
            "settings": json.loads(record.settings) if record.settings else self._of_policy(record),
            "edition": _edition(record),
            "problem": self._problem(record),
            "named": self._is_named(record.tenant),
        }

    def _of_policy(self, record: KeyRecord) -> Row:
        """The policy's settings of a key without settings of its own."""
        key = self._policies.current.tenant(record.tenant).key(record.id)
        return {} if key is None else key_settings(key)

    def _problem(self, record: KeyRecord) -> str | None:
        """The reason why the present policy refuses the key for its settings; None without one."""
        if not record.settings:
            return None
        policy = self._policies.current
        if policy.version != self._version or len(self._problems) > MAX_KNOWN_PROBLEMS:
            self._version, self._problems = policy.version, {}
        principal = Principal(record.tenant, record.id, record.scopes, record.settings)
        if principal not in self._problems:
            self._problems[principal] = EffectivePolicy(policy, principal).problem
        return self._problems[principal]

    def _is_named(self, tenant: str) -> bool:
        """True if the policy names the tenant, or names none at all."""
        tenants = self._policies.current.tenants
        return not tenants or tenant in tenants


def _with_settings(policy: Policy, record: KeyRecord, text: str) -> Policy:
    tenant = policy.tenant(record.tenant)
    key, entry = read_key_settings(text, record.id, policy, record.tenant), tenant.key(record.id)
    if entry is not None:
        key = both(entry, key, policy)
    named = replace(tenant, name=record.tenant, keys={**tenant.keys, record.id: key})
    version = f"{policy.version} with {text}"  # another one, or they would be taken for the same
    return replace(policy, version=version, tenants={**policy.tenants, record.tenant: named})


def _told(error: PolicyError) -> str:
    return "; ".join(f"{one.path}: {one.message}".removeprefix(": ") for one in error.problems[:5])


def _found(records: Mapping[str, KeyRecord], words: str) -> tuple[list[KeyRecord], int]:
    """Return the newest keys with these words, `MAX_ROWS` of them, and how many more there are."""
    found = [record for record in records.values() if words in _text(record)]
    shown = nlargest(MAX_ROWS, found, key=lambda record: (record.created, record.id))
    return shown, len(found) - len(shown)


def _first_tenants(records: Mapping[str, KeyRecord], policy: Policy) -> list[str]:
    return nsmallest(MAX_ROWS, {*policy.tenants, *(record.tenant for record in records.values())})


def _shown(value: Any) -> str:
    """A field of a key for the audit log, of its alerts' addresses the hosts alone."""
    return value if isinstance(value, str) else orjson.dumps(_without_paths(value)).decode()


def _without_paths(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: item if name == "tags" else receiver(item) if name == "url" else _without_paths(item)
        for name, item in value.items()
    }


def _edition(record: KeyRecord) -> str:
    """A digest of what an edit may replace."""
    parts = record.name, *record.scopes, str(record.expires), record.settings
    return sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:EDITION_DIGITS]


def _text(record: KeyRecord) -> str:
    return f"{record.id} {record.tenant} {record.name}".lower()


def _in_days(days: int | None) -> datetime | None:
    return None if days is None else datetime.now(UTC) + timedelta(days=days)


def _argument(param: str, read: Callable[[str], T], text: str) -> T:
    """Parse a field as the command line would. Raises `BadRequest`."""
    try:
        return read(text)
    except ArgumentTypeError as error:
        raise BadRequest(f"{param}: {error}.", param) from None


def _translated(error: KeyStoreError, target: str) -> BadRequest | KeyNotFound | KeyChanged | KeysUnavailable:
    match error:
        case EditedSince():
            return KeyChanged(f"{error!s}.".replace("the key", "The key", 1))
        case UnknownKey():
            return KeyNotFound(f"There is no stored key {target:.200} any longer.")
        case RotatedAlready():
            return BadRequest(f"{error!s}.".replace("with --overlap 0s", "with an overlap of 0s"), "overlap")
    return KeysUnavailable(f"Nothing was changed: {error}.")
