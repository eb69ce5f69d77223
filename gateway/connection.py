"""One client connection: uvicorn's HTTP/1.1 protocol with the limits a hostile or broken peer must meet."""

import asyncio
import logging
import socket
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.errors import ApiError, BadRequest, HeadersTooLarge, Overloaded, RequestTimedOut
from gateway.responses import encode_headers, request_id

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
SEND_BUFFER_BYTES = 64 * 1024  # bounds what a reader that stopped can make the kernel keep
DEAD_PEER_SECONDS = 20  # unacknowledged data, or unanswered probes, for this long: the peer is gone
TRANSPORT = "sluice.transport"  # key of the ASGI extension that holds the connection's transport
_TOO_LARGE = f"The request's headers exceed {MAX_HEADER_BYTES} bytes."


def bound_socket(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening; what it accepts notices a dead peer, since Linux passes its options on.

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
    """Adds to uvicorn's: a time and a size limit on what is not body, a connection limit, and a typed answer to each.

    What follows a request that is still being answered is not read: the connection closes after the answer (RFC 9112,
    9.3.2 lets a client expect that), because a connection that stops reading cannot notice its client leave. The rest
    of a body that was answered early is discarded, for as long as headers may take. An offer to upgrade is ignored.
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
        self._timer: asyncio.TimerHandle | None = None  # runs while the peer owes bytes
        self._head_bytes = 0  # read since the last message, or since the last part of this one's body
        self._reads_headers = True
        self._deaf = False

    @property
    def is_answering(self) -> bool:
        """Whether a request is being read or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def give_up(self, error: ApiError) -> None:
        """Drop the connection. A client whose answer has not begun is told why."""
        self._refuse(error)
        if self.cycle is not None and self.cycle.response_started:
            self.transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            reason = f"The server has its limit of {self.max_connections} connections. Try again shortly."
            self._refuse(Overloaded(reason, retry_after=1))
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        if self.cycle is not None and self.cycle.response_complete:
            self._start_timer()
        self._head_bytes += len(data)
        self._feed(data)
        if self._head_bytes > MAX_HEADER_BYTES and not self._deaf:
            self._refuse(HeadersTooLarge(_TOO_LARGE))

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._deaf:
                self._feed_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._deaf:
                self._misheard()

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """The parser ends an upgrade request with its headers: parse them again as one that asks for nothing."""
        head = [b"%s %s HTTP/1.1" % (self.parser.get_method(), self.url)]
        head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"\r\n".join([*head, b"", rest]))

    def _misheard(self) -> None:
        if self.is_answering and not self.cycle.more_body:
            self._hear_no_more()
        else:
            self._refuse(BadRequest("The request is not valid HTTP/1.1."))

    # the parser's callbacks

    def on_message_begin(self) -> None:
        if self.is_answering:
            self._hear_no_more()
            return
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self.scope["extensions"] = {TRANSPORT: {"transport": self.transport}}
        self._reads_headers = True
        self._start_timer()

    def on_headers_complete(self) -> None:
        if self._deaf or (self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"):
            return
        if sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self._refuse(HeadersTooLarge(_TOO_LARGE))
            return
        self._stop_timer()
        self._reads_headers = False
        super().on_headers_complete()
        self.headers = []  # what still comes are trailers, which nobody reads

    def on_body(self, body: bytes) -> None:
        if not self._deaf:
            self._head_bytes = 0
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._deaf or self._reads_headers:
            return
        self._head_bytes = 0
        super().on_message_complete()
        if self.cycle.response_complete:
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # what they share

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.header_timeout, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self._reads_headers:
            self._refuse(RequestTimedOut(f"The request's headers did not arrive within {self.header_timeout:g} s."))
        else:
            self.transport.close()

    def _hear_no_more(self) -> None:
        """Answer what was asked, and close."""
        self._deaf = True
        self.cycle.keep_alive = False

    def _refuse(self, error: ApiError) -> None:
        """Answer outside ASGI and close: there is no request, or not all of one."""
        self._deaf = True
        self._stop_timer()
        if self.transport.is_closing():
            return
        log.info("a connection was ended", extra={"fields": {"status": error.status, "code": error.code or error.type}})
        if not self.is_answering or not self.cycle.response_started:
            self.transport.write(_as_http(error))
        if self.is_answering:
            self.cycle.disconnected = True
        self.transport.close()


def _as_http(error: ApiError) -> bytes:
    """The error as a whole HTTP/1.1 response that ends the connection."""
    body = error.to_body()
    head = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
    head += [name + b": " + value for name, value in encode_headers(error.headers() | {"connection": "close"})]
    head += [b"x-request-id: " + request_id(), b"content-length: %d" % len(body), b"", body]
    return b"\r\n".join(head)
