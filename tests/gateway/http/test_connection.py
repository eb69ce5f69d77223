import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from gateway.admin.endpoint import Blob
from gateway.admin.server import AdminServer, serving
from gateway.errors import ShuttingDown
from gateway.http.connection import (
    DEAD_PEER_SECONDS,
    DISCARDED_PER_SECOND,
    FREE_DISCARD_BYTES,
    MAX_HEADER_BYTES,
    DiscardPace,
    HangupWatcher,
    HttpConnection,
    bound_socket,
)
from gateway.http.connection_table import ConnectionState, ConnectionTable
from gateway.http.request_scope import TRANSPORT, ActiveRequests, RequestScope, show_key
from gateway.http.responses import ResponseWriter
from gateway.settings.settings import Settings

POST = b"POST /v1/x?q=1 HTTP/1.1\r\nhost: a\r\nx-own: yes\r\ncontent-length: 5\r\n\r\nhello"
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
UPGRADE = POST.replace(b"x-own", b"Connection: Upgrade, HTTP2-Settings\r\nUPGRADE: h2c\r\nx-own")
CHUNKED = POST.replace(b"content-length: 5", b"transfer-encoding: chunked").replace(
    b"hello", b"3\r\nhel\r\n2\r\nlo\r\n0\r\n"
)


class Transport(asyncio.Transport):
    """Remembers what was written. `ended`: nothing more will be, and what comes is still read."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.ended = False
        self.closed = False
        self.reads = True
        self.unread = [0]  # bytes that the client has not taken, at each look

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        assert not self.ended
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def get_write_buffer_size(self) -> int:
        return self.unread.pop() if len(self.unread) > 1 else self.unread[0]

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Application:
    """Reads `reads` bytes of each request; answers when `answer` is set, and notices a client that leaves."""

    def __init__(self, reads: int = 2**20) -> None:
        self.reads = reads
        self.requests: list[tuple[str, str, dict[bytes, bytes], bytes]] = []
        self.exchanges: list[object] = []
        self.left = 0
        self.answer = asyncio.Event()
        self.answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more and len(body) < self.reads:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body += message["body"]
            more = message["more_body"]
        self.requests.append((scope["method"], scope["path"], dict(scope["headers"]), body))
        self.exchanges.append(scope["extensions"][TRANSPORT]["exchange"])
        if key := dict(scope["headers"]).get(b"authorization"):
            show_key(scope, key.decode())
        watcher = asyncio.create_task(self._watch(receive))
        await self.answer.wait()
        watcher.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left += 1
        self.answer.set()


class Wire:
    """A connection whose other end the test holds."""

    def __init__(
        self,
        table: ConnectionTable | None = None,
        header_timeout: float = 10.0,
        reads: int = 2**20,
        write_timeout: float = 30.0,
    ) -> None:
        self.application = Application(reads)
        self.transport = Transport()
        config = Config(app=self.application, ws="none", lifespan="off", log_config=None)
        entry = (table or ConnectionTable(10)).add("192.0.2.1", self.transport.close)
        pace = DiscardPace(asyncio.get_running_loop().time)
        self.protocol = HttpConnection(
            config, ServerState(), {}, entry, HangupWatcher(), pace, header_timeout, write_timeout
        )
        self.protocol.connection_made(self.transport)

    async def send(self, *parts: bytes) -> None:
        for data in parts:
            if not self.transport.closed:
                self.protocol.data_received(data)
            await settled()

    def leave(self) -> None:
        self.protocol.connection_lost(None)

    @property
    def error_code(self) -> str:
        code: str = json.loads(self.transport.written.rpartition(b"\r\n\r\n")[2])["error"]["code"]
        return code


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("raw", [POST, UPGRADE, CHUNKED + b"\r\n", CHUNKED + b"x-own: no\r\n\r\n"])
async def test_a_request_is_the_same_however_it_is_cut(raw: bytes) -> None:
    cuts: list[list[bytes]] = [[raw], [bytes([byte]) for byte in raw]]
    cuts += [[raw[:at], raw[at:]] for at in range(1, len(raw))]
    for parts in cuts:
        wire = Wire()
        await wire.send(*parts, POST)
        first, second = wire.application.requests
        assert (first[0], first[1], first[3]) == second[:2] + second[3:] == ("POST", "/v1/x", b"hello")
        assert first[2][b"x-own"] == b"yes"
        assert first[2][b"host"] == b"a"
        assert len({id(exchange) for exchange in wire.application.exchanges}) == 2
        assert wire.transport.written.count(b"HTTP/1.1 200 OK") == 2
        assert not wire.transport.closed
        wire.leave()


class Streaming:
    """Streams what it is given, by ASGI alone or past it where it may."""

    def __init__(self, by_asgi: bool = False) -> None:
        self.events: asyncio.Queue[bytes] = asyncio.Queue()
        self._by_asgi = by_asgi

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._by_asgi:
            del scope["extensions"]
        response = ResponseWriter({**scope, "headers": [(b"x-request-id", b"r1")]}, send, lambda: 0.0)
        while event := await self.events.get():
            await response.stream(event)
        await response.end_stream(b"data: [DONE]\n\n")


def streamed(by_asgi: bool = False) -> tuple[Wire, Streaming]:
    wire, application = Wire(), Streaming(by_asgi)
    wire.protocol.app = application
    return wire, application


async def give(application: Streaming, *events: bytes) -> None:
    for event in events:
        application.events.put_nowait(event)
    await settled()


async def test_an_event_that_is_written_past_asgi_has_the_bytes_that_it_has_by_asgi() -> None:
    written = []
    for by_asgi in (False, True):
        wire, application = streamed(by_asgi)
        for _ in range(2):
            await wire.send(POST)
            await give(application, b"data: 1\n\n", b"data: " + b"x" * 5000 + b"\n\n", b"")
        written.append(wire.transport.written)
    assert written[0] == written[1]
    assert written[0].count(b"9\r\ndata: 1\n\n\r\n") == 2


async def test_http_1_0_is_sent_no_chunks() -> None:
    wire, application = streamed()
    await wire.send(POST.replace(b"HTTP/1.1", b"HTTP/1.0\r\nexpect: 100-continue"))
    await give(application, b"data: 1\n\n", b"data: 2\n\n", b"")
    head, _, body = wire.transport.written.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert wire.transport.closed


async def test_only_between_events_is_a_client_probed_that_has_closed_its_half() -> None:
    for content_type, probes in ((b"text/event-stream", b"3\r\n:\n\n\r\n"), (b"application/octet-stream", b"")):
        wire, is_over = Wire(), asyncio.Event()

        async def answer(
            scope: Scope, receive: Receive, send: Send, kind: bytes = content_type, is_over: asyncio.Event = is_over
        ) -> None:
            response = ResponseWriter(scope, send, lambda: 0.0)
            await response.begin(200, [(b"content-type", kind)], b"1\n\n")
            await is_over.wait()
            await response.fail(ShuttingDown())

        wire.protocol.app = answer
        await wire.send(POST)
        wire.protocol._probe()
        assert wire.transport.written.endswith(b"3\r\n1\n\n\r\n" + probes)
        is_over.set()
        await settled()
        assert wire.transport.written.endswith(b"0\r\n\r\n") is bool(probes), "a file that is not whole is cut"
        assert wire.transport.closed is not bool(probes)


@pytest.mark.parametrize(
    "request_line",
    [
        b"POST /v1/x HTTP/1.1",
        b"POST /v1/x HTTP/1.1\r\nconnection: close",
        b"POST /v1/x HTTP/1.0",
        b"HEAD /v1/x HTTP/1.1",
    ],
)
@pytest.mark.parametrize("value", ["plain", "tab\tand \xe9", "a\r\nforged: yes", "bell\x07", "nul\x00"])
async def test_a_head_that_is_written_past_asgi_has_the_bytes_that_it_has_by_asgi(
    request_line: bytes, value: str
) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if len(written) == 1:  # the second time by ASGI alone
            del scope["extensions"]
        response = ResponseWriter({**scope, "headers": [(b"x-request-id", b"r1")]}, send, lambda: 0.0)
        response.add_headers({"x-some": value})
        await response.reply(b"{}")

    written: list[tuple[bytes, bool]] = []
    for _ in range(2):
        wire = Wire()
        wire.protocol.app = answer
        for _ in range(2):
            await wire.send(request_line + b"\r\nhost: a\r\ncontent-length: 0\r\n\r\n")
        written.append((wire.transport.written, wire.transport.closed))
    assert written[0] == written[1]
    is_fit = value in ("plain", "tab\tand \xe9")
    assert written[0][0].startswith(b"HTTP/1.1 200 OK") if is_fit else written[0] == (b"", True)


async def test_a_client_that_reads_too_slowly_holds_events_back_and_gets_all_of_them_in_order() -> None:
    wire, application = streamed()
    await wire.send(POST)
    await give(application, b"1")
    wire.protocol.pause_writing()
    before = wire.transport.written
    await give(application, b"2", b"3")
    assert wire.transport.written == before
    wire.protocol.resume_writing()
    await give(application, b"4")
    assert wire.transport.written == before + b"1\r\n2\r\n1\r\n3\r\n1\r\n4\r\n"


async def test_a_client_that_has_taken_nothing_for_a_while_is_dropped_and_a_slow_one_is_not() -> None:
    wire = Wire(write_timeout=0.0)
    await wire.send(POST)
    wire.transport.unread = [1, 4, 4, 7, 9, 9]  # at each look, the last one first
    wire.protocol.pause_writing()
    wire.protocol.resume_writing()
    wire.protocol.pause_writing()
    await until(lambda: wire.transport.closed)
    assert wire.transport.unread == [1], "it was cut when nothing more had been taken"


async def test_an_answer_that_is_dropped_with_its_client_is_no_error_of_the_application(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The application may end before its connection is reported lost."""
    wire = Wire()

    async def drop(scope: Scope, receive: Receive, send: Send) -> None:
        async with RequestScope(scope, receive, send) as answer:
            await answer.send({"type": "http.response.start", "status": 200, "headers": []})
            answer.abort()
            await asyncio.Event().wait()

    wire.protocol.app = drop
    await wire.send(POST)
    assert wire.transport.closed and not caplog.records


async def test_an_answer_that_nobody_reads_holds_no_port_for_ever() -> None:
    """Nor does a request behind it; the kernel is not asked to notice it."""
    server = AdminServer(Settings(port=0, write_timeout=0.1), Blob(bytes(2**23), "text/plain"))
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listening.setblocking(False)
        async with serving(server, listening):
            client.connect(listening.getsockname())
            client.send(GET)
            await until(lambda: server.server_state.total_requests == 1)
            client.send(GET)
            await until(lambda: not server.server_state.connections and not server.server_state.tasks)


async def test_to_a_client_that_has_left_nothing_is_written() -> None:
    wire, application = streamed()
    await wire.send(POST)
    await give(application, b"1")
    wire.leave()
    before = wire.transport.written
    await give(application, b"2", b"")
    assert wire.transport.written == before


@pytest.mark.parametrize("behind", [POST, b"GET /late HTTP/1.1\r\n", b"\x00\x01garbage", POST * 1000])
@pytest.mark.parametrize("together", [False, True])
async def test_a_request_behind_an_unanswered_one_is_not_served_and_its_hangup_is_noticed(
    behind: bytes, together: bool
) -> None:
    wire = Wire()
    wire.application.answer.clear()
    await wire.send(*([POST + behind] if together else [POST, behind]))
    assert [request[3] for request in wire.application.requests] == [b"hello"]
    wire.leave()
    await settled()
    assert wire.application.left == 1


@pytest.mark.parametrize("then", [b"", b"connection: close\r\n"], ids=["kept", "closed"])
async def test_the_rest_of_an_answered_body_is_read_at_a_bounded_pace(then: bytes) -> None:
    wire = Wire(reads=1)
    await wire.send(b"POST / HTTP/1.1\r\nhost: a\r\n%bcontent-length: %d\r\n\r\nx" % (then, 10**12))
    assert b"200 OK" in wire.transport.written
    await wire.send(b"x" * FREE_DISCARD_BYTES)
    assert wire.transport.reads
    await wire.send(b"x" * 2**18)
    assert not wire.transport.reads
    await until(lambda: wire.transport.reads)


async def test_a_client_that_leaves_an_unread_body_ends_the_delay_of_its_refusal() -> None:
    wire, active, delayed = Wire(), ActiveRequests(write_timeout=3600), list[bool]()

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        await active.delay(3600, scope, receive, send)
        delayed.append(True)

    wire.protocol.app = refuse
    await wire.send(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\nx" % 10**12)
    for _ in range(2 * FREE_DISCARD_BYTES // 2**16):
        await wire.send(b"x" * 2**16)
        assert len(wire.protocol.cycle.body) <= 1
        await until(lambda: wire.transport.reads)  # at a bounded pace
    assert wire.protocol._discarded >= FREE_DISCARD_BYTES and not delayed
    wire.leave()
    await settled()
    assert delayed


async def test_small_requests_on_one_connection_are_never_held_up() -> None:
    wire = Wire()
    for _ in range(FREE_DISCARD_BYTES // len(POST) + 10):
        wire.protocol.data_received(POST)
        await asyncio.sleep(0)
    await settled()
    assert wire.transport.reads and wire.protocol._discarded == 0


def test_all_connections_share_the_pace_of_what_is_discarded() -> None:
    now = 0.0
    pace = DiscardPace(lambda: now)
    waits = [pace.take(2**20) for _ in range(64)]
    assert waits[0] == pytest.approx(2**20 / DISCARDED_PER_SECOND)
    assert waits[-1] == pytest.approx(64 * 2**20 / DISCARDED_PER_SECOND)
    now = 100.0
    assert pace.take(2**20) == pytest.approx(waits[0])


@pytest.mark.parametrize("raw", [POST[:-2], CHUNKED[:-3]])
async def test_a_body_that_ends_early_is_refused_if_its_client_still_reads(raw: bytes) -> None:
    wire = Wire()
    await wire.send(raw)
    assert not wire.protocol.eof_received(), "the connection is closed once this is written"
    await settled()
    assert (
        wire.transport.written.startswith(b"HTTP/1.1 400") and b"ended before its announced" in wire.transport.written
    )
    assert wire.application.left == 1 and not wire.application.requests


async def test_headers_up_to_the_limit_are_read_and_no_more() -> None:
    for size, status in ((MAX_HEADER_BYTES - 100, b"200"), (MAX_HEADER_BYTES + 1, b"431")):
        for step in (1000, 10**6):
            raw = POST.replace(b"yes", b"y" * size)
            wire = Wire()
            await wire.send(*(raw[at : at + step] for at in range(0, len(raw), step)))
            assert wire.transport.written.startswith(b"HTTP/1.1 " + status)
            wire.leave()


@pytest.mark.parametrize("requests_before", [0, 1])
async def test_a_request_that_came_while_the_process_stood_still_is_not_late(
    requests_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is suspended and goes on runs its timers first, and then reads."""
    loop, timers = asyncio.get_running_loop(), list[Callable[[], object]]()
    call_later = loop.call_later

    def late(delay: float, callback: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        timers.append(callback)
        return call_later(delay, callback, *arguments)

    monkeypatch.setattr(loop, "call_later", late)
    wire = Wire()
    await wire.send(*[POST] * requests_before)
    timers[-1]()
    await wire.send(POST)
    assert len(wire.application.requests) == requests_before + 1
    assert not wire.transport.closed
    wire.leave()


async def test_a_request_that_came_in_time_is_not_late() -> None:
    wire = Wire(header_timeout=0.001)
    wire.application.answer.clear()
    await wire.send(POST)
    await asyncio.sleep(0.01)
    assert not wire.transport.closed
    wire.leave()
    await settled()


@pytest.mark.parametrize("rest", [b"", b"x" * 1000])
async def test_bytes_after_the_last_answer_are_read_and_discarded(rest: bytes) -> None:
    """A socket that is closed with something unread has its answer taken back by the kernel."""
    wire = Wire(header_timeout=0.5, reads=1)
    await wire.send(POST.replace(b"x-own: yes", b"connection: close").replace(b": 5", b": 5000"), rest)
    assert wire.transport.written.endswith(b"ok")
    assert (wire.transport.ended, wire.transport.closed) == (True, False)
    await wire.send(b"y" * 3000, POST)
    assert len(wire.application.requests) == 1
    await until(lambda: wire.transport.closed)


@pytest.mark.parametrize("hosts", [b"", b"host: a\r\nhost: a\r\n", b"host: a\r\nx: y\r\nHOST: b\r\n"])
async def test_a_request_has_one_host(hosts: bytes) -> None:
    wire = Wire()
    await wire.send(POST.replace(b"host: a\r\n", hosts), b"more")
    assert wire.transport.written.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b'"param":"host"' in wire.transport.written
    assert wire.application.requests == []


async def test_http_1_0_has_a_host_or_none() -> None:
    for host, status in ((b"", b"200"), (b"host: a\r\n", b"200"), (b"host: a\r\nhost: a\r\n", b"400")):
        wire = Wire()
        await wire.send(b"POST / HTTP/1.0\r\n" + host + b"content-length: 2\r\n\r\nhi")
        assert wire.transport.written.startswith(b"HTTP/1.1 " + status)


async def test_a_connection_stands_as_its_requests_do() -> None:
    table = ConnectionTable(10)
    wire = Wire(table, reads=1)
    keyed = POST.replace(b"x-own: yes", b"authorization: acme")

    async def stands(state: ConnectionState, *sent: bytes) -> None:
        await wire.send(*sent)
        assert [table.num(other) for other in ConnectionState] == [other is state for other in ConnectionState]

    await stands(ConnectionState.STRANGER)
    await stands(ConnectionState.STRANGER, POST)
    wire.application.answer.clear()
    await stands(ConnectionState.STRANGER, keyed[:-5])
    await stands(ConnectionState.UPLOADING, b"hel")
    await stands(ConnectionState.SERVING, b"lo")
    wire.application.answer.set()
    await until(lambda: wire.transport.written.count(b"200 OK") == 2)
    await stands(ConnectionState.IDLE)
    await stands(ConnectionState.IDLE, POST)
    wire.leave()
    assert not any(map(table.num, ConnectionState))


@pytest.mark.parametrize(
    ("sent", "said"),
    [(b"", b""), (POST, b"HTTP/1.1 200 OK"), (b"GET / HT", b"HTTP/1.1 503"), (POST[:-5], b"HTTP/1.1 503")],
)
async def test_an_evicted_client_is_told_why_if_it_has_begun_a_request(sent: bytes, said: bytes) -> None:
    table = ConnectionTable(1)
    wire = Wire(table)
    await wire.send(sent)
    another = Wire(table)
    assert wire.transport.closed
    assert wire.transport.written.startswith(said)
    assert wire.transport.written.count(b"HTTP/1.1") == bool(sent)
    await another.send(POST)
    assert another.transport.written.endswith(b"ok")


def test_accepted_connections_notice_a_dead_peer() -> None:
    with bound_socket("127.0.0.1", 0) as listener:
        listener.listen()
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < DEAD_PEER_SECONDS
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
