"""Announces a replica in the quota store, where routers look for it, for as long as it takes requests."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from socket import socket
from typing import Protocol
from urllib.parse import urlsplit

import orjson

from gateway.admin.port import AdminPort
from gateway.api.service import Service
from gateway.background import beside
from gateway.settings.settings import Settings
from quotas.errors import QuotaError

log = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0  # between two announcements
LOOK_SECONDS = 0.1  # until it is looked again whether the server has begun to serve


class AnnouncementWriter(Protocol):
    """The announcements of a fleet, as `quotas.store.announcements` keeps them."""

    def announce(self, replica: str, said: bytes) -> Awaitable[object]: ...

    def leave(self, replica: str) -> Awaitable[object]: ...


def addresses(advertised: str, port: int, admin_port: int) -> bytes:
    """Return what a replica says of itself: the address of its API, whose port is its own where none is advertised, and
    that of its admin port at the same host.
    """
    parts = urlsplit(advertised)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    url, admin = (f"{parts.scheme}://{host}:{number}" for number in (parts.port or port, admin_port))
    return orjson.dumps({"url": url, "admin": admin})


class Announcer:
    """Says `said` of the replica `name` again and again, from when it serves until it does no more."""

    def __init__(
        self, announcements: AnnouncementWriter, name: str, said: bytes, is_serving: Callable[[], bool]
    ) -> None:
        self._announcements, self._name, self._said = announcements, name, said
        self._is_serving = is_serving
        self._is_there = self._is_away = False

    async def run(self) -> None:
        """Go on as long as the server runs. A store that is away is asked again a period later."""
        while True:
            try:
                await self.tell()
            except QuotaError as error:
                if not self._is_away:
                    log.warning("routers are not told of this replica: %s", error)
                self._is_away = True
            else:
                self._is_away = False
            await asyncio.sleep(PERIOD_SECONDS if self._is_there else LOOK_SECONDS)

    async def tell(self) -> None:
        """Announce the replica if it serves, and take that back once it does no more. Raises `QuotaError`."""
        if self._is_serving():
            self._is_there = True
            await self._announcements.announce(self._name, self._said)
        else:
            await self.leave()

    async def leave(self) -> None:
        """Take it back, if anything was announced. Raises `QuotaError`; then it counts until its time is over."""
        if self._is_there:
            await self._announcements.leave(self._name)
            self._is_there = False


@asynccontextmanager
async def announcing(
    settings: Settings, service: Service, sock: socket, admin: AdminPort | None, is_serving: Callable[[], bool]
) -> AsyncIterator[None]:
    """Announce while the block runs, and take it back at its end; without an address to tell, do nothing."""
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
