"""Sources of API keys: the state directory, the policy files, and the demo key."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from gateway.background import tell_all
from gateway.quoting import quoted
from gateway.settings.settings import Settings
from gateway.tenants.auth import KeyRing, Principal, demo_key, demo_record, pepper_of, rotated
from gateway.tenants.file_watch import FileWatcher, signature
from gateway.tenants.key_store import KeyRecord, KeyStore, KeyStoreError, KeyStoreUnreadable
from gateway.tenants.live_policy import LivePolicy
from quotas.policy.policy import KeyPolicy, Policy, TenantPolicy
from quotas.policy.policy_diff import changed_tenants
from quotas.policy.units import counted

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A difference between two sets of keys, by id."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()  # rotated, narrowed, or with another expiry
    removed: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = {"added": self.added, "changed": self.changed, "removed": self.removed}
        return "; ".join(f"{what} {', '.join(ids)}" for what, ids in parts.items() if ids)


class _Keys(NamedTuple):
    """All keys, by id, and their sources."""

    stored: Mapping[str, KeyRecord]
    policy: Policy | None
    of_policy: Mapping[str, KeyRecord]
    in_force: Mapping[str, KeyRecord]


class KeySource:
    """Keeps `ring` equal to the files. Invalid edits change nothing, and are logged; a file that cannot be read is read
    again until it can.

    Raises `KeyStoreError`, also when there would be no key at all to begin with.
    """

    def __init__(self, settings: Settings, policy: Policy) -> None:
        self.store = KeyStore(settings.state_dir)
        self.pepper = pepper = pepper_of(settings, self.store)
        self._policy = policy
        self.demo_key = demo_key(settings, pepper)  # to be shown in the announcement
        demo = [demo_record(self.demo_key, pepper)] if self.demo_key else []
        self._demo = {record.id: record for record in demo}
        self._watcher = FileWatcher(self.files, self.reload, signature(self.files()))  # before they are read
        self._problem = ""  # of the last reload
        self._keys, _ = self._followed(_Keys({}, None, {}, self._demo), policy)
        if not self.in_force:
            raise KeyStoreError(
                f"no API key would open this gateway: none is stored, none is in a policy, and {settings.host} is not "
                "a loopback address, for which a demo key would be made; set SLUICE_DEMO_KEY, or make a key with "
                "`sluice keys create TENANT`"
            )
        self.ring = KeyRing(pepper, self.in_force.values())
        self.on_change: list[Callable[[KeyChange], Awaitable[object]]] = []
        self._reloading = asyncio.Lock()

    @property
    def in_force(self) -> Mapping[str, KeyRecord]:
        """All keys by id, including expired ones."""
        return self._keys.in_force

    @property
    def demo_ids(self) -> Collection[str]:
        return self._demo.keys()

    def files(self) -> Iterable[Path]:
        return (self.store.path,)

    async def follow(self, policies: LivePolicy) -> None:
        """Apply edits of the key file since it was read, and of the policies' keys, while the server runs."""
        policies.on_change.append(self.take_policy)
        await self._watcher.run()

    async def take_policy(self, policy: Policy) -> None:
        self._policy = policy
        await self.reload()

    async def reload(self) -> None:
        """Read the key file again. Reloads are serialized, so that the last one read is in force."""
        async with self._reloading:
            await self._reload()

    async def _reload(self) -> None:
        try:
            keys, change = await asyncio.to_thread(self._followed, self._keys, self._policy)
        except KeyStoreError as error:
            if isinstance(error, KeyStoreUnreadable):
                self._watcher.read_again()
                if self._problem == str(error):
                    return
            self._problem = str(error)
            log.error("the API keys stay as they were: %s", error)
            return
        self._keys, self._problem = keys, ""
        if change == KeyChange():
            return
        self.ring.change((keys.in_force[key_id] for key_id in change.added + change.changed), change.removed)
        log.info("%s in force", counted(len(keys.in_force), "API key"))
        await tell_all(self.on_change, change)

    def _followed(self, before: _Keys, policy: Policy) -> tuple[_Keys, KeyChange]:
        """The present keys of files and policy, and the difference. Raises `KeyStoreError`."""
        stored = self.store.by_id()
        edited = changed_tenants(before.policy, policy)
        old = {key for name in edited for key in before.policy.tenant(name).keys} if before.policy else set()
        of_policy = {record.id: record for name in edited for record in _policy_records(policy.tenant(name))}
        of_policy |= {key_id: record for key_id, record in before.of_policy.items() if key_id not in old}
        doubtful = list[str]()
        if stored is not before.stored:
            doubtful += [key_id for key_id, record in stored.items() if before.stored.get(key_id) is not record]
            doubtful += [key_id for key_id in before.stored if key_id not in stored]
        doubtful += [*old, *(key for name in edited for key in policy.tenant(name).keys)]
        if not doubtful:
            return _Keys(stored, policy, of_policy, before.in_force), KeyChange()
        in_force, added, changed, removed = dict(before.in_force), list[str](), list[str](), list[str]()
        for key_id in dict.fromkeys(doubtful):
            known, record = in_force.get(key_id), self._in_force(key_id, stored, of_policy, policy)
            if record is None:
                removed += [key_id] if in_force.pop(key_id, None) else []
            elif record != known:
                in_force[key_id] = record
                (changed if known else added).append(key_id)
        change = KeyChange(tuple(added), tuple(changed), tuple(removed))
        return _Keys(stored, policy, of_policy, in_force), change

    def _in_force(
        self, key_id: str, stored: Mapping[str, KeyRecord], of_policy: Mapping[str, KeyRecord], policy: Policy
    ) -> KeyRecord | None:
        """The record of a key by all of its sources. Raises `KeyStoreError` if two sources define it."""
        record = stored.get(key_id)
        found = [narrowed(record, policy.tenant(record.tenant))] if record else []
        found += [source[key_id] for source in (of_policy, self._demo) if key_id in source]
        if len(found) > 1:
            raise KeyStoreError(
                f"two API keys have the id {key_id}, in {self.store.path}, the policy files or as the demo key: "
                "revoke or rename one"
            )
        return found[0] if found else None


def tag_values(name: str, records: Iterable[KeyRecord], policy: Policy) -> dict[str, str]:
    """The values of a tag by key; a stored key's own tags count before the policy's."""
    keys = (key for tenant in policy.tenants.values() for key in tenant.keys.values())
    found = {key.id: value for key in keys for tag, value in key.tags if tag == name}
    return found | {record.id: value for record in records if (value := record.tags.get(name)) is not None}


def narrowed(record: KeyRecord, tenant: TenantPolicy) -> KeyRecord:
    """The record with the policy's expiry if that is earlier; a replaced secret ends with it."""
    key = tenant.key(record.id)
    if key is None or key.expires is None:
        return record
    old = record.replaced
    return replace(
        record,
        expires=min(key.expires, record.expires or key.expires),
        replaced=replace(old, expires=min(key.expires, old.expires)) if old else None,
    )


def _policy_records(tenant: TenantPolicy) -> list[KeyRecord]:
    return [_record(tenant.name, key) for key in tenant.keys.values() if key.hmac]


def _record(tenant: str, key: KeyPolicy) -> KeyRecord:
    assert key.hmac is not None
    return KeyRecord(key.id, tenant, bytes.fromhex(key.hmac), datetime.fromtimestamp(0, UTC), key.expires, key.scopes)


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A stored key, or the policy's; with an empty `key_id`, any unrestricted key of a tenant."""

    principal: Principal
    described: str
    expires: datetime | None = None


def any_key_of(tenant: str) -> KnownKey:
    return KnownKey(Principal(tenant, ""), f"tenant {tenant}, with any key that the policy does not narrow")


def find_key(key_id: str, policy: Policy, store: KeyStore) -> KnownKey:
    """A stored key, else the policy's. Raises `KeyStoreError` for an unknown one."""
    if stored := store.by_id().get(key_id):
        record = narrowed(stored, policy.tenant(stored.tenant))
        principal = Principal(record.tenant, record.id, record.scopes, record.settings)
        return KnownKey(principal, f"tenant {record.tenant}, key {key_id}", record.expires)
    for tenant in policy.tenants.values():
        if key := tenant.key(key_id):
            where = "" if key.hmac else f" (not stored in {store.directory}: it is not valid there)"
            principal = Principal(tenant.name, key_id, key.scopes)
            return KnownKey(principal, f"tenant {tenant.name}, key {key_id}{where}", key.expires)
    raise KeyStoreError(
        f"there is no key {quoted(key_id)}, neither in {store.path} nor in the policy: see `sluice keys list`"
    )


class UnknownKey(KeyStoreError):
    """The directory has no key with this id."""

    def __init__(self, key_id: str) -> None:
        super().__init__(
            f"there is no stored key {quoted(key_id)}: see `sluice keys list`; one in a policy file is changed there"
        )


class EditedSince(KeyStoreError):
    """The key is not as it was when the edit was asked."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"the key {quoted(key_id)} was edited since you read it: read it again")


class RotatedAlready(KeyStoreError):
    """A second rotation would leave three secrets: the older one was promised until `until`."""

    def __init__(self, key_id: str, until: datetime) -> None:
        super().__init__(
            f"{key_id} was rotated already, and its old secret is valid until {until:%Y-%m-%d %H:%M} UTC: wait until "
            "then, or end all its older secrets now with --overlap 0s"
        )


def rotate(
    store: KeyStore, pepper: bytes, key_id: str, now: datetime, until: datetime, expires: datetime | None
) -> tuple[str, KeyRecord]:
    """Give a stored key a new secret, to be shown once; the present one stays valid `until` then.

    The key `expires`, or gets its present lifetime from now. Raises `UnknownKey`, `RotatedAlready` and `KeyStoreError`.
    """
    with store.edit() as records:
        record = records.get(key_id)
        if record is None:
            raise UnknownKey(key_id)
        old = record.replaced
        if old and old.expires > now and until > now:
            raise RotatedAlready(record.id, old.expires)
        lifetime = record.expires - record.created if record.expires else None
        key, new = rotated(record, pepper, expires or (now + lifetime if lifetime else None), until)
        records[record.id] = new
    return key, new


def edit(
    store: KeyStore, key_id: str, fields: Mapping[str, Any], is_expected: Callable[[KeyRecord], bool] = lambda _: True
) -> KeyRecord:
    """Replace these fields of a stored key's record, if it is the expected one: no other process edits it meanwhile.
    Raises `UnknownKey`, `EditedSince` and `KeyStoreError`.
    """
    with store.edit() as records:
        if key_id not in records:
            raise UnknownKey(key_id)
        if not is_expected(records[key_id]):
            raise EditedSince(key_id)
        records[key_id] = replace(records[key_id], **fields)
    return records[key_id]


def revoke(store: KeyStore, key_id: str) -> None:
    """Forget a stored key. Raises `UnknownKey` and `KeyStoreError`."""
    if not store.remove(key_id):
        raise UnknownKey(key_id)
