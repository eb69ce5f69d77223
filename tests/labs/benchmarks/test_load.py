import socket
from itertools import repeat

import pytest

from labs.benchmarks.load import BadAnswer, Connection, all_at_once, closed_loop, post
from tests.labs.benchmarks.conftest import Script

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n{ok}"
EVENTS = b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(
    b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS
)
END = b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_ends_with_its_last_byte_however_it_is_cut(script: Script, size: int) -> None:
    head, _, body = WHOLE.partition(b"\r\n\r\n")
    script.parts = [head + b"\r\n\r\n", *(body[i : i + size] for i in range(0, len(body), size))]
    load = closed_loop(script.port, repeat(post("/", {})), 2, 0.05, warm_up=0)
    assert load.answers > 0
    assert load.seconds >= 0.05


@pytest.mark.parametrize("size", [3, 8, 1000])
def test_events_are_counted_once_however_they_are_cut(script: Script, size: int) -> None:
    head, _, body = (STREAM + END).partition(b"\r\n\r\n")
    script.parts = [head + b"\r\n\r\n", *(body[i : i + size] for i in range(0, len(body), size))]
    seconds, times = all_at_once(script.port, [post("/", {})] * 3)
    assert [len(each) for each in times] == [len(EVENTS)] * 3
    assert all(0 < at <= seconds for each in times for at in each)


def test_a_refusal_is_no_answer(script: Script) -> None:
    script.parts = [b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"]
    with pytest.raises(BadAnswer, match="503"):
        all_at_once(script.port, [post("/", {})])


def test_a_closed_connection_is_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = Connection(server.getsockname()[1])
        server.accept()[0].close()
        with connection.sock, pytest.raises(BadAnswer, match="closed"):
            connection.receive()
