"""The HTTP server: its listener, and how it ends."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gateway.connection import Connection
from gateway.connection_table import ConnectionTable
from gateway.errors import ShuttingDown
from gateway.http_server import HttpServer
from gateway.scope import Lives
from gateway.settings import Settings

log = logging.getLogger(__name__)

END_SECONDS = 2.0  # in which requests that are told to end do


class Server(HttpServer):
    """The tenants' port, which says when it has started and drains when it is told to stop.

    A drain: not ready from that moment, and still serving for `drain_delay`; then new requests are refused, and those
    in flight have `drain_timeout` to end by themselves before they are ended with an error. The port closes last.
    """

    def __init__(self, settings: Settings, lives: Lives, on_started: Callable[[], object]) -> None:
        super().__init__(settings, ConnectionTable(settings.max_connections, settings.max_connections_per_peer))
        self._lives = lives
        self._on_started = on_started
        self._delay = settings.drain_delay
        self._timeout = settings.drain_timeout
        self._hurry = asyncio.Event()

    def drain(self) -> None:
        """Stop in order."""
        if not self.should_exit:
            self.should_exit = True
            if not self._delay:
                self._lives.close()  # `shutdown` is called up to 0.1 s later, when uvicorn next looks
            log.info("draining: %d requests are in flight", len(self.server_state.tasks))

    def end(self) -> None:
        """Stop now: what is in flight is ended with an error."""
        self.should_exit = self.force_exit = True
        self._hurry.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal drains, the second ends now. Uvicorn would raise it again before `serve` has cleaned up."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if self.should_exit:
            self.end()
        else:
            self.drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._hurried(self._delay)
        self._lives.close()
        until = asyncio.get_running_loop().time() + self._timeout
        tasks = set(self.server_state.tasks)
        for connection in self._answering():
            connection.shutdown()
        if await self._unfinished(tasks):
            await self._end_all(tasks)
        left = until - asyncio.get_running_loop().time()  # for answers on their way to slow readers
        self.config.timeout_graceful_shutdown = max(END_SECONDS, left)  # type: ignore[assignment]
        await super().shutdown(sockets)

    async def _hurried(self, seconds: float) -> None:
        """Wait so long, or until there is no time left."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    async def _unfinished(self, tasks: set[asyncio.Task[None]]) -> bool:
        """Whether some of them go on when their time is over."""
        if not tasks:
            return False
        timer = asyncio.create_task(self._hurried(self._timeout))
        ended = asyncio.create_task(asyncio.wait(tasks))
        await asyncio.wait({timer, ended}, return_when=asyncio.FIRST_COMPLETED)
        timer.cancel()
        return not ended.done()

    async def _end_all(self, tasks: set[asyncio.Task[None]]) -> None:
        """Tell every client so. One that reads nothing, or has not sent all of its request, is cut off."""
        log.warning("%d requests are ended: their time to end by themselves is over", sum(not t.done() for t in tasks))
        self._lives.end_all(ShuttingDown())
        await asyncio.wait(tasks, timeout=END_SECONDS)
        for connection in self._answering():
            connection.give_up(ShuttingDown())

    def _answering(self) -> list[Connection]:
        connections = [c for c in self.server_state.connections if isinstance(c, Connection)]
        return [connection for connection in connections if connection.is_answering]
