"""Accepts connections: a few in a turn of the event loop, each of which is added to the table or refused.

A flood that opens and closes connections fills the backlog with connections that ended before they are accepted. They
cost a tenth of an open one, so that the connection of a tenant behind thousands of them does not wait for each to get a
transport. So do requests without a key that were closed as soon as they were sent, which are refused here.
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

from gateway.errors import ApiError, InvalidApiKey, Overloaded
from gateway.http.connection import MAX_HEADER_BYTES, HttpConnection, as_http
from gateway.http.connection_table import ConnectionEntry, ConnectionLimitReached, ConnectionTable

# Of a turn of the loop, about 1 ms in parts of 10 us: a flood does not keep the loop from connections that are served.
PARTS_PER_TURN = 100
PARTS_ENDED, PARTS_REFUSED, PARTS_OPENED = 1, 4, 12  # of a connection
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
        num_parts, listening = 0, self._sock.fileno()
        while num_parts < PARTS_PER_TURN:
            num_parts += PARTS_ENDED
            number = _accept4(listening, None, None, socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            if number < 0:
                error = ctypes.get_errno()
                if error == errno.EAGAIN:
                    return
                if error in OUT_OF_FILES:
                    self._out_of_files()
                    return
                continue  # the peer has left already
            head = _sent_before_its_end(number)
            if head == b"":
                _close(number)
                continue
            sock = socket.socket(self._sock.family, self._sock.type, self._sock.proto, number)
            try:
                address = sock.getpeername()
            except OSError:  # it has left since
                sock.close()
                continue
            if head is not None and not self._tls and _needs_a_key(head):
                self._refuse(sock, InvalidApiKey.missing())
                num_parts += PARTS_REFUSED
                continue
            self._add(sock, address[0])
            num_parts += PARTS_OPENED

    def _add(self, sock: socket.socket, address: str) -> None:
        try:
            entry = self._table.add(address, lambda: _shut(sock))
        except ConnectionLimitReached as error:
            self._refuse(sock, Overloaded(str(error), retry_after=1))
            return
        task = self._loop.create_task(self._open(sock, entry))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _refuse(self, sock: socket.socket, error: ApiError) -> None:
        with sock, suppress(OSError):
            if not self._tls:
                sock.send(as_http(error))
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


def _sent_before_its_end(number: int) -> bytes | None:
    """Return all that a client has sent which closed its end of the connection, or nothing if that are no headers to be
    answered, or the connection was reset; None if it has not closed it, or has sent more than headers may have.
    """
    _size.value = 1
    if _getsockopt(number, socket.IPPROTO_TCP, socket.TCP_INFO, ctypes.byref(_state), ctypes.byref(_size)):
        return b""
    if _state.value != TCP_CLOSE_WAIT:
        return b"" if _state.value == TCP_CLOSE else None
    count = _recv(number, _head, MAX_HEADER_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    sent = ctypes.string_at(_head, max(0, count))
    if END_OF_HEADERS not in sent:
        return b""
    return sent if count < MAX_HEADER_BYTES else None


def _needs_a_key(sent: bytes) -> bool:
    """True for a request that is refused for want of a key, before anything else of it is read: a flood of these
    requests, each closed as soon as it was sent, would delay every connection behind them by a quarter of a millisecond
    each.
    """
    if not sent.startswith(b"POST /v1/") or sent.startswith(b"POST /v1/messages"):  # which has errors of its own form
        return False
    head = sent.partition(END_OF_HEADERS)[0].lower()
    return head.count(b"\r\nhost:") == 1 and b"authorization" not in head and b"x-api-key" not in head


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
