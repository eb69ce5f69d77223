"""What is done to stored API keys, by the command line and by the admin port alike."""

from datetime import datetime

from gateway.auth import rotated
from gateway.key_store import KeyRecord, KeyStore, KeyStoreError


class UnknownKey(KeyStoreError):
    """There is no such key in the directory."""

    def __init__(self, key_id: str) -> None:
        super().__init__(
            f"there is no stored key {key_id!r:.80}: see `sluice keys list`; one in a policy file is changed there"
        )


class RotatedAlready(KeyStoreError):
    """A key has two secrets at most: whoever still uses the older one of them was promised its time."""

    def __init__(self, key_id: str, until: datetime) -> None:
        super().__init__(
            f"{key_id} was rotated already, and its old secret opens until {until:%Y-%m-%d %H:%M} UTC: wait until "
            "then, or end all its older secrets now with --overlap 0s"
        )


def rotate(
    store: KeyStore, pepper: bytes, key_id: str, now: datetime, until: datetime, expires: datetime | None
) -> tuple[str, KeyRecord]:
    """Give a stored key a new secret, to be shown once; the present one opens `until` then. The key `expires`, or lives
    as long from now as it was to live. Raises `UnknownKey`, `RotatedAlready` and `KeyStoreError`.
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
