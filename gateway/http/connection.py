"""One client connection: uvicorn's HTTP/1.1 protocol with limits for hostile and broken peers."""

import asyncio
import logging
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from math import inf
from typing import Any

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.errors import ApiError, BadRequest, HeadersTooLarge, Overloaded, RequestTimedOut
from gateway.http.connection_table import ConnectionEntry
from gateway.http.request_scope import TRANSPORT, Exchange
from gateway.http.responses import encode_headers, request_id
from quotas.policy.units import show_size

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 * 1024
SEND_BUFFER_BYTES = 64 * 1024  # bounds the kernel memory of a stalled reader
DEAD_PEER_SECONDS = 20  # without an answer to probes; the shortest TCP_USER_TIMEOUT of a connection
FREE_DISCARD_BYTES = 256 * 1024  # of a connection, discarded without delay
DISCARDED_PER_SECOND = 32 * 2**20  # bytes, of all connections; it takes some 3 % of a core
LOOK_SECONDS = 0.001  # for a pass of the event loop that reads
PROBE_SECONDS = 5  # between probes of a client that closed its sending half
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # ignored by a client that did not ask for it (RFC 9110, 15.2.1)
_CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"  # means nothing in an event stream
_TOO_LARGE = f"The request's headers exceed {show_size(MAX_HEADER_BYTES)}."


def bound_socket(host: str, port: int, shared: bool = False) -> socket.socket:
    """A bound socket that does not listen yet.

    Its connections will notice a dead peer, since Linux passes its options on to them. Others may be bound to the port
    if all of them are `shared`. Raises `OSError` when the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError as error:  # a name that no name can be
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (socket.TCP_KEEPIDLE, DEAD_PEER_SECONDS // 2),
            (socket.TCP_KEEPINTVL, DEAD_PEER_SECONDS // 4),
            (socket.TCP_KEEPCNT, 2),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.bind(address)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


class HangupWatcher:
    """Watches half-closed sockets for a reset (EPOLLHUP), which the event loop does not.

    It has an epoll of its own, because every epoll reports a reset even if it is asked for nothing.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], object]] = {}
        self._loop.add_reader(self._epoll.fileno(), self._poll)

    def watch(self, number: int, on_hangup: Callable[[], object]) -> None:
        """Call `on_hangup`, once, when the other end of the descriptor's connection has closed both ways."""
        self._callbacks[number] = on_hangup
        self._epoll.register(number, 0)

    def forget(self, number: int) -> None:
        """Stop watching a descriptor before it is closed, lest its number be watched when reused."""
        if self._callbacks.pop(number, None) is not None:
            with suppress(OSError, ValueError):
                self._epoll.unregister(number)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _poll(self) -> None:
        for number, _ in self._epoll.poll(0):
            on_hangup = self._callbacks.get(number)
            self.forget(number)
            if on_hangup is not None:
                on_hangup()


class DiscardPace:
    """Limits the rate at which all connections together may send discarded bytes, such as the rest of a refused body:
    otherwise a sender could keep the loop busy at no cost.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free_at = 0.0

    def take(self, num_bytes: int) -> float:
        """Count bytes that were discarded, and return the seconds until their sender may send more."""
        now = self._clock()
        self._free_at = max(self._free_at, now) + num_bytes / DISCARDED_PER_SECOND
        return self._free_at - now


class HttpConnection(HttpToolsProtocol):
    """Adds to uvicorn's protocol limits of time and size on headers, eviction, and a typed error for each.

    Requests that follow one which is still being answered are not read: the connection closes after the answer (RFC
    9112, 9.3.2 lets a client expect that), because a connection that stops reading cannot notice its client leave. The
    rest of a body that was answered early is discarded, for as long as headers may take, and only then is a connection
    that is to end closed, or else the answer would be lost (9.6). An offer to upgrade is ignored.

    A client that stops reading is dropped after `write_timeout`, on every port and in every kind of answer.

    A client that closes its sending half may wait for its answer or be gone, and only writing to it tells: it is sent
    bytes that mean nothing, and a reset ends the connection. Over TLS and in HTTP/1.0 it counts as gone.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        entry: ConnectionEntry,
        hangup_watcher: HangupWatcher,
        discard_pace: DiscardPace,
        header_timeout: float = 10.0,
        write_timeout: float = 30.0,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._entry = entry
        self._hangup_watcher = hangup_watcher
        self._discard_pace = discard_pace
        self._header_timeout = header_timeout  # seconds
        self._write_timeout = write_timeout  # seconds
        self._writing: asyncio.TimerHandle | None = None  # runs while the client reads too slowly
        self._timer: asyncio.TimerHandle | None = None  # runs while bytes of the peer are due
        self._head_bytes = 0  # read since the last message, or since the last part of this one's body
        self._reads_headers = True
        self._ignores_input = False
        self._discarded = 0  # bytes
        self._exchange: Exchange | None = None  # the newest request
        self._lingers = False  # everything is answered, and input is discarded until the connection is closed
        self._watched: int | None = None  # the descriptor, once the client has closed its sending half

    @property
    def is_answering(self) -> bool:
        """Returns whether a request is being read or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def drop(self, error: ApiError) -> None:
        """Drop the connection. A client whose answer has not begun is sent the error."""
        self._send_error(error)
        if self.cycle is not None and self.cycle.response_started:
            self.transport.abort()
        self.transport.close()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._entry.close = self._evict
        self._start_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        self._stop_writing_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_writing_timer()
        self._entry.remove()
        if self._watched is not None:
            self._hangup_watcher.forget(self._watched)
        super().connection_lost(exc)
        if self._exchange is not None:
            self._exchange.end()
        if self.cycle is not None:
            self.cycle.transport = self.transport  # the cycle writes past this connection

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the connection stays open."""
        if self.is_answering and self.cycle.more_body and not (self._ignores_input or self._is_refused_body):
            error = BadRequest("The request's body ended before its announced length, or its last chunk.")
            self._send_error(error, logging.DEBUG)  # a client that has left altogether does not read it
            return False
        has_asked = self.is_answering and not self.cycle.more_body and not self._lingers
        if not has_asked or self.scheme != "http" or self.scope["http_version"] != "1.1":
            return False
        self._ignore_input()
        self._watched = self.transport.get_extra_info("socket").fileno()
        self._hangup_watcher.watch(self._watched, self.transport.abort)
        self._probe()
        return True

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            self._discard(len(data))
            return
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        self._feed(data)
        if self._ignores_input:
            return
        if self._is_refused_body:
            self._discard(len(data))
        if self._head_bytes > MAX_HEADER_BYTES:
            self._refuse(HeadersTooLarge(_TOO_LARGE))
        elif not self.is_answering and self.timeout_keep_alive_task is None:
            self._start_timer()  # more is due: few requests come in more than one part

    @property
    def _is_refused_body(self) -> bool:
        """True while the rest of a body is read whose request has been answered, or refused with a delay."""
        exchange = self._exchange
        if self._reads_headers or exchange is None or exchange.is_complete:
            return False
        return exchange.is_refused or not self.is_answering

    def _discard(self, num_bytes: int) -> None:
        self._discarded += num_bytes
        if self._discarded > FREE_DISCARD_BYTES and not self.transport.is_closing():
            self.flow.pause_reading()
            self.loop.call_later(self._discard_pace.take(num_bytes), self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._ignores_input:
                self._feed_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._ignores_input:
                self._parse_failed()

    def _feed_without_upgrade(self, rest: bytes) -> None:
        """Parse the headers of an upgrade request again, as a plain request's: the parser stopped at them."""
        head = [b"%s %s HTTP/1.1" % (self.parser.get_method(), self.url)]
        head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"\r\n".join([*head, b"", rest]))

    def _parse_failed(self) -> None:
        if self.is_answering and not self.cycle.more_body:
            self._ignore_input()
        else:
            self._refuse(BadRequest("The request is not valid HTTP/1.1."))

    # the parser's callbacks

    def on_message_begin(self) -> None:
        if self.is_answering:
            self._ignore_input()
            return
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._exchange = Exchange(self.transport, self.flow, self._entry)
        self.scope["extensions"] = {TRANSPORT: {"exchange": self._exchange}}
        self._reads_headers = True

    def on_headers_complete(self) -> None:
        if self._ignores_input or (self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"):
            return
        if (error := self._bad_headers()) is not None:
            self._refuse(error)
            return
        self._stop_timer()
        self._reads_headers = False
        self._entry.begin_request()
        super().on_headers_complete()
        is_old = self.scope["http_version"] == "1.0"
        writer = _UnchunkedTransport if is_old else _AnswerTransport
        self.cycle.transport = writer(self.transport, self._close_lingering)  # type: ignore[assignment]
        self.cycle.waiting_for_100_continue &= not is_old  # which knows no interim answers
        if self._exchange is not None:
            self._exchange.has_headers(self.cycle)
        self.headers = []  # headers from here on are trailers, which are ignored

    def _bad_headers(self) -> ApiError | None:
        size = num_hosts = 0
        for name, value in self.headers:
            size += len(name) + len(value)
            num_hosts += name == b"host"
        if size > MAX_HEADER_BYTES:
            return HeadersTooLarge(_TOO_LARGE)
        if num_hosts == 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.0"):
            return None
        return BadRequest(f"A request must have one Host header (RFC 9112, 3.2), and this one has {num_hosts}.", "host")

    def on_body(self, body: bytes) -> None:
        if not self._ignores_input:
            self._head_bytes = 0
            if not self._is_refused_body:
                super().on_body(body)

    def on_message_complete(self) -> None:
        if self._ignores_input or self._reads_headers:
            return
        self._head_bytes = 0
        self._entry.complete_request()
        if self._exchange is not None:
            self._exchange.is_complete = True
        super().on_message_complete()
        if self.cycle.response_complete:
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # uvicorn's

    def on_response_complete(self) -> None:
        self._entry.complete_response()
        super().on_response_complete()

    # what they share

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._header_timeout, self._look_again)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_writing(self, before: float = inf) -> None:
        """Drop a client that takes none of the bytes that wait for it within `write_timeout`."""
        unread = self.transport.get_write_buffer_size()
        if unread < before:
            self._writing = self.loop.call_later(self._write_timeout, self._watch_writing, unread)
        else:
            self.transport.abort()

    def _stop_writing_timer(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _look_again(self) -> None:
        """Read once more: bytes may have come while the process was suspended, which runs its timers first."""
        self._timer = self.loop.call_later(LOOK_SECONDS, self._time_out)

    def timeout_keep_alive_handler(self) -> None:
        """As `_look_again`, between two requests."""
        self.timeout_keep_alive_task = self.loop.call_later(LOOK_SECONDS, super().timeout_keep_alive_handler)

    def _time_out(self) -> None:
        if self._reads_headers:
            self._send_error(
                RequestTimedOut(f"The request's headers did not arrive within {self._header_timeout:g} s.")
            )
        self.transport.close()

    def _ignore_input(self) -> None:
        """Ignore further input, answer the current request and close."""
        self._ignores_input = True
        self.cycle.keep_alive = False

    def _probe(self) -> None:
        """Write bytes without effect: a client that no longer reads answers with a reset."""
        if not self.is_answering:
            return
        if not self.cycle.response_started:
            self.transport.write(_CONTINUE)
        elif self._exchange is not None and self._exchange.has_events:
            self.transport.write(_COMMENT)
        self._timer = self.loop.call_later(PROBE_SECONDS, self._probe)

    def _evict(self) -> None:
        """Close at once, for another connection. A client that has begun a request is sent the error."""
        if self.transport.get_write_buffer_size() or self.scheme == "https":
            self.transport.abort()
            return
        if self._head_bytes or self.is_answering:
            error = Overloaded("The server has its limit of connections. Try again shortly.", retry_after=1)
            self._send_error(error, logging.DEBUG)  # counted by a metric: a flood must not fill the log
        self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Send an error outside of ASGI and close: there is no request, or not all of one."""
        self._send_error(error)
        self._close_lingering()

    def _send_error(self, error: ApiError, level: int = logging.INFO) -> None:
        """Send an error, ignore all further input, and end the current request if there is one."""
        self._ignores_input = True
        self._stop_timer()
        if self._lingers or self.transport.is_closing():
            return
        fields = {"status": error.status, "code": error.code or error.type}
        log.log(level, "a connection was ended", extra={"fields": fields})
        if not self.is_answering or not self.cycle.response_started:
            self.transport.write(as_http(error))
        if self.is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self._exchange is not None:
                self._exchange.end()

    def _close_lingering(self) -> None:
        """Close once the client has sent all it is about to, or `header_timeout` is over (a lingering close)."""
        if self._lingers or self.transport.is_closing():
            return
        has_all = self.cycle is not None and not self.cycle.more_body and not self._ignores_input
        if has_all or self._watched is not None:
            self.transport.close()
            return
        self._lingers = self._ignores_input = True
        self._reads_headers = False
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._stop_timer()
        self._start_timer()


class _AnswerTransport:
    """The transport that uvicorn writes an answer to; closing it lingers if input is still due."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], object]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class _UnchunkedTransport(_AnswerTransport):
    """The transport of an answer to HTTP/1.0, which knows no chunks (RFC 9112, 6.1): one without a length ends with the
    connection.
    """

    __slots__ = ("_is_begun", "_is_chunked", "_write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], object]) -> None:
        super().__init__(transport, close)
        self._write = transport.write
        self.write = self._write_unchunked  # type: ignore[assignment]
        self._is_begun = self._is_chunked = False

    def _write_unchunked(self, data: bytes) -> None:
        """Write the head, or the content of one chunk: uvicorn writes each in one piece."""
        if not self._is_begun:
            self._is_begun, self._is_chunked = True, _CHUNKED in data
            data = data.replace(_CHUNKED, b"\r\n", 1)
        elif self._is_chunked and data:
            size, _, rest = data.partition(b"\r\n")
            data = rest[: int(size, 16)]
        self._write(data)


def as_http(error: ApiError) -> bytes:
    """Returns the error as a whole HTTP/1.1 response that ends the connection."""
    body = error.to_body()
    head = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
    head += [name + b": " + value for name, value in encode_headers(error.headers() | {"connection": "close"})]
    head += [b"x-request-id: " + request_id(), b"content-length: %d" % len(body), b"", body]
    return b"\r\n".join(head)
