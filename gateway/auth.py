"""Who is calling: API keys, and the principals they stand for.

A key is `sk-sluice-<id>-<secret>`. It is known only by its HMAC-SHA-256 under a pepper, so that neither the key file
nor a memory of it opens the gateway; the id finds the entry, and only the digests are compared.
"""

import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from gateway.errors import InvalidApiKey
from gateway.key_store import KeyRecord, KeyStore, KeyStoreError
from gateway.settings import Settings

PREFIX = "sk-sluice-"
DEMO = "demo"  # id of the demo key, and of its tenant
MAX_KEY_BYTES = 512
SECRET_BYTES = 20
_PREFIX = PREFIX.encode()
_SPACES = b" \t"


@dataclass(frozen=True, slots=True)
class Principal:
    """On whose behalf a request runs."""

    tenant: str
    key_id: str


class KeyRing:
    """The keys that open this gateway. Immutable; `clock` gives Unix seconds."""

    def __init__(self, pepper: bytes, records: Iterable[KeyRecord], clock: Callable[[], float] = time.time) -> None:
        self._pepper = pepper
        self._clock = clock
        self._entries = {record.id.encode(): _Entry.of(record) for record in records}
        self._nobody = _Entry(Principal("", ""), secrets.token_bytes(32), 0.0)

    def __len__(self) -> int:
        return len(self._entries)

    def authenticate(self, authorization: bytes | None) -> Principal:
        """The principal behind an Authorization header.

        Raises `InvalidApiKey`, in the same words and after the same work for an unknown, a wrong and an expired key.
        """
        key = _bearer(authorization)
        entry = self._entries.get(_id_of(key), self._nobody)
        matches = hmac.compare_digest(hmac.digest(self._pepper, key, "sha256"), entry.digest)
        if matches and self._clock() < entry.expires:
            return entry.principal
        raise InvalidApiKey("Incorrect API key provided: it is unknown, revoked or expired.")


@dataclass(frozen=True, slots=True)
class _Entry:
    principal: Principal
    digest: bytes
    expires: float  # Unix seconds

    @staticmethod
    def of(record: KeyRecord) -> "_Entry":
        expires = record.expires.timestamp() if record.expires else float("inf")
        return _Entry(Principal(record.tenant, record.id), record.digest, expires)


def open_key_ring(settings: Settings) -> tuple[KeyRing, str | None]:
    """The stored keys and the demo key, and the demo key itself, to be shown to who starts the gateway.

    Raises `KeyStoreError`, also when there would be no key at all.
    """
    store = KeyStore(settings.state_dir)
    pepper = pepper_of(settings, store)
    records = store.records()
    key = demo_key(settings, pepper)
    if key is not None:
        records.append(demo_record(key, pepper))
    if len({record.id for record in records}) < len(records):
        raise KeyStoreError(f"{settings.state_dir}/keys.json and the demo key have two keys of one id: revoke one")
    if not records:
        raise KeyStoreError(
            f"no API key would open this gateway: none is stored, and {settings.host} is not a loopback address, for "
            "which a demo key would be made; set SLUICE_DEMO_KEY, or make a key with `sluice keys create TENANT`"
        )
    return KeyRing(pepper, records), key


def pepper_of(settings: Settings, store: KeyStore) -> bytes:
    return settings.pepper.get_secret_value().encode() if settings.pepper else store.pepper()


def demo_key(settings: Settings, pepper: bytes) -> str | None:
    """The configured demo key; else, on a loopback address, one that follows from the pepper and so is never stored."""
    if settings.demo_key is not None:
        return settings.demo_key.get_secret_value()
    if not settings.is_loopback:
        return None
    return f"{PREFIX}{DEMO}-{hmac.digest(pepper, b'sluice demo key', 'sha256')[:SECRET_BYTES].hex()}"


def demo_record(key: str, pepper: bytes) -> KeyRecord:
    return _record(_id_of(key.encode()).decode(), key, DEMO, pepper, None)


def new_key(tenant: str, pepper: bytes, expires: datetime | None = None) -> tuple[str, KeyRecord]:
    """A fresh key for `tenant`, to be shown once, and what is stored of it."""
    key_id = secrets.token_hex(4)
    key = f"{PREFIX}{key_id}-{secrets.token_hex(SECRET_BYTES)}"
    return key, _record(key_id, key, tenant, pepper, expires)


def _record(key_id: str, key: str, tenant: str, pepper: bytes, expires: datetime | None) -> KeyRecord:
    digest = hmac.digest(pepper, key.encode(), "sha256")
    return KeyRecord(key_id, tenant, digest, datetime.now(UTC), expires)


def _bearer(authorization: bytes | None) -> bytes:
    """The token of `Bearer <token>` (RFC 6750, with the spaces and the case of the scheme as clients write them)."""
    if not authorization:
        raise InvalidApiKey("You didn't provide an API key: send it in a header, Authorization: Bearer YOUR_KEY.")
    if len(authorization) > MAX_KEY_BYTES + 16:
        raise InvalidApiKey(f"The API key is longer than {MAX_KEY_BYTES} bytes.")
    scheme, _, key = authorization.strip(_SPACES).replace(b"\t", b" ").partition(b" ")
    key = key.strip(_SPACES)
    if scheme.lower() != b"bearer" or not key or b" " in key:
        raise InvalidApiKey("The Authorization header must be: Bearer YOUR_KEY.")
    return key


def _id_of(key: bytes) -> bytes:
    """The id inside a key of our format; any other key can only be a demo key that an operator chose."""
    if not key.startswith(_PREFIX):
        return DEMO.encode()
    return key[len(_PREFIX) :].partition(b"-")[0]
