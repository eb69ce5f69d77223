"""Uvicorn as every port of the gateway runs it."""

import socket

import uvicorn

from gateway.acceptor import Acceptor
from gateway.connection import Connection
from gateway.connection_table import ConnectionTable, Place
from gateway.hangups import Hangups
from gateway.http_config import http_config
from gateway.listening import ListenError, why_not_listening
from gateway.settings import Settings


class HttpServer(uvicorn.Server):
    """Serves given sockets to as many connections as `table` has places for.

    A TLS handshake has the time that headers have, where uvicorn would leave it the loop's 60 s.
    """

    prefix = "--"  # of the flags that choose its port

    def __init__(self, settings: Settings, table: ConnectionTable) -> None:
        super().__init__(http_config(settings))
        self.table = table
        self._header_timeout = settings.header_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._hangups = Hangups()
        for sock in sockets or ():
            self.servers.append(self._listen(sock))  # type: ignore[arg-type]  # it has what uvicorn asks of one

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._hangups.close()

    def _listen(self, sock: socket.socket) -> Acceptor:
        """Raises `ListenError`: of two processes that have bound a port, one can listen."""
        try:
            sock.listen(self.config.backlog)
        except OSError as error:
            host, port, *_ = sock.getsockname()
            raise ListenError(why_not_listening(error, host, port, self.prefix)) from None
        return Acceptor(sock, self.table, self._connection, self.config.ssl, self._header_timeout)

    def _connection(self, place: Place) -> Connection:
        return Connection(
            self.config, self.server_state, self.lifespan.state, place, self._hangups, self._header_timeout
        )
