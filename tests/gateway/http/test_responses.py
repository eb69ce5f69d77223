import asyncio
from collections.abc import Callable, Coroutine
from typing import cast

import pytest
from starlette.types import Message
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gateway.errors import ShuttingDown
from gateway.http.connection_table import ConnectionTable
from gateway.http.request_scope import TRANSPORT, Exchange
from gateway.http.responses import ResponseWriter


async def _unsent(message: Message) -> None:
    raise AssertionError(message)


def response(*headers: tuple[bytes, bytes]) -> ResponseWriter:
    return ResponseWriter({"type": "http", "headers": list(headers)}, _unsent, lambda: 0.0)


async def test_two_parts_that_begin_a_stream_at_once_both_come_after_its_headers() -> None:
    sent: list[str] = []
    is_writable = asyncio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            await is_writable.wait()
        sent.append(message["type"])

    writer = ResponseWriter({"type": "http", "headers": []}, send, lambda: 0.0)
    async with asyncio.TaskGroup() as group:
        for part in (b"data: 0\n\n", b"data: 1\n\n"):
            group.create_task(writer.stream(part))
        group.create_task(asyncio.sleep(0)).add_done_callback(lambda _: is_writable.set())
    assert sent == ["http.response.start", *["http.response.body"] * 2]


async def test_a_stream_that_ends_with_its_first_events_has_headers_and_an_end() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await ResponseWriter({"type": "http", "headers": []}, send, lambda: 0.0).end_stream(b"data: [DONE]\n\n")
    start, end = sent
    assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
    assert end == {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}


@pytest.mark.parametrize("begin", [lambda writer: writer.stream(b"data: 0\n\n"), lambda writer: writer.reply(b"{}")])
async def test_an_error_has_its_own_head_if_that_of_the_answer_was_never_written(
    begin: Callable[[ResponseWriter], Coroutine[None, None, None]],
) -> None:
    sent: list[Message] = []
    is_writable = asyncio.Event()

    async def send(message: Message) -> None:
        await is_writable.wait()
        sent.append(message)

    writer = ResponseWriter({"type": "http", "headers": []}, send, lambda: 0.0)
    writing = asyncio.create_task(begin(writer))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait({writing})
    assert (writer.started, writer.status) == (None, 0)
    is_writable.set()
    await writer.fail(ShuttingDown())
    assert [message.get("status") for message in sent] == [ShuttingDown.status, None]


class Answer:
    """Uvicorn's state of an answer that has not begun, on a connection that keeps what is written to it."""

    def __init__(self) -> None:
        self.scope = {"method": "POST", "http_version": "1.1"}
        self.default_headers: list[tuple[bytes, bytes]] = []
        self.response_started, self.keep_alive = False, True
        self.expected_content_length = 0
        self.writes: list[bytes] = []
        self.write = self.writes.append
        flow, entry = FlowControl(cast(asyncio.Transport, self)), ConnectionTable(1).add("192.0.2.1", lambda: None)
        self.exchange = Exchange(cast(asyncio.WriteTransport, self), flow, entry)
        self.exchange.has_headers(cast(RequestResponseCycle, self))

    async def send(self, message: Message) -> None:
        assert len(message["body"]) == self.expected_content_length


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_first_part_of_a_body_shares_a_write_with_the_headers(is_stream: bool) -> None:
    answer = Answer()
    scope = {"type": "http", "headers": [], "extensions": {TRANSPORT: {"exchange": answer.exchange}}}
    writer = ResponseWriter(scope, answer.send, lambda: 0.0)
    await (writer.stream(b"hello") if is_stream else writer.reply(b"hello"))
    (written,) = answer.writes
    head, _, body = written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert (b"content-length: 5" in head) is not is_stream
    assert body == (b"5\r\nhello\r\n" if is_stream else b"hello")
