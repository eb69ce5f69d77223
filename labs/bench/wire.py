"""HTTP/1.1 over plain sockets that never block, with or without TLS: one request at a time on a connection.

An asyncio client spends as much on a chunk as a server does; this spends some 10 us, so that one core holds thousands
of streams.
"""

import errno
import select
import socket
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import orjson

from gateway.table import printable
from labs.simulation.errors import OptionError

CONNECT_SECONDS = 10.0
RECEIVE_BYTES = 64 * 1024
SLOW_RECEIVE_BYTES = 512
SLOW_BUFFER_BYTES = 4096  # of the kernel, so that a slow reader's server feels it
MAX_CODE_CHARS = 80  # of what a server calls an error
DONE = b"[DONE]"
_WANTS = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Address(NamedTuple):
    """Where a server is, resolved once: a lookup would block every stream."""

    host: str
    port: int
    prefix: str  # of paths
    family: int
    peer: Any
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str) -> "Address":
        """Parse a base URL, with `/v1` or without, and connect once. Raises `OptionError`."""
        try:
            parts = urlsplit(url)
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
            if not parts.hostname or parts.username is not None:  # a report shows the address
                raise ValueError
        except (KeyError, ValueError):
            raise OptionError("URL", url, "write http://HOST:PORT or https://HOST") from None
        try:
            with socket.create_connection((parts.hostname, port), CONNECT_SECONDS) as sock:
                family, peer = sock.family, sock.getpeername()
        except OSError as error:
            raise OptionError("URL", url, f"nothing answers there ({error.strerror or error})") from None
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        return cls(parts.hostname, port, prefix, family, peer, tls)

    def post(self, path: str, body: Mapping[str, object], headers: Mapping[str, str]) -> bytes:
        """Return a request as bytes."""
        content = orjson.dumps(body)
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"POST {self.prefix}{path} HTTP/1.1", f"host: {host}:{self.port}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode() + content


class Answer:
    """What the response to one attempt says, read as it comes. `now` is set before each piece."""

    __slots__ = (
        "body", "error", "finish", "headers", "is_complete", "is_stream", "now", "rest", "said_done", "status", "text",
        "token_times", "usage",
    )  # fmt: skip

    def __init__(self) -> None:
        self.now = 0.0
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_stream = False
        self.is_complete = False
        self.said_done = False  # a stream that is cut short does not
        self.token_times: list[float] = []  # of chunks with a part of an answer
        self.text: list[str] = []
        self.finish = ""
        self.usage: dict[str, Any] | None = None
        self.error = ""  # code of an error event, or of an error's body
        self.body = b""
        self.rest = b""  # of an event's line

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.is_stream = self.headers.get("content-type", "").startswith("text/event-stream")

    def on_body(self, piece: bytes) -> None:
        if not self.is_stream:
            self.body += piece
            return
        *lines, self.rest = (self.rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        self.is_complete = True
        if self.body:
            self._whole()

    @property
    def may_go_on(self) -> bool:
        """True if the connection may be used again."""
        return self.is_complete and self.headers.get("connection", "").lower() != "close"

    def _event(self, data: bytes) -> None:
        if data == DONE:
            self.said_done = True
            return
        event = _object(data)
        if event.get("error"):
            self.error = error_code(event)
        if isinstance(usage := event.get("usage"), dict):
            self.usage = usage
        has_part = False
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice
            if text := delta.get("content") or choice.get("text"):
                self.text.append(str(text))
                has_part = True
            elif delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"):
                has_part = True
            self.finish = choice.get("finish_reason") or self.finish
        if has_part:
            self.token_times.append(self.now)

    def _whole(self) -> None:
        """Read an answer in one piece."""
        reply = _object(self.body)
        if isinstance(usage := reply.get("usage"), dict):
            self.usage = usage
        self.error = error_code(reply) if reply.get("error") else ""
        for choice in reply.get("choices") or ():
            self.text.append(str((choice.get("message") or {}).get("content") or choice.get("text") or ""))
            self.finish = choice.get("finish_reason") or ""
        if not self.error:
            self.token_times.append(self.now)


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {"error": "no JSON"}
    return value if isinstance(value, dict) else {"error": "no JSON object"}


def error_code(reply: Mapping[str, Any]) -> str:
    """Return the code of an error, or else its type."""
    error = reply["error"]
    said = error.get("code") or error.get("type") or "error" if isinstance(error, dict) else error
    return printable(str(said))[:MAX_CODE_CHARS]


class Connection:
    """One connection, from its opening on. Errors of the network are `OSError`s."""

    __slots__ = ("_address", "_handshaking", "_parser", "_unsent", "answer", "is_open", "is_slow", "sock")

    def __init__(self, address: Address, is_slow: bool = False) -> None:
        self._address = address
        self.is_slow = is_slow
        self.is_open = False
        self.answer: Answer | None = None
        self._handshaking = False
        self._parser: Any = None
        self._unsent = memoryview(b"")
        self.sock: socket.socket = socket.socket(address.family, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_slow:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
        refused = self.sock.connect_ex(address.peer)
        if refused not in (0, errno.EINPROGRESS):
            raise OSError(refused, "connect")

    @property
    def waits_for(self) -> int:
        """The events to poll for."""
        is_writing = not self.is_open or self._unsent
        return select.EPOLLIN | select.EPOLLOUT if is_writing else select.EPOLLIN

    def send(self, request: bytes) -> None:
        """Begin a request; an opened connection sends at once what it can."""
        self.answer = Answer()
        self._parser = httptools.HttpResponseParser(self.answer)
        self._unsent = memoryview(request)
        if self.is_open:
            self._flush()

    def handle(self, events: int, now: float) -> bool:
        """Go on after a poll; returns True once the answer is complete. Raises `OSError`, `BadAnswer`."""
        if not self.is_open and not self._opened(events):
            return False
        if self._unsent:
            self._flush()
        return bool(events & ~select.EPOLLOUT) and self._receive(now)

    def close(self) -> None:
        self.sock.close()

    def _opened(self, events: int) -> bool:
        if not self._handshaking:
            failed = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, "connect")
            if not events & select.EPOLLOUT:
                return False
            if self._address.tls is not None:
                self.sock = self._address.tls.wrap_socket(
                    self.sock, server_hostname=self._address.host, do_handshake_on_connect=False
                )
                self._handshaking = True
        if self._handshaking:
            assert isinstance(self.sock, ssl.SSLSocket)
            try:
                self.sock.do_handshake()
            except _WANTS:
                return False
            self._handshaking = False
        self.is_open = True
        return True

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except _WANTS:
            pass

    def _receive(self, now: float) -> bool:
        answer = self.answer
        assert answer is not None
        answer.now = now
        size = SLOW_RECEIVE_BYTES if self.is_slow else RECEIVE_BYTES
        while True:  # TLS holds what poll does not see
            try:
                data = self.sock.recv(size)
            except _WANTS:
                return False
            if not data:
                return self._ended(answer)
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError as error:
                raise BadAnswer(f"no HTTP: {error}") from None
            answer.status = self._parser.get_status_code()
            if answer.is_complete or self._address.tls is None:
                return answer.is_complete

    def _ended(self, answer: Answer) -> bool:
        """Take the end of the connection for the end of an answer without a length, as HTTP does."""
        self.is_open = False
        has_end = "content-length" in answer.headers or "transfer-encoding" in answer.headers
        if not answer.headers or has_end:
            raise BadAnswer("the server closed the connection")
        answer.on_message_complete()
        return True


class BadAnswer(RuntimeError):
    """What came is no complete HTTP response."""
