"""One connection, byte by byte: however its bytes are cut into pieces, the same request comes out."""

import asyncio
import json
import socket
from collections.abc import Callable

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from gateway.connection import DEAD_PEER_SECONDS, MAX_HEADER_BYTES, TRANSPORT, Connection, bound_socket

POST = b"POST /v1/x?q=1 HTTP/1.1\r\nhost: a\r\nx-own: yes\r\ncontent-length: 5\r\n\r\nhello"
UPGRADE = POST.replace(b"x-own", b"Connection: Upgrade, HTTP2-Settings\r\nUPGRADE: h2c\r\nx-own")
CHUNKED = POST.replace(b"content-length: 5", b"transfer-encoding: chunked").replace(
    b"hello", b"3\r\nhel\r\n2\r\nlo\r\n0\r\n"
)


class Transport(asyncio.Transport):
    """Remembers what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Application:
    """Reads each request whole; answers when `answer` is set, and notices a client that leaves."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[bytes, bytes], bytes]] = []
        self.transports: list[object] = []
        self.left = 0
        self.answer = asyncio.Event()
        self.answer.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body += message["body"]
            more = message["more_body"]
        self.requests.append((scope["method"], scope["path"], dict(scope["headers"]), body))
        self.transports.append(scope["extensions"][TRANSPORT]["transport"])
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

    def __init__(self, state: ServerState | None = None, **limits: float) -> None:
        self.application = Application()
        config = Config(app=self.application, ws="none", lifespan="off", log_config=None)
        kind: type[Connection] = type("LimitedConnection", (Connection,), limits)
        self.protocol = kind(config, state or ServerState(), {}, asyncio.get_running_loop())
        self.transport = Transport()
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
        assert wire.application.transports == [wire.transport] * 2
        assert wire.transport.written.count(b"HTTP/1.1 200 OK") == 2
        assert not wire.transport.closed
        wire.leave()


@pytest.mark.parametrize("behind", [POST, b"GET /late HTTP/1.1\r\n", b"\x00\x01garbage", POST * 1000])
@pytest.mark.parametrize("together", [False, True])
async def test_what_comes_behind_an_unanswered_request_is_not_served_and_its_leaving_is_noticed(
    behind: bytes, together: bool
) -> None:
    wire = Wire()
    wire.application.answer.clear()
    await wire.send(*([POST + behind] if together else [POST, behind]))
    assert [request[3] for request in wire.application.requests] == [b"hello"]
    wire.leave()
    await settled()
    assert wire.application.left == 1


@pytest.mark.parametrize("behind", [POST, b"GET /late HTTP/1.1\r\n", b"\x00\x01garbage"])
async def test_the_request_in_front_is_answered_before_the_connection_closes(behind: bytes) -> None:
    wire = Wire(header_timeout=0.001)
    wire.application.answer.clear()
    await wire.send(POST, behind)
    await asyncio.sleep(0.01)  # longer than headers may take: those behind are not waited for
    assert not wire.transport.closed
    wire.application.answer.set()
    await settled()
    assert wire.transport.written.endswith(b"ok")
    assert wire.transport.closed
    assert len(wire.application.requests) == 1


async def test_an_error_inside_a_body_is_told_and_ends_the_request() -> None:
    wire = Wire()
    await wire.send(CHUNKED[:-3], b"nonsense\r\n")
    assert wire.transport.written.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert wire.transport.closed
    wire.leave()
    await settled()
    assert wire.application.left == 1
    assert wire.application.requests == []


async def test_headers_up_to_the_limit_are_read_and_no_more() -> None:
    for size, status in ((MAX_HEADER_BYTES - 100, b"200"), (MAX_HEADER_BYTES + 1, b"431")):
        for step in (1000, 10**6):
            raw = POST.replace(b"yes", b"y" * size)
            wire = Wire()
            await wire.send(*(raw[at : at + step] for at in range(0, len(raw), step)))
            assert wire.transport.written.startswith(b"HTTP/1.1 " + status)
            wire.leave()


async def test_headers_that_do_not_come_are_late() -> None:
    wire = Wire(header_timeout=0.001)
    await until(lambda: wire.transport.closed)
    assert wire.error_code == "request_timeout"


async def test_a_request_that_came_in_time_is_not_late() -> None:
    wire = Wire(header_timeout=0.001)
    wire.application.answer.clear()
    await wire.send(POST)
    await asyncio.sleep(0.01)
    assert not wire.transport.closed
    wire.leave()
    await settled()


@pytest.mark.parametrize("tickle", [b"\r\n", b"G"])
async def test_a_few_bytes_do_not_keep_an_idle_connection(tickle: bytes) -> None:
    wire = Wire(header_timeout=0.02)
    await wire.send(POST, tickle)
    await until(lambda: wire.transport.closed)


async def test_a_connection_above_the_limit_is_refused() -> None:
    state = ServerState()
    wires = [Wire(state, max_connections=2) for _ in range(3)]
    assert [wire.transport.closed for wire in wires] == [False, False, True]
    assert wires[2].error_code == "server_is_overloaded"
    wires[2].leave()
    wires[0].leave()
    another = Wire(state, max_connections=2)
    await another.send(POST)
    assert another.transport.written.endswith(b"ok")
    for wire in (wires[1], another):
        wire.leave()


def test_accepted_connections_notice_a_dead_peer() -> None:
    with bound_socket("127.0.0.1", 0) as listener:
        listener.listen()
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == DEAD_PEER_SECONDS * 1000
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
