"""The one key of the admin plane."""

import hmac
from hashlib import sha256

from gateway.auth import bearer_token
from gateway.errors import InvalidApiKey
from gateway.key_store import KeyStore
from gateway.settings import Settings

FINGERPRINT_DIGITS = 8


class AdminKey:
    """Known by its digest only, as whose `fingerprint` it stands in the audit log."""

    def __init__(self, key: str) -> None:
        self._digest = sha256(key.encode()).digest()
        self.fingerprint = self._digest.hex()[:FINGERPRINT_DIGITS]

    def check(self, authorization: bytes | None) -> None:
        """Raises `InvalidApiKey`, after the same work for every key that is not this one."""
        given = sha256(bearer_token(authorization)).digest()
        if not hmac.compare_digest(given, self._digest):
            raise InvalidApiKey("Incorrect admin key provided: keys of tenants do not open the admin plane.")


def admin_key(settings: Settings) -> AdminKey:
    """The configured key, else that of the state directory. Raises `KeyStoreError`."""
    if settings.admin_key is not None:
        return AdminKey(settings.admin_key.get_secret_value())
    return AdminKey(KeyStore(settings.state_dir).admin_key())
