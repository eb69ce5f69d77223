import asyncio

import pytest
from starlette.types import Message

from gateway.http.responses import ResponseWriter


async def _unsent(message: Message) -> None:
    raise AssertionError(message)


def response(*headers: tuple[bytes, bytes]) -> ResponseWriter:
    return ResponseWriter({"type": "http", "headers": list(headers)}, _unsent, lambda: 0.0)


def test_of_a_header_that_is_repeated_the_first_counts() -> None:
    twice = response((b"authorization", b"Bearer first"), (b"accept", b"*/*"), (b"authorization", b"Bearer second"))
    assert twice.request_header(b"authorization") == b"Bearer first"
    assert twice.request_header(b"traceparent") is None


@pytest.mark.parametrize("given", [b"", b"a b", b"x" * 129, b"\xff"])
def test_a_request_id_that_could_do_harm_is_replaced(given: bytes) -> None:
    assert response((b"x-request-id", b"ours-1.2:3")).request_id == b"ours-1.2:3"
    assert response((b"x-request-id", given)).request_id.startswith(b"req_")


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
