"""The proxy between a client and a server that notes the order in which bytes reach it."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Queue
from threading import Thread

import pytest

from labs.faults.proxy import Proxy
from tests.gateway.server_process import PATIENCE


class Echo:
    """Sends back what it gets, and notes it; an empty part is the end of a connection."""

    def __init__(self, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self.got: Queue[bytes] = Queue()
        self._listener = listener
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            while True:
                try:
                    part = sock.recv(65_536)
                except OSError:
                    part = b""
                self.got.put(part)
                if not part:
                    return
                with suppress(OSError):
                    sock.sendall(part)


@pytest.fixture
def echo() -> Iterator[Echo]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Echo(listener)


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock:
        yield sock


def answer(sock: socket.socket, sent: bytes, size: int = 0) -> bytes:
    sock.sendall(sent)
    got = b""
    while len(got) < (size or len(sent)) and (part := sock.recv(65_536)):
        got += part
    return got


def test_every_byte_and_the_end_pass_both_ways(echo: Echo) -> None:
    whole = bytes(range(256)) * 2000
    with Proxy(echo.port) as proxy, connected(proxy.port) as sock:
        Thread(target=sock.sendall, args=(whole,), daemon=True).start()
        assert answer(sock, b"", len(whole)) == whole
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""


def test_latency_is_added_each_way_and_a_rate_is_held(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, sleep = list[float](), asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    with Proxy(echo.port) as proxy, connected(proxy.port) as sock:
        proxy.latency = 36_000.0
        assert answer(sock, b"a") == b"a"
        assert pauses == [pytest.approx(36_000.0, rel=0.1)] * 2
        proxy.latency, proxy.rate = 0.0, 1.0
        assert answer(sock, bytes(20_000)) == bytes(20_000)
        assert sum(pauses[2:]) >= 2 * (20_000 - 4096) - 1  # s, but for the last part each way; delays are just below 0


def test_what_is_held_passes_neither_bytes_nor_ends_until_it_is_cleared(echo: Echo) -> None:
    with Proxy(echo.port) as proxy, connected(echo.port) as beside:
        with connected(proxy.port) as sock:
            assert answer(sock, b"before") == b"before"
            proxy.hold()
            sock.sendall(b"held")
        assert answer(beside, b"beside") == b"beside"
        assert [echo.got.get(timeout=PATIENCE) for _ in range(2)] == [b"before", b"beside"]
        proxy.clear()
        assert [echo.got.get(timeout=PATIENCE) for _ in range(2)] == [b"held", b""]


def test_a_cut_resets_both_sides_and_the_next_connection_passes(echo: Echo) -> None:
    with Proxy(echo.port) as proxy:
        with connected(proxy.port) as sock:
            assert answer(sock, b"a") == b"a"
            proxy.cut()
            with pytest.raises(ConnectionResetError):
                sock.recv(1)
        assert [echo.got.get(timeout=PATIENCE) for _ in range(2)] == [b"a", b""]
        with connected(proxy.port) as sock:
            assert answer(sock, b"b") == b"b"


def test_refused_connections_are_taken_again_at_the_same_port(echo: Echo) -> None:
    with Proxy(echo.port) as proxy:
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError), connected(proxy.port):
            pass
        proxy.clear()
        with connected(proxy.port) as sock:
            assert answer(sock, b"a") == b"a"
