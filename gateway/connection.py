"""One client connection: uvicorn's HTTP/1.1 protocol with the limits a hostile or broken peer must meet."""

import asyncio
import socket
from http import HTTPStatus
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.errors import ApiError, HeadersTooLarge, Overloaded, RequestTimedOut
from gateway.responses import encode_headers

MAX_HEADER_BYTES = 64 * 1024
SEND_BUFFER_BYTES = 64 * 1024  # bounds what a reader that stopped can make the kernel keep
DEAD_PEER_SECONDS = 20  # unacknowledged data, or unanswered probes, for this long: the peer is gone
TRANSPORT = "sluice.transport"  # key of the ASGI extension that holds the connection's transport


def bound_socket(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening. Connections accepted from it notice a dead peer: on Linux they inherit options.

    Raises `OSError` when the address cannot be bound.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, DEAD_PEER_SECONDS // 2),
            (socket.TCP_KEEPINTVL, DEAD_PEER_SECONDS // 4),
            (socket.TCP_KEEPCNT, 2),
            (socket.TCP_USER_TIMEOUT, DEAD_PEER_SECONDS * 1000),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.bind(address)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


class Connection(HttpToolsProtocol):
    """Adds to uvicorn's: a time and a size limit on headers, a connection limit, and a typed answer to each.

    A request pipelined behind one that is still being answered is not served: the connection closes after the answer
    (a client must expect that: RFC 9112, 9.3.2), because one that stops reading cannot notice its client leave.
    """

    header_timeout = 10.0  # seconds
    max_connections = 4096

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._header_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._reads_headers = True
        self._deaf = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            reason = f"The server has its limit of {self.max_connections} connections. Try again shortly."
            self._refuse(Overloaded(reason, retry_after=1))
            return
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._reads_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._reads_headers and self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(HeadersTooLarge(f"The request's headers exceed {MAX_HEADER_BYTES} bytes."))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {TRANSPORT: {"transport": self.transport}}
        self._reads_headers = True
        self._header_bytes = 0
        if self._header_timer is None:
            self._expect_headers()

    def on_headers_complete(self) -> None:
        self._stop_header_timer()
        self._reads_headers = False
        answering = self.cycle
        super().on_headers_complete()
        if self.pipeline:
            answering.keep_alive = False
            self.flow.resume_reading()
            self._deaf = True

    def _expect_headers(self) -> None:
        late = RequestTimedOut(f"The request's headers did not arrive within {self.header_timeout:g} s.")
        self._header_timer = self.loop.call_later(self.header_timeout, self._refuse, late)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer outside ASGI and close: there is no request, or not all of one."""
        self._deaf = True
        self._stop_header_timer()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_as_http(error))
        self.transport.close()


def _as_http(error: ApiError) -> bytes:
    """The error as a whole HTTP/1.1 response that ends the connection."""
    body = error.to_body()
    head = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
    head += [name + b": " + value for name, value in encode_headers(error.headers())]
    head += [b"content-length: %d" % len(body), b"connection: close", b"", body]
    return b"\r\n".join(head)
