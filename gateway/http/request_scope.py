"""The scope in which one request is served: a disconnect, a stalled write or a shutdown cancels the code inside it,
and the exits of that code end its sequences (which frees their blocks) and settle its quota.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from weakref import ReferenceType, ref

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from admission.outcome import Outcome
from gateway.errors import ApiError, BadRequest, RequestTimedOut, RequestTooLarge, ShuttingDown
from gateway.http.connection_table import ConnectionEntry
from quotas.policy.units import show_size

_NONE: Mapping[str, Any] = {}
TRANSPORT = "sluice.transport"  # key of the ASGI extension with the `Exchange`


_OK = STATUS_LINE[200]
_CHUNK = b"%x\r\n%b\r\n"  # size in bytes, and content (RFC 9112, 7.1)
_CONTROLS = bytes(byte for byte in (*range(32), 127) if byte != ord("\t"))  # forbidden in header values


class Exchange:
    """One request and its answer on our own server's connection: events and shortcuts beyond ASGI."""

    __slots__ = (
        "_callback", "_cycle", "_flow", "_is_over", "_takes_chunks", "_transport",
        "entry", "has_events", "is_complete", "is_refused",
    )  # fmt: skip

    def __init__(self, transport: asyncio.WriteTransport, flow: FlowControl, entry: ConnectionEntry) -> None:
        self.is_complete = False  # the last byte of the request has come
        self.is_refused = False  # the rest of its body is discarded
        self.has_events = False  # the answer is a stream of events, between which anything may be written
        self._transport = transport
        self._flow = flow
        self.entry = entry  # of its connection
        self._callback: Callable[[], object] | None = None
        self._cycle: ReferenceType[RequestResponseCycle] | None = None  # uvicorn's, once the headers are there
        self._is_over = False
        self._takes_chunks = True  # HTTP/1.0 has none

    def has_headers(self, cycle: RequestResponseCycle) -> None:
        """Set uvicorn's state of the answer, which refers to this exchange; the reference back is weak."""
        self._cycle, self._takes_chunks = ref(cycle), cycle.scope["http_version"] == "1.1"

    @property
    def is_paused(self) -> bool:
        """True if the next write would block, because the client reads too slowly."""
        return self._flow.write_paused

    @property
    def is_writable(self) -> bool:
        """True if a chunk can be written at once: the client is connected, reads, and knows chunks."""
        return self._takes_chunks and not (self._is_over or self._flow.write_paused)

    def begin(self, headers: list[tuple[bytes, bytes]], length: int | None, part: bytes) -> bool:
        """Write the head of an answer with status 200 and the first part of its body, past ASGI and in one piece, and
        return whether that could be done. `length` is that of the body, which `headers` name; None: it comes in chunks.

        uvicorn looks at each header by itself, which takes as long as all else that is written. Here the values are
        looked at together, and the names are our own; what may be wrong, or has to wait, is left to uvicorn.
        """
        cycle = None if self._cycle is None else self._cycle()
        if cycle is None or cycle.response_started or cycle.scope["method"] != "POST" or not self.is_writable:
            return False
        head = [*cycle.default_headers, *headers]
        if not cycle.keep_alive:
            head.append((b"connection", b"close"))
        if length is None:
            head.append((b"transfer-encoding", b"chunked"))
        lines = b"\r\n".join(map(b": ".join, head))
        if len(lines.translate(None, _CONTROLS)) != len(lines) - 2 * (len(head) - 1):
            return False  # a control character in a value
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        cycle.chunked_encoding = length is None
        cycle.expected_content_length = 0 if length is None else length - len(part)
        first = _CHUNK % (len(part), part) if length is None and part else part  # an empty chunk would be the last
        self._transport.write(b"%b%b\r\n\r\n%b" % (_OK, lines, first))
        return True

    def write_chunk(self, data: bytes) -> bool:
        """Write a part of a chunked answer, past ASGI. Returns False, and writes nothing, if it would block or the
        client has gone.
        """
        if not data or not self.is_writable:
            return False
        self.write(data)
        return True

    def write(self, data: bytes) -> None:
        """Write a part of a chunked answer, right after `is_writable` was true."""
        self._transport.write(_CHUNK % (len(data), data))

    def abort(self) -> None:
        """Drop the connection with its unwritten bytes: what the client has of the answer is not all of it."""
        if self._cycle is not None and (cycle := self._cycle()) is not None:
            cycle.disconnected = True
        self._transport.abort()

    def watch(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the client has gone; soon, if it has gone already.

        The body has been read or is discarded, so the connection reads on: otherwise it could not notice its client
        leave.
        """
        self._callback = callback
        if self._is_over:
            asyncio.get_running_loop().call_soon(self.end)
        else:
            self._flow.resume_reading()

    def forget(self) -> None:
        """Remove the callback, if there is one."""
        self._callback = None

    def end(self) -> None:
        """Call back: the client has gone or counts as gone. A later watcher is called back soon."""
        self._is_over = True
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


def exchange_of(scope: Scope) -> Exchange | None:
    """The exchange of a request; None on a foreign server."""
    exchange: Exchange | None = scope.get("extensions", _NONE).get(TRANSPORT, _NONE).get("exchange")
    return exchange


def has_come_whole(exchange: Exchange | None) -> bool:
    """True if the last byte of the request is known to have arrived."""
    return exchange is not None and exchange.is_complete


def show_key(scope: Scope, tenant: str) -> None:
    """Note in the connection table that the request has a valid key of this tenant."""
    exchange = exchange_of(scope)
    if exchange is not None:
        exchange.entry.show_key(tenant)


class ClientGone(Exception):
    """The client disconnected before its request was complete, so there is no answer to send."""


async def read_body(scope: Scope, receive: Receive, limit: int, timeout: float) -> bytes:
    """Returns the whole body. Raises as `BodyParts`."""
    parts = BodyParts(scope, receive, limit, timeout)
    body = bytearray()
    while parts.more:
        body += await parts.next()
    return bytes(body)


class BodyParts:
    """Reads a body part by part: at most `limit` bytes in all, each part within `timeout` seconds.

    Raises `ApiError` and `ClientGone`. The size is checked while reading, so a chunked body cannot exceed it either.
    """

    def __init__(self, scope: Scope, receive: Receive, limit: int, timeout: float) -> None:
        self.size = 0  # bytes read so far
        self.max_size = _expected_size(scope, limit)  # bytes that may come
        self.more = True
        self._receive = receive
        self._limit = limit
        self._timeout = timeout
        self._exchange = exchange_of(scope)

    async def next(self) -> bytes:
        """Wait for the next part; `more` then says whether others follow."""
        is_here = self._exchange is not None and self._exchange.is_complete
        message = await (self._receive() if is_here else _next_part(self._receive, self._timeout))
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        self.size += len(part)
        if self.size > self._limit:
            raise _too_large(self._limit)
        self.more = message.get("more_body", False)
        return part


def _expected_size(scope: Scope, limit: int) -> int:
    """The announced size of the body, or `limit`. Raises `ApiError` for a body that would be refused after reading."""
    size = limit
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            size = int(value)
            if size > limit:
                raise _too_large(limit)
        elif name == b"content-encoding" and value.lower() != b"identity":
            coding = value[:64].decode("latin-1")
            raise BadRequest(
                f"Bodies are read as they come, not decoded: send it without content-encoding, got {coding!r}.",
                "content-encoding",
            )
    return size


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"The request body is larger than the {show_size(limit)} this server accepts.")


async def _next_part(receive: Receive, timeout: float) -> Message:
    try:
        async with asyncio.timeout(timeout):
            return await receive()
    except TimeoutError:
        raise RequestTimedOut(f"No part of the request body arrived for {timeout:g} s.") from None


class RequestScope:
    """Runs its block and is told of `http.disconnect`, from the last byte of the body to the last of the answer.

    `end` cancels the block from anywhere; the block's own cleanup runs, the cancellation stops at the end of the scope,
    and `outcome` then says why. `ActiveRequests.sweep` ends a request whose write makes no progress.
    """

    __slots__ = (
        "_active", "_cancelling", "_clock", "_exchange", "_receive", "_send", "_task", "_watcher",
        "_writes",
        "ended_early", "error", "outcome", "writing_since",
    )  # fmt: skip

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        clock: Callable[[], float] = time.monotonic,
        active: "set[RequestScope] | None" = None,
    ) -> None:
        """The scope is a member of `active` while its block runs; `clock` is in seconds."""
        self.outcome: Outcome | None = None
        self.ended_early: float | None = None  # moment, in seconds of `clock`
        self.error: ApiError | None = None  # sent to the client, if it is still connected
        self.writing_since: float | None = None  # last progress of the pending writes
        self._task: asyncio.Task[Any] | None = None  # while its block runs
        self._watcher: asyncio.Task[None] | None = None
        self._writes = 0
        self._clock = clock
        self._active = set[RequestScope]() if active is None else active
        self._receive = receive
        self._send = send
        self._exchange = exchange_of(scope)

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        if self._exchange is not None:
            self._exchange.watch(self._client_gone)
        else:  # a foreign server does not call back
            self._watcher = asyncio.create_task(self._watch())
        self._active.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        assert self._task is not None
        self._active.discard(self)
        task, self._task = self._task, None  # `end` is too late from here on
        if self._exchange is not None:
            self._exchange.forget()
        if self._watcher is not None:
            self._watcher.cancel()
        self._watcher = None  # its traceback refers to this scope
        if self.outcome is None:
            return False
        if kind is not asyncio.CancelledError:  # the block ended, or failed, before `end`'s cancellation reached it
            await _absorb_cancellation()
        if task.uncancel() > self._cancelling:  # another caller cancels the task as well
            if kind is None:
                raise asyncio.CancelledError
            return False
        return kind is None or kind is asyncio.CancelledError

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message to the client; while the write is pending, the sweep watches its progress."""
        is_free = self._exchange is not None and not self._exchange.is_paused
        return self._send(message) if is_free else self._send_patiently(message)

    async def _send_patiently(self, message: Message) -> None:
        loop = asyncio.get_running_loop()
        self.writing_since = self.writing_since or loop.time()
        self._writes += 1
        try:
            await self._send(message)
        finally:
            self._writes -= 1
            self.writing_since = loop.time() if self._writes else None

    def detach(self) -> None:
        """Go on without the client: from here on neither its disconnect nor a stalled write ends the block."""
        if self._exchange is not None:
            self._exchange.forget()
        if self._watcher is not None:
            self._watcher.cancel()
        self._watcher = self._exchange = None

    def end(self, outcome: Outcome) -> None:
        """Cancel the block, unless it has ended or is being cancelled already."""
        if self.outcome is None and self._task is not None:
            self.outcome, self.ended_early = outcome, self._clock()
            self._task.cancel()

    def fail(self, error: ApiError) -> None:
        """Cancel the block; the client is sent `error`."""
        if self.outcome is None and self._task is not None:
            self.error = error
            self.end(error.outcome)

    def ended(self) -> Outcome:
        """The outcome of a block that has been left: it completed, unless it was ended. Raises the error that did."""
        if self.error is not None:
            raise self.error
        return self.outcome or Outcome.COMPLETED

    def abort(self) -> None:
        """Cancel the block and drop the connection with its unwritten bytes."""
        self.end(Outcome.DISCONNECTED)
        if self._exchange is not None:
            self._exchange.abort()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._client_gone()

    def _client_gone(self) -> None:
        self.end(Outcome.DISCONNECTED)


async def _absorb_cancellation() -> None:
    """Let a cancellation that was requested after the block's last await arrive here."""
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


class ActiveRequests:
    """The scopes of requests being served: swept for clients that stopped reading, and ended together at a shutdown."""

    def __init__(self, write_timeout: float) -> None:
        self._write_timeout = write_timeout
        self._scopes: set[RequestScope] = set()
        self._closed = asyncio.Event()

    def close(self) -> None:
        """Refuse new requests from now on."""
        self._closed.set()

    @property
    def is_open(self) -> bool:
        return not self._closed.is_set()

    async def delay(self, seconds: float, scope: Scope, receive: Receive, send: Send) -> None:
        """Delay a refusal by `seconds`, or until the server drains, or until the client is gone.

        Its connection, which would lose a refusal, is then the first to make room for another.
        """
        exchange = exchange_of(scope)
        if exchange is not None:
            exchange.is_refused = True  # a connection with an unread body would not notice its client leave
            exchange.entry.yield_place()
        async with RequestScope(scope, receive, send):
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._closed.wait()

    def check_open(self) -> None:
        """Raise `ShuttingDown` once new requests are refused."""
        if self._closed.is_set():
            raise ShuttingDown

    def scope(
        self, scope: Scope, receive: Receive, send: Send, clock: Callable[[], float] = time.monotonic
    ) -> RequestScope:
        """Returns a scope that is swept, and ended with the others, while its block runs."""
        return RequestScope(scope, receive, send, clock, self._scopes)

    def fail_all(self, error: ApiError) -> None:
        """End every request that is being served, and send its client `error`."""
        for scope in list(self._scopes):
            scope.fail(error)

    async def sweep(self) -> None:
        """Drop connections whose writes make no progress, as long as the server runs."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._write_timeout / 4)
            stalled = loop.time() - self._write_timeout
            for scope in [s for s in self._scopes if s.writing_since is not None and s.writing_since < stalled]:
                scope.abort()
