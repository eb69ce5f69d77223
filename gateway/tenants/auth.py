"""Authentication: API keys, and the principals they stand for.

A key is `sk-sluice-<id>-<secret>`. It is known only by its HMAC-SHA-256 under a pepper, so that neither the key file
nor a memory of it opens the gateway; the id finds the entry, and only the digests are compared.
"""

import hmac
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from gateway.errors import InvalidApiKey
from gateway.replica.fleet_secret import FleetSecret
from gateway.settings.secret_rules import MAX_KEY_CHARS
from gateway.settings.settings import Settings
from gateway.tenants.key_store import KeyRecord, KeyStore, Replaced
from quotas.policy.policy import SCOPES
from quotas.policy.schema import KEY_PREFIX

DEMO = "demo"  # id of the demo key, and of its tenant
SECRET_BYTES = 20
_PREFIX = KEY_PREFIX.encode()
_SPACES = b" \t"
_INCORRECT = "Incorrect API key provided: it is unknown, revoked or expired."


@dataclass(frozen=True, slots=True)
class Principal:
    """The tenant and the key on whose behalf a request runs."""

    tenant: str
    key_id: str
    scopes: tuple[str, ...] = SCOPES
    settings: str = ""  # of the key, beside those of the policy: see `KeyRecord`


class KeyRing:
    """The keys that open this gateway; `clock` gives Unix seconds."""

    def __init__(self, pepper: bytes, records: Iterable[KeyRecord], clock: Callable[[], float] = time.time) -> None:
        self.fleet = FleetSecret(pepper)
        self._hmac = hmac.new(pepper, digestmod="sha256")  # template: copying is cheaper than making one
        self._clock = clock
        self._nobody = _Entry(Principal("", ""), _Secret.none(), _Secret.none())
        self._entries: dict[bytes, _Entry] = {}
        self._by_tenant: dict[str, dict[bytes, Principal]] = {}
        self.change(records)

    def __len__(self) -> int:
        return len(self._entries)

    def change(self, records: Iterable[KeyRecord], removed: Iterable[str] = ()) -> None:
        """Add or replace these keys, and remove the ids in `removed`."""
        for key_id in removed:
            self._drop(key_id.encode())
        for record in records:
            name, entry = record.id.encode(), _Entry.of(record)
            self._drop(name)
            self._entries[name] = entry
            self._by_tenant.setdefault(record.tenant, {})[name] = entry.principal

    def _drop(self, key_id: bytes) -> None:
        entry = self._entries.pop(key_id, None)
        if entry is not None:
            principals = self._by_tenant[entry.principal.tenant]
            del principals[key_id]
            if not principals:
                del self._by_tenant[entry.principal.tenant]

    def tenants(self) -> Collection[str]:
        """Return the tenants that have a key, valid or expired."""
        return self._by_tenant.keys()

    def find(self, tenant: str, key_id: str) -> Principal:
        """The principal of a tenant's key whose secret was checked elsewhere. Raises `InvalidApiKey`."""
        entry = self._entries.get(key_id.encode())
        if entry is None or entry.principal.tenant != tenant:
            raise InvalidApiKey(_INCORRECT)
        return entry.principal

    def of_tenant(self, tenant: str) -> list[Principal]:
        """Return the principals of the tenant's keys."""
        return [*self._by_tenant.get(tenant, {}).values()]

    def authenticate(self, authorization: bytes | None) -> Principal:
        """The principal of an Authorization header.

        Raises `InvalidApiKey`, in the same words and after the same work for an unknown, a wrong and an expired key.
        """
        key = bearer_token(authorization)
        entry = self._entries.get(_id_of(key), self._nobody)
        code, now = self._hmac.copy(), self._clock()
        code.update(key)
        digest, present, replaced = code.digest(), entry.secret, entry.replaced
        is_present = hmac.compare_digest(digest, present.digest) and now < present.expires
        is_replaced = hmac.compare_digest(digest, replaced.digest) and now < replaced.expires
        if is_present or is_replaced:
            return entry.principal
        raise InvalidApiKey(_INCORRECT)


@dataclass(frozen=True, slots=True)
class _Secret:
    digest: bytes
    expires: float  # Unix seconds

    @staticmethod
    def none() -> "_Secret":
        return _Secret(secrets.token_bytes(32), 0.0)

    @staticmethod
    def of(digest: bytes, expires: datetime | None) -> "_Secret":
        return _Secret(digest, expires.timestamp() if expires else float("inf"))


@dataclass(frozen=True, slots=True)
class _Entry:
    principal: Principal
    secret: _Secret
    replaced: _Secret

    @staticmethod
    def of(record: KeyRecord) -> "_Entry":
        principal, old = Principal(record.tenant, record.id, record.scopes, record.settings), record.replaced
        replaced = _Secret.of(old.digest, old.expires) if old else _Secret.none()
        return _Entry(principal, _Secret.of(record.digest, record.expires), replaced)


def pepper_of(settings: Settings, store: KeyStore) -> bytes:
    return settings.pepper.get_secret_value().encode() if settings.pepper else store.pepper()


def demo_key(settings: Settings, pepper: bytes) -> str | None:
    """Return the configured demo key; else, on a loopback address, one derived from the pepper and so never stored."""
    if settings.demo_key is not None:
        return settings.demo_key.get_secret_value()
    if not settings.is_loopback:
        return None
    return f"{KEY_PREFIX}{DEMO}-{hmac.digest(pepper, b'sluice demo key', 'sha256')[:SECRET_BYTES].hex()}"


def demo_record(key: str, pepper: bytes) -> KeyRecord:
    return _record(_id_of(key.encode()).decode(), key, DEMO, pepper, None)


def new_key(
    tenant: str,
    pepper: bytes,
    expires: datetime | None = None,
    scopes: tuple[str, ...] = SCOPES,
    name: str = "",
    settings: str = "",
) -> tuple[str, KeyRecord]:
    """Make a key for `tenant`, to be shown once, and its record to store."""
    key_id = secrets.token_hex(4)
    key = _new_secret(key_id)
    return key, replace(_record(key_id, key, tenant, pepper, expires), scopes=scopes, name=name, settings=settings)


def rotated(record: KeyRecord, pepper: bytes, expires: datetime | None, until: datetime) -> tuple[str, KeyRecord]:
    """The key with a fresh secret, to be shown once, and its record, in which the old one stays valid `until` then.

    The id stays, and with it the policies and the counts by key.
    """
    key = _new_secret(record.id)
    present = _record(record.id, key, record.tenant, pepper, expires)
    old = Replaced(record.digest, min(until, expires or until, record.expires or until))
    return key, replace(record, digest=present.digest, created=present.created, expires=expires, replaced=old)


def _new_secret(key_id: str) -> str:
    return f"{KEY_PREFIX}{key_id}-{secrets.token_hex(SECRET_BYTES)}"


def _record(key_id: str, key: str, tenant: str, pepper: bytes, expires: datetime | None) -> KeyRecord:
    digest = hmac.digest(pepper, key.encode(), "sha256")
    return KeyRecord(key_id, tenant, digest, datetime.now(UTC), expires)


def bearer_token(authorization: bytes | None) -> bytes:
    """Return the token of `Bearer <token>` (RFC 6750, with the spaces and the case of the scheme as clients write
    them).

    Raises `InvalidApiKey`.
    """
    if not authorization:
        raise InvalidApiKey.missing()
    if len(authorization) > MAX_KEY_CHARS + 16:
        raise InvalidApiKey(f"The API key is longer than {MAX_KEY_CHARS} bytes.")
    scheme, _, key = authorization.strip(_SPACES).replace(b"\t", b" ").partition(b" ")
    key = key.strip(_SPACES)
    if scheme.lower() != b"bearer" or not key or b" " in key:
        raise InvalidApiKey("The Authorization header must be: Bearer YOUR_KEY.")
    return key


def _id_of(key: bytes) -> bytes:
    """The id inside a key of our format; a key of another format can only be an operator's demo key."""
    if not key.startswith(_PREFIX):
        return DEMO.encode()
    return key[len(_PREFIX) :].partition(b"-")[0]
