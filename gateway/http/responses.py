"""Responses over ASGI: one whole body, or a stream that can still report an error after its first byte."""

import asyncio
import re
from collections.abc import Callable, Mapping

from starlette.types import Scope, Send

from gateway import sse
from gateway.anthropic.errors import error_event
from gateway.anthropic.errors import error_reply as anthropic_reply
from gateway.errors import ApiError
from gateway.http.request_scope import exchange_of
from gateway.ids import new_id
from gateway.key_mask import masked

JSON = {"content-type": "application/json"}
ANTHROPIC_PATHS = "/v1/messages"  # and below: Anthropic's form of errors
_SAFE_ID = re.compile(rb"[\w.:-]{1,128}", re.ASCII)

Headers = list[tuple[bytes, bytes]]


def encode_headers(headers: Mapping[str, str]) -> Headers:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


JSON_HEADERS = encode_headers(JSON)
_SSE = encode_headers(sse.HEADERS)


def request_id(given: bytes | None = None) -> bytes:
    """The `x-request-id` of a response: the client's own if it is harmless, else a new one."""
    if given and _SAFE_ID.fullmatch(given) and masked(given.decode()) == given.decode():
        return given
    return new_id("req_").encode()


def openai_reply(error: ApiError) -> tuple[int, bytes]:
    """Returns the status and the body of an error, as OpenAI's clients read it."""
    return error.status, error.to_body()


def error_forms(path: str) -> tuple[Callable[[ApiError], tuple[int, bytes]], Callable[[ApiError], bytes]]:
    """Returns how the clients of a path read errors: as a status with a body, and as the last event of a stream."""
    if path.startswith(ANTHROPIC_PATHS):
        return anthropic_reply, error_event
    return openai_reply, ApiError.to_sse


def sends_events(headers: Headers) -> bool:
    """True for the headers of a stream of events."""
    return any(name == b"content-type" and value.startswith(sse.CONTENT_TYPE) for name, value in headers)


class ResponseWriter:
    """Writes the response to one request."""

    __slots__ = (
        "_clock",
        "_error_reply",
        "_has_events",
        "_is_anthropic",
        "_is_streaming",
        "_starting",
        "exchange",
        "extra_headers",
        "failure",
        "request_headers",
        "request_id",
        "send",
        "started",
        "status",
    )

    def __init__(self, scope: Scope, send: Send, clock: Callable[[], float]) -> None:
        self.send = send
        self.request_headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of one repeated, the first
        self.request_id = request_id(self.request_headers.get(b"x-request-id"))
        self.started: float | None = None  # when its first byte went out, in seconds of `clock`
        self.status = 0  # of HTTP, once it has started
        self._clock = clock
        self.extra_headers: Headers = []  # replaced, never changed
        self.exchange = exchange_of(scope)
        self._starting: asyncio.Lock | None = None
        path: str = scope.get("path", "")
        self._is_anthropic = path.startswith(ANTHROPIC_PATHS)
        self._error_reply, self.failure = error_forms(path)  # `failure` ends a stream
        self._has_events = False  # it is a stream of events
        self._is_streaming = False  # the headers of a stream have been sent

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Add headers to the response, whether it will be an answer or an error."""
        self.extra_headers = [*self.extra_headers, *encode_headers(headers)]

    @property
    def credentials(self) -> bytes | None:
        """The request's `authorization`, or the key that Anthropic's clients send in its place, as one; None without
        either.
        """
        given, key = self.request_headers.get(b"authorization"), self.request_headers.get(b"x-api-key")
        return given if given is not None or key is None else b"Bearer " + key

    async def reply(self, body: bytes, status: int = 200, headers: Headers = JSON_HEADERS) -> None:
        """Send a whole response with this body."""
        length = (b"content-length", str(len(body)).encode())
        left = await self._start(status, [*headers, length], len(body), body)
        await self.send({"type": "http.response.body", "body": left})  # also without a rest: it ends the response

    async def begin(self, status: int, headers: Headers, part: bytes) -> None:
        """Send the head of a response of any type, and the first part of its body, perhaps none; further parts follow
        by `stream`, and a part of an event stream is one of whole events.
        """
        self._is_streaming = True
        await self.stream(await self._start(status, headers, None, part))

    async def stream(self, events: bytes) -> None:
        """Send a part of an event stream; the first part is preceded by the headers."""
        if not self._is_streaming:
            events = await self._start_stream(events)
        if events and (self.exchange is None or not self.exchange.write_chunk(events)):
            await self.send({"type": "http.response.body", "body": events, "more_body": True})

    async def end_stream(self, events: bytes) -> None:
        """Send the last part of an event stream, which may be all of it."""
        if not self._is_streaming:
            events = await self._start_stream(events)
        await self.send({"type": "http.response.body", "body": events, "more_body": False})

    def divert(self, send: Send) -> None:
        """Send the rest of the answer, as events, to `send`: the client's may have ended."""
        self.send, self.exchange, self._is_streaming = send, None, True

    async def fail(self, error: ApiError) -> None:
        """Send an error: as a whole response, or as the last event of a stream that has begun, without [DONE].

        Any other response that has begun is cut, so that its client does not take the beginning for the whole.
        """
        if self.started is None:
            status, body = self._error_reply(error)
            await self.reply(body, status, encode_headers(error.headers()))
        elif self._has_events:
            await self.end_stream(self.failure(error))
        elif self.exchange is not None:  # a foreign server cuts a response that is left without its end
            self.exchange.abort()

    async def _start_stream(self, events: bytes) -> bytes:
        """Send the headers of a stream once, and return the unsent rest of `events`. Other writers wait until the
        headers are sent.
        """
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self.started is None:
                events = await self._start(200, _SSE, None, events)
                self._is_streaming = True
        return events

    async def _start(self, status: int, headers: Headers, length: int | None, part: bytes) -> bytes:
        """Send the head of a response, if possible in one write with the first part of its body, and return the unsent
        part.

        A write costs more than most steps of an answer.
        """
        self._has_events = length is None and sends_events(headers)
        if self.exchange is not None:
            self.exchange.has_events = self._has_events
        head = [*headers, *self.extra_headers, (b"x-request-id", self.request_id)]
        if self._is_anthropic:
            head.append((b"request-id", self.request_id))
        if status == 200 and self.exchange is not None and self.exchange.begin(head, length, part):
            part = b""
        else:
            await self.send({"type": "http.response.start", "status": status, "headers": head})
        self.started, self.status = self._clock(), status  # not before: a write that waits may be cancelled
        return part
