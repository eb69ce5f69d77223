"""Accepts connections: a few in a turn of the event loop, each of which is added to the table or refused.

A flood that opens and closes connections fills the backlog with connections that ended before they are accepted. They
cost a tenth of an open one, so that the connection of a tenant behind thousands of them does not wait for each to get a
transport.
"""

import asyncio
import ctypes
import errno
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gateway.errors import Overloaded
from gateway.http.connection import MAX_HEADER_BYTES, HttpConnection, as_http
from gateway.http.connection_table import ConnectionEntry, ConnectionLimitReached, ConnectionTable

OPENED_PER_TURN = 8  # about 1 ms: a flood of new connections does not keep the loop from those that are served
ACCEPTS_PER_TURN = 100  # under 1 ms if every one of them has ended
END_OF_HEADERS = b"\r\n\r\n"
TCP_CLOSE, TCP_CLOSE_WAIT = 7, 8  # states, the first byte of the kernel's tcp_info: reset, and closed by the client
PAUSE_SECONDS = 0.01  # until the file of a closed connection is free
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts the connections to a listening socket until `close`; uvicorn takes it for a server of asyncio's.

    A connection beyond the limit is sent an error, unless it expects TLS, and costs nothing more. A TLS handshake
    counts as a connection, and may take `handshake_timeout` seconds.
    """

    def __init__(
        self,
        sock: socket.socket,
        table: ConnectionTable,
        connection: Callable[[ConnectionEntry], HttpConnection],
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
        """Accept no more connections. The socket stays open, and so do connections."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._sock)
            _close_file(self._spare)

    async def wait_closed(self) -> None:
        """Cancel the handshakes that are not over."""
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _resume(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        num_opened, listening = 0, self._sock.fileno()
        for _ in range(ACCEPTS_PER_TURN):
            number = _accept4(listening, None, None, socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            if number < 0:
                error = ctypes.get_errno()
                if error == errno.EAGAIN:
                    return
                if error in OUT_OF_FILES:
                    self._out_of_files()
                    return
                continue  # the peer has left already
            if _has_ended(number):
                _close(number)
                continue
            sock = socket.socket(self._sock.family, self._sock.type, self._sock.proto, number)
            try:
                address = sock.getpeername()
            except OSError:  # it has left since
                sock.close()
                continue
            self._add(sock, address[0])
            num_opened += 1
            if num_opened == OPENED_PER_TURN:
                return

    def _add(self, sock: socket.socket, address: str) -> None:
        try:
            entry = self._table.add(address, lambda: _shut(sock))
        except ConnectionLimitReached as error:
            self._refuse(sock, error)
            return
        task = self._loop.create_task(self._open(sock, entry))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _refuse(self, sock: socket.socket, reason: ConnectionLimitReached) -> None:
        with sock, suppress(OSError):
            if not self._tls:
                sock.send(as_http(Overloaded(str(reason), retry_after=1)))
                sock.shutdown(socket.SHUT_WR)
                sock.recv(65_536)  # unread input would make the kernel drop the answer

    async def _open(self, sock: socket.socket, entry: ConnectionEntry) -> None:
        with suppress(OSError):  # a handshake failed
            try:
                await self._loop.connect_accepted_socket(lambda: self._connection(entry), sock, **self._tls)
            except BaseException:
                entry.remove()
                raise

    def _out_of_files(self) -> None:
        """Evict a connection, or close the next one in the backlog, which would never be served if all connections
        stayed.
        """
        if not self._table.evict():
            _close_file(self._spare)
            with suppress(OSError):
                self._sock.accept()[0].close()
            self._spare = _spare_file()
        self._loop.remove_reader(self._sock)
        self._loop.call_later(PAUSE_SECONDS, self._resume)


# The methods of a socket give the interpreter's lock away at each call, and the loop would wait for it while a step is
# planned: a connection that has ended took 170 us beside a busy thread, and takes 70.
_libc = ctypes.PyDLL(None, use_errno=True)
_accept4, _getsockopt, _recv, _close = _libc.accept4, _libc.getsockopt, _libc.recv, _libc.close
_recv.restype = ctypes.c_ssize_t
_recv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_state = ctypes.c_uint8()
_size = ctypes.c_uint32()
_head = ctypes.create_string_buffer(MAX_HEADER_BYTES)


def _has_ended(number: int) -> bool:
    """Returns whether the client closed or reset the connection, and sent no headers that could be answered."""
    _size.value = 1
    if _getsockopt(number, socket.IPPROTO_TCP, socket.TCP_INFO, ctypes.byref(_state), ctypes.byref(_size)):
        return True
    if _state.value != TCP_CLOSE_WAIT:
        return _state.value == TCP_CLOSE
    count = _recv(number, _head, MAX_HEADER_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return count <= 0 or END_OF_HEADERS not in ctypes.string_at(_head, count)


def _shut(sock: socket.socket) -> None:
    """Shut the connection down, so that every later use by the loop finds it closed."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _spare_file() -> int:
    """A descriptor in reserve, to be closed when no other is left; -1 if there is none even for that."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _close_file(number: int) -> None:
    if number >= 0:
        os.close(number)
