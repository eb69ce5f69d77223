"""An API key as an admin's files know it, without its secret."""

from dataclasses import dataclass
from datetime import datetime

from gateway.auth import Principal
from gateway.key_source import narrowed
from gateway.key_store import KeyStore, KeyStoreError
from quotas.policy import Policy


@dataclass(frozen=True, slots=True)
class KnownKey:
    """Or, with an empty `key_id`, any key of a tenant that no policy narrows."""

    principal: Principal
    described: str
    expires: datetime | None = None


def any_key_of(tenant: str) -> KnownKey:
    return KnownKey(Principal(tenant, ""), f"tenant {tenant}, with any key that the policy does not narrow")


def find_key(key_id: str, policy: Policy, store: KeyStore) -> KnownKey:
    """A stored key, else one that the policy has. Raises `KeyStoreError` where neither does."""
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
