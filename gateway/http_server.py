"""Uvicorn as every port of the gateway runs it."""

import asyncio
import socket
from collections.abc import Callable
from functools import partial

import uvicorn

from gateway.connection import Connection
from gateway.http_config import http_config
from gateway.listening import ListenError, why_not_listening
from gateway.settings import Settings


class HttpServer(uvicorn.Server):
    """Serves given sockets. A TLS handshake has the time that headers have, where uvicorn would leave it the loop's
    60 s: whoever is still at it is no connection yet, and not counted as one.
    """

    prefix = "--"  # of the flags that choose its port

    def __init__(self, settings: Settings, max_connections: int) -> None:
        super().__init__(http_config(settings, max_connections))
        self._handshake_timeout = settings.header_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        config = self.config
        assert isinstance(config.http_protocol_class, type)
        assert issubclass(config.http_protocol_class, Connection)
        connection = partial(config.http_protocol_class, config, self.server_state, self.lifespan.state)
        for sock in sockets or ():
            self.servers.append(await self._listen(sock, connection))

    async def _listen(self, sock: socket.socket, connection: Callable[[], asyncio.Protocol]) -> asyncio.Server:
        """Raises `ListenError`: of two processes that have bound a port, one can listen."""
        config = self.config
        try:
            return await asyncio.get_running_loop().create_server(
                connection,
                sock=sock,
                ssl=config.ssl,
                ssl_handshake_timeout=self._handshake_timeout if config.ssl else None,
                backlog=config.backlog,
            )
        except OSError as error:
            host, port, *_ = sock.getsockname()
            raise ListenError(why_not_listening(error, host, port, self.prefix)) from None
