"""The port of the admin plane and the key that opens it, both acquired before anything is served."""

import hmac
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256

from gateway.errors import InvalidApiKey
from gateway.http.server import open_port
from gateway.settings.settings import Settings
from gateway.tenants.auth import bearer_token
from gateway.tenants.key_store import KeyStore

FINGERPRINT_DIGITS = 8


class AdminKey:
    """The admin key, kept as its digest alone. The audit log shows the digest's first digits, `fingerprint`."""

    def __init__(self, key: str) -> None:
        self._digest = sha256(key.encode()).digest()
        self.fingerprint = self._digest.hex()[:FINGERPRINT_DIGITS]

    def check(self, authorization: bytes | None) -> None:
        """Raise `InvalidApiKey`, in constant time, for any other key."""
        given = sha256(bearer_token(authorization)).digest()
        if not hmac.compare_digest(given, self._digest):
            raise InvalidApiKey("Incorrect admin key provided: tenants' keys do not open the admin plane.")


def admin_secret(settings: Settings) -> str:
    """Return the configured key, else that of the state directory. Raises `KeyStoreError`."""
    if settings.admin_key is not None:
        return settings.admin_key.get_secret_value()
    return KeyStore(settings.state_dir).admin_key()


def admin_key(settings: Settings) -> AdminKey:
    """The digest of `admin_secret`."""
    return AdminKey(admin_secret(settings))


@dataclass(frozen=True, slots=True)
class AdminPort:
    sock: socket.socket  # bound
    key: AdminKey

    @property
    def number(self) -> int:
        return int(self.sock.getsockname()[1])


@contextmanager
def open_admin_port(settings: Settings) -> Iterator[AdminPort | None]:
    """Bind the port and read the key; yields None if the settings disable the port. Raises `ListenError` and
    `KeyStoreError`.
    """
    if settings.admin_port == "off":
        yield None
        return
    with open_port(settings.admin_host, settings.admin_port, "--admin-") as sock:
        yield AdminPort(sock, admin_key(settings))
