"""Sources of API keys: the state directory, the policy files, and the demo key."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from gateway.settings.settings import Settings
from gateway.tenants.auth import KeyRing, Principal, demo_key, demo_record, pepper_of, rotated
from gateway.tenants.file_watch import FileWatcher, signature
from gateway.tenants.key_store import KeyRecord, KeyStore, KeyStoreError
from gateway.tenants.live_policy import LivePolicy
from quotas.policy.policy import KeyPolicy, Policy, TenantPolicy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A difference between two sets of keys, by id."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()  # rotated, narrowed, or with another expiry
    removed: tuple[str, ...] = ()

    @staticmethod
    def between(before: Iterable[KeyRecord], after: Iterable[KeyRecord]) -> "KeyChange":
        old, new = {record.id: record for record in before}, {record.id: record for record in after}
        changed = tuple(key_id for key_id in new if key_id in old and new[key_id] != old[key_id])
        return KeyChange(
            tuple(key_id for key_id in new if key_id not in old),
            changed,
            tuple(key_id for key_id in old if key_id not in new),
        )

    def __str__(self) -> str:
        parts = {"added": self.added, "changed": self.changed, "removed": self.removed}
        return "; ".join(f"{what} {', '.join(ids)}" for what, ids in parts.items() if ids)


class KeySource:
    """Keeps `ring` at what the files say. Edits that make no sense change nothing, and are logged.

    Raises `KeyStoreError`, also when there would be no key at all to begin with.
    """

    def __init__(self, settings: Settings, policy: Policy) -> None:
        self.store = KeyStore(settings.state_dir)
        self.pepper = pepper = pepper_of(settings, self.store)
        self._policy = policy
        self.demo_key = demo_key(settings, pepper)  # to be shown to who starts the gateway
        self._demo = [demo_record(self.demo_key, pepper)] if self.demo_key else []
        self._first_read = signature(self.files())  # of the files, before they were read
        records = self._records(policy)
        if not records:
            raise KeyStoreError(
                f"no API key would open this gateway: none is stored, none is in a policy, and {settings.host} is not "
                "a loopback address, for which a demo key would be made; set SLUICE_DEMO_KEY, or make a key with "
                "`sluice keys create TENANT`"
            )
        self.ring = KeyRing(pepper, records)
        self.on_change: list[Callable[[KeyChange], Awaitable[object]]] = []
        self._in_force = records
        self._reloading = asyncio.Lock()

    @property
    def in_force(self) -> Sequence[KeyRecord]:
        """All keys that open this gateway, or would have before they expired."""
        return self._in_force

    @property
    def demo_ids(self) -> frozenset[str]:
        return frozenset(record.id for record in self._demo)

    def files(self) -> Iterable[Path]:
        return (self.store.path,)

    async def watch(self, policies: LivePolicy) -> None:
        """Take up edits of the key file since it was read, and of what policies say of keys, while the server runs."""
        policies.on_change.append(self.take_policy)
        await FileWatcher(self.files, self.reload, self._first_read).run()

    async def take_policy(self, policy: Policy) -> None:
        self._policy = policy
        await self.reload()

    async def reload(self) -> None:
        """Read the key file again. Reloads take turns, so that the last that was read is the one in force."""
        async with self._reloading:
            await self._reload()

    async def _reload(self) -> None:
        try:
            records = await asyncio.to_thread(self._records, self._policy)
        except KeyStoreError as error:
            log.error("the API keys stay as they were: %s", error)
            return
        self.ring.replace(records)
        log.info("%d API keys are in force", len(records))
        change, self._in_force = KeyChange.between(self._in_force, records), records
        if change != KeyChange():
            for changed in self.on_change:
                await changed(change)

    def _records(self, policy: Policy) -> list[KeyRecord]:
        stored = [narrowed(record, policy.tenant(record.tenant)) for record in self.store.records()]
        records = [*stored, *_policy_records(policy), *self._demo]
        (key_id, times), *_ = Counter(record.id for record in records).most_common(1) or [("", 0)]
        if times > 1:
            raise KeyStoreError(
                f"two API keys have the id {key_id}, in {self.store.path}, the policy files or as the demo key: "
                "revoke or rename one"
            )
        return records


def narrowed(record: KeyRecord, tenant: TenantPolicy) -> KeyRecord:
    """Return the record with the policy's expiry where that is earlier; a replaced secret ends with it."""
    key = tenant.key(record.id)
    if key is None or key.expires is None:
        return record
    old = record.replaced
    return replace(
        record,
        expires=min(key.expires, record.expires or key.expires),
        replaced=replace(old, expires=min(key.expires, old.expires)) if old else None,
    )


def _policy_records(policy: Policy) -> list[KeyRecord]:
    keys = [(tenant, key) for tenant in policy.tenants.values() for key in tenant.keys.values() if key.hmac]
    return [_record(tenant.name, key) for tenant, key in keys]


def _record(tenant: str, key: KeyPolicy) -> KeyRecord:
    assert key.hmac is not None
    return KeyRecord(key.id, tenant, bytes.fromhex(key.hmac), datetime.fromtimestamp(0, UTC), key.expires, key.scopes)


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key that is stored or in the policy; with an empty `key_id`, any key of a tenant that no policy narrows."""

    principal: Principal
    described: str
    expires: datetime | None = None


def any_key_of(tenant: str) -> KnownKey:
    return KnownKey(Principal(tenant, ""), f"tenant {tenant}, with any key that the policy does not narrow")


def find_key(key_id: str, policy: Policy, store: KeyStore) -> KnownKey:
    """Return a stored key, else one that the policy has. Raises `KeyStoreError` where neither does."""
    for stored in store.records():
        if stored.id == key_id:
            record = narrowed(stored, policy.tenant(stored.tenant))
            principal = Principal(record.tenant, record.id, record.scopes)
            return KnownKey(principal, f"tenant {record.tenant}, key {key_id}", record.expires)
    for tenant in policy.tenants.values():
        if key := tenant.key(key_id):
            where = "" if key.hmac else f" (not stored in {store.directory}: there, it opens nothing)"
            principal = Principal(tenant.name, key_id, key.scopes)
            return KnownKey(principal, f"tenant {tenant.name}, key {key_id}{where}", key.expires)
    raise KeyStoreError(
        f"there is no key {key_id!r:.80}, neither in {store.path} nor in the policy: see `sluice keys list`"
    )


class UnknownKey(KeyStoreError):
    """There is no such key in the directory."""

    def __init__(self, key_id: str) -> None:
        super().__init__(
            f"there is no stored key {key_id!r:.80}: see `sluice keys list`; one in a policy file is changed there"
        )


class RotatedAlready(KeyStoreError):
    """A key would have three secrets: whoever uses the older of its two was promised its time."""

    def __init__(self, key_id: str, until: datetime) -> None:
        super().__init__(
            f"{key_id} was rotated already, and its old secret opens until {until:%Y-%m-%d %H:%M} UTC: wait until "
            "then, or end all its older secrets now with --overlap 0s"
        )


def rotate(
    store: KeyStore, pepper: bytes, key_id: str, now: datetime, until: datetime, expires: datetime | None
) -> tuple[str, KeyRecord]:
    """Give a stored key a new secret, to be shown once; the present one opens `until` then.

    The key `expires`, or lives as long from now as it was to live. Raises `UnknownKey`, `RotatedAlready` and
    `KeyStoreError`.
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


def revoke(store: KeyStore, key_id: str) -> None:
    """Forget a stored key. Raises `UnknownKey` and `KeyStoreError`."""
    if not store.remove(key_id):
        raise UnknownKey(key_id)
