"""Lets connections in: a few in a turn of the event loop, each to a place in the table or not at all."""

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gateway.errors import Overloaded
from gateway.http.connection import Connection, as_http
from gateway.http.connection_table import ConnectionTable, Full, Place

ACCEPTS_PER_TURN = 16  # some 2 ms: a storm of newcomers does not keep the loop from those who are served
PAUSE_SECONDS = 0.01  # until a connection that was closed has given its file back
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts what comes to a socket that listens, until `close`; to uvicorn it is a server of asyncio's.

    A newcomer for whom there is no place is told so, unless it expects TLS, and costs nothing more. A TLS handshake has
    a place already, and `handshake_timeout` seconds.
    """

    def __init__(
        self,
        sock: socket.socket,
        table: ConnectionTable,
        connection: Callable[[Place], Connection],
        context: ssl.SSLContext | None,
        handshake_timeout: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._table = table
        self._connection = connection
        self._tls: dict[str, Any] = {"ssl": context, "ssl_handshake_timeout": handshake_timeout} if context else {}
        self._opening = set[asyncio.Task[None]]()
        self._spare = _spare_file()
        self._is_open = True
        self._resume()

    def close(self) -> None:
        """Accept nobody any more. The socket stays open, and so do connections."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._sock)
            _close_file(self._spare)

    async def wait_closed(self) -> None:
        """Handshakes that are not over are given up."""
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _resume(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in OUT_OF_FILES:
                    self._out_of_files()
                    return
                continue  # who came has left already
            self._let_in(sock, address[0])

    def _let_in(self, sock: socket.socket, address: str) -> None:
        sock.setblocking(False)
        try:
            place = self._table.admit(address, lambda: _shut(sock))
        except Full as full:
            self._turn_away(sock, full)
            return
        task = self._loop.create_task(self._open(sock, place))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _turn_away(self, sock: socket.socket, reason: Full) -> None:
        with sock, suppress(OSError):
            if not self._tls:
                sock.send(as_http(Overloaded(str(reason), retry_after=1)))
                sock.shutdown(socket.SHUT_WR)
                sock.recv(65_536)  # what is left unread would have the answer taken back

    async def _open(self, sock: socket.socket, place: Place) -> None:
        with suppress(OSError):  # a handshake failed
            try:
                await self._loop.connect_accepted_socket(lambda: self._connection(place), sock, **self._tls)
            except BaseException:
                place.leave()
                raise

    def _out_of_files(self) -> None:
        """Close a connection, else whoever comes: none would be served if all of them stayed in the backlog."""
        if not self._table.make_room():
            _close_file(self._spare)
            with suppress(OSError):
                self._sock.accept()[0].close()
            self._spare = _spare_file()
        self._loop.remove_reader(self._sock)
        self._loop.call_later(PAUSE_SECONDS, self._resume)


def _shut(sock: socket.socket) -> None:
    """The loop finds the connection closed, whatever it does with it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _spare_file() -> int:
    """A descriptor to be given up when there is no other; -1: there is none even for that."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _close_file(number: int) -> None:
    if number >= 0:
        os.close(number)
