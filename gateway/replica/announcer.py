"""Announces a replica to routers in the quota store, for as long as it takes requests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from socket import socket
from urllib.parse import urlsplit

import orjson

from gateway.admin.port import AdminPort
from gateway.api.service import Service
from gateway.background import Outages, beside
from gateway.settings.settings import Settings
from quotas.errors import QuotaError
from quotas.store.announcements import Announcements

PERIOD_SECONDS = 1.0  # between two announcements
LOOK_SECONDS = 0.1  # between checks for the server's start


def addresses(advertised: str, port: int, admin_port: int) -> bytes:
    """A replica's announcement: the address of its API, by default at its own port, and of its admin port at the same
    host.
    """
    parts = urlsplit(advertised)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    url, admin = (f"{parts.scheme}://{host}:{number}" for number in (parts.port or port, admin_port))
    return orjson.dumps({"url": url, "admin": admin})


class Announcer:
    """Announces `said` for the replica `name` at intervals, while it serves."""

    def __init__(self, announcements: Announcements, name: str, said: bytes, is_serving: Callable[[], bool]) -> None:
        self._announcements, self._name, self._said = announcements, name, said
        self._is_serving = is_serving
        self._is_there = False

    async def run(self) -> None:
        """Announce as long as the server runs. A store that is away is tried again a period later."""
        outages = Outages("this replica is not announced to routers", QuotaError)
        while True:
            with outages:
                await self.tell()
            await asyncio.sleep(PERIOD_SECONDS if self._is_there else LOOK_SECONDS)

    async def tell(self) -> None:
        """Announce the replica if it serves, else withdraw it. Raises `QuotaError`."""
        if self._is_serving():
            self._is_there = True
            await self._announcements.announce(self._name, self._said)
        else:
            await self.leave()

    async def leave(self) -> None:
        """Withdraw the announcement, if there is one. Raises `QuotaError`; it then expires."""
        if self._is_there:
            await self._announcements.leave(self._name)
            self._is_there = False


@asynccontextmanager
async def announcing(
    settings: Settings, service: Service, sock: socket, admin: AdminPort | None, is_serving: Callable[[], bool]
) -> AsyncIterator[None]:
    """Announce while the block runs, and withdraw at its end; without an advertised address, do nothing."""
    if settings.advertise is None or admin is None:
        yield
        return
    said = addresses(settings.advertise, sock.getsockname()[1], admin.number)
    store, sealed = service.quotas.store, service.keys.fleet.sealed(said)
    announcer = Announcer(store.announcements(service.model), store.replica, sealed, is_serving)
    try:
        async with beside(announcer.run()):
            yield
    finally:
        with suppress(QuotaError):
            await announcer.leave()
