"""The HTTP server of an admin port."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.types import ASGIApp

from gateway.http.connection_table import ConnectionTable
from gateway.http.server import HttpServer
from gateway.settings.machine import ADMIN_CONNECTIONS
from gateway.settings.settings import Settings


class AdminServer(HttpServer):
    """A server that ignores signals: it ends after the tenants' server."""

    prefix = "--admin-"

    def __init__(self, settings: Settings, app: ASGIApp) -> None:
        super().__init__(settings, ConnectionTable(ADMIN_CONNECTIONS))
        self.config.app = app
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@asynccontextmanager
async def serving(server: AdminServer, sock: socket.socket) -> AsyncIterator[None]:
    """Serve on a socket while the block runs."""
    task = asyncio.create_task(server.serve(sockets=[sock]))
    started = asyncio.create_task(server.listening.wait())
    await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
    started.cancel()
    if task.done():
        await task
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await task
