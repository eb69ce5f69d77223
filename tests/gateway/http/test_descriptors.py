"""A process that may open no more files goes on with what it has, and takes clients again when it can."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gateway.raw_client import RawClient, completion, connected, request
from tests.gateway.server_process import ServerProcess, eventually, running_server

ROOM = 8  # connections
FLOOD = 60


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path, "--threads", "1") as server:
        yield server


def open_files(server: ServerProcess) -> list[int]:
    return [int(number) for number in os.listdir(f"/proc/{server.process.pid}/fd")]  # noqa: PTH208


def processor_seconds(server: ServerProcess) -> float:
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def limit_files(server: ServerProcess, room: int) -> None:
    _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (max(open_files(server)) + 1 + room, hard))


def test_a_flood_of_clients_beyond_the_limit_of_files_is_shed(server: ServerProcess) -> None:
    with ExitStack() as stack:

        def connect(count: int) -> list[RawClient]:
            return [stack.enter_context(connected(server)) for _ in range(count)]

        (streaming,) = connect(1)
        streaming.send(request(server, completion(max_tokens=600, ignore_eos=True, stream=True), "/v1/completions"))
        received = streaming.receive()
        limit_files(server, ROOM)
        flood = connect(FLOOD)
        assert all(client.is_closed() for client in flood[ROOM:])
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            received += streaming.receive()
        before = processor_seconds(server)
        assert all(client.is_closed() for client in connect(FLOOD))  # the first are still there
        assert processor_seconds(server) - before < 1.0
    eventually(server.answers)
    lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert not [line for line in lines if line["level"] in {"ERROR", "CRITICAL"}]
