"""The port of the admin plane and the key that opens it: both are had before anything is served, or nothing is."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.admin.key import AdminKey, admin_key
from gateway.listening import open_port
from gateway.settings import Settings


@dataclass(frozen=True, slots=True)
class AdminPort:
    sock: socket.socket  # bound
    key: AdminKey

    @property
    def number(self) -> int:
        return int(self.sock.getsockname()[1])


@contextmanager
def open_admin_port(settings: Settings) -> Iterator[AdminPort | None]:
    """None where settings want none. Raises `ListenError` and `KeyStoreError`."""
    if settings.admin_port == "off":
        yield None
        return
    with open_port(settings.admin_host, settings.admin_port, "--admin-") as sock:
        yield AdminPort(sock, admin_key(settings))
