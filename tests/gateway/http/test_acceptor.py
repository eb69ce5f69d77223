"""No flood of connections, without a key or beyond the limit of files, locks a tenant out."""

import asyncio
import json
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import httpx
import pytest

from gateway.http.acceptor import Acceptor
from gateway.http.connection import HttpConnection
from gateway.http.connection_table import ConnectionEntry, ConnectionTable
from tests.gateway.raw_client import RawClient, completion, connected, exchange, request
from tests.gateway.server_process import PATIENCE, ServerProcess, assert_unharmed, eventually, running_server

CAP = 64
UPLOAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n{"
PROBE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    refusing = (
        "--refused-per-second",
        "200",
    )  # or strangers wait half a minute to be refused, and the end waits for them
    flags = ("--threads", "1", "--max-connections", str(CAP), *refusing)
    with running_server(tmp_path_factory.mktemp("flood"), *flags) as server:
        yield server
        assert_unharmed(server)


def _ask_and_stay(client: RawClient) -> None:
    client.send(PROBE)
    assert client.reply("GET").status in (200, 503)


KEPT: dict[str, Callable[[RawClient], object]] = {
    "silent": lambda client: None,
    "half a header": lambda client: client.send(PROBE[:-9]),
    "an upload without a key": lambda client: client.send(UPLOAD),
    "idle after an answer": _ask_and_stay,
}


@contextmanager
def crowd(server: ServerProcess, keep: Callable[[RawClient], object], size: int = 2 * CAP) -> Iterator[list[RawClient]]:
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(server)) for _ in range(size)]
        for client in clients[-CAP // 2 :]:
            keep(client)
        yield clients


def is_served(server: ServerProcess) -> bool:
    return exchange(server, request(server, completion(), "/v1/completions", connection="close")).status == 200


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT.keys())
def test_tenants_are_served_and_probes_answered_however_many_strangers_there_are(
    server: ServerProcess, keep: Callable[[RawClient], object]
) -> None:
    with connected(server) as streaming, connected(server) as idle:
        idle.send(request(server, completion(), "/v1/completions"))
        assert idle.reply().status == 200
        streaming.send(request(server, completion(max_tokens=250, ignore_eos=True, stream=True), "/v1/completions"))
        assert streaming.receive().startswith(b"HTTP/1.1 200")
        with crowd(server, keep):
            assert all(is_served(server) for _ in range(5))
            for port in (server.url, server.admin_url):
                assert httpx.get(f"{port}/readyz", timeout=PATIENCE).status_code == 200
            idle.send(request(server, completion(), "/v1/completions"))  # strangers make room, not it
            assert idle.reply().status == 200
        events = b""
        while not events.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = streaming.receive()
            assert part, "the stream was cut off"
            events = events[-64:] + part


def test_tenants_are_served_while_connections_come_and_go_by_the_thousand(server: ServerProcess) -> None:
    done = threading.Event()
    num_made = 0

    def storm() -> None:
        nonlocal num_made
        while not done.is_set():
            clients = [RawClient(server) for _ in range(16)]
            num_made += len(clients)
            for client in clients:
                client.reset()

    storms = [threading.Thread(target=storm) for _ in range(2)]
    for thread in storms:
        thread.start()
    try:
        assert all(is_served(server) for _ in range(10))
        eventually(lambda: num_made > 1000)
    finally:
        done.set()
        for thread in storms:
            thread.join()


async def test_a_connection_that_ended_before_it_is_accepted_is_not_opened() -> None:
    opened = []

    def connection(entry: ConnectionEntry) -> HttpConnection:
        opened.append(entry)
        return cast(HttpConnection, asyncio.Protocol())

    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        listener.setblocking(False)
        clients = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(5)]
        for client, sent in zip(clients, (b"", b"G", PROBE, PROBE, b""), strict=True):
            client.send(sent)
        clients[0].close()  # sent nothing
        clients[1].close()  # sent half of its headers
        clients[2].shutdown(socket.SHUT_WR)  # waits for an answer
        acceptor = Acceptor(listener, ConnectionTable(10), connection, None, 1)
        while len(opened) < 3:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(opened) == 3
        acceptor.close()
        await acceptor.wait_closed()


async def test_a_request_without_a_key_that_is_closed_already_is_refused_before_it_is_opened() -> None:
    opened = []

    def connection(entry: ConnectionEntry) -> HttpConnection:
        opened.append(entry)
        return cast(HttpConnection, asyncio.Protocol())

    keyless = UPLOAD.replace(b"1000000", b"1")
    others = (
        keyless.replace(b"host: x", b"host: x\r\nX-API-Key: a"),
        keyless.replace(b"host: x", b"host: x\r\nAuthorization: Bearer a"),
        keyless.replace(b"/v1/completions", b"/v1/messages"),
        PROBE,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        listener.setblocking(False)
        clients = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(5)]
        for client, sent in zip(clients, (keyless, *others), strict=True):
            client.send(sent)
            client.shutdown(socket.SHUT_WR)
        acceptor = Acceptor(listener, ConnectionTable(10), connection, None, 1)
        while len(opened) < len(others):
            await asyncio.sleep(0)
        head, _, body = clients[0].recv(4096).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401") and json.loads(body)["error"]["code"] == "invalid_api_key"
        acceptor.close()
        await acceptor.wait_closed()
        assert len(opened) == len(others)


def test_a_tenant_that_uploads_on_every_connection_locks_no_other_out(server: ServerProcess) -> None:
    with ExitStack() as stack:
        for _ in range(2 * CAP):
            stack.enter_context(connected(server)).send(request(server, b"{", "/v1/completions", content_length="1000"))
        assert is_served(server)


def test_an_address_has_no_more_than_its_share(tmp_path: Path) -> None:
    flags = ("--threads", "1", "--max-connections", "64", "--max-connections-per-peer", "4")
    with running_server(tmp_path, *flags) as server, crowd(server, KEPT["silent"], 8) as clients:
        assert is_served(server)
        assert [client.is_closed() for client in clients[:5]] == [True] * 5
        assert server.metric("sluice_connections", 'state="stranger"') == 3


SPARE_FILES = 8  # for connections
FLOOD = 60


def processor_seconds(server: ServerProcess) -> float:
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def limit_files(server: ServerProcess, num_spare: int) -> None:
    highest = max(map(int, os.listdir(f"/proc/{server.process.pid}/fd")))  # noqa: PTH208
    _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (highest + 1 + num_spare, hard))


def test_a_flood_of_clients_beyond_the_limit_of_files_is_shed(tmp_path: Path) -> None:
    with running_server(tmp_path, "--threads", "1", "--header-timeout", "1") as server, ExitStack() as stack:

        def connect(count: int) -> list[RawClient]:
            return [stack.enter_context(connected(server)) for _ in range(count)]

        grammars, streaming = connect(2)
        asked = completion(structured_outputs={"choice": ["a"]})
        grammars.send(request(server, asked, "/v1/completions"))
        assert grammars.reply().status == 200  # what grammars need has its files from now on
        streaming.send(request(server, completion(max_tokens=600, ignore_eos=True, stream=True), "/v1/completions"))
        received = streaming.receive()
        limit_files(server, SPARE_FILES)
        flood = connect(FLOOD)
        assert all(client.is_closed() for client in flood[SPARE_FILES:])
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received += streaming.receive()
        before = processor_seconds(server)
        assert all(client.is_closed() for client in connect(FLOOD))  # the first are still there
        assert processor_seconds(server) - before < 1.0
        stack.close()
        eventually(server.answers)
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert not [line for line in lines if line["level"] in {"ERROR", "CRITICAL"}]
