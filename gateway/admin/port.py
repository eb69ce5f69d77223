"""The port of the admin plane and the keys that open it, acquired before anything is served."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.admin.admins import AdminKeys, AdminStore
from gateway.http.server import open_port
from gateway.settings.settings import Settings
from gateway.tenants.key_store import KeyStore


def admin_secret(settings: Settings) -> str:
    """Return the configured key, else that of the state directory. Raises `KeyStoreError`."""
    if settings.admin_key is not None:
        return settings.admin_key.get_secret_value()
    return KeyStore(settings.state_dir).admin_key()


def admin_keys(settings: Settings) -> AdminKeys:
    """The keys that open the port: `admin_secret`, and those of the admins in the state directory."""
    return AdminKeys(admin_secret(settings), AdminStore(KeyStore(settings.state_dir)))


@dataclass(frozen=True, slots=True)
class AdminPort:
    sock: socket.socket  # bound
    keys: AdminKeys

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
        yield AdminPort(sock, admin_keys(settings))
