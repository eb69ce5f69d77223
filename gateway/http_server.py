"""Uvicorn as every port of the gateway runs it."""

import asyncio
import socket
from functools import partial

import uvicorn

from gateway.connection import Connection
from gateway.http_config import http_config
from gateway.settings import Settings


class HttpServer(uvicorn.Server):
    """Serves given sockets. A TLS handshake has the time that headers have, where uvicorn would leave it the loop's
    60 s: whoever is still at it is no connection yet, and not counted as one.
    """

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
            listener = await asyncio.get_running_loop().create_server(
                connection,
                sock=sock,
                ssl=config.ssl,
                ssl_handshake_timeout=self._handshake_timeout if config.ssl else None,
                backlog=config.backlog,
            )
            self.servers.append(listener)
