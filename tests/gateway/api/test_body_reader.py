import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator

import orjson
import pytest
from starlette.types import Message

from backend.text.tokenizer import Tokenizer
from gateway.api.body_reader import INLINE_BYTES, BodyReader, RoundRobinLock
from gateway.errors import ConcurrencyExceeded, RequestTooLarge
from gateway.http.json_body import JsonBody
from gateway.telemetry.request_record import RequestRecord, trace_context

MEBIBYTE = 2**20


@pytest.fixture
def body_reader() -> Iterator[BodyReader]:
    body_reader = BodyReader(MEBIBYTE, 2 * MEBIBYTE, timeout=0.01, max_model_len=1024)
    yield body_reader
    body_reader.close()


class Upload:
    """A body that comes in parts, each when it is let come."""

    def __init__(self, body: bytes, part: int = 30_000, declared: int | None = None) -> None:
        self.parts = [body[start : start + part] for start in range(0, len(body), part)]
        self.may_come = asyncio.Event()
        self.scope = {"headers": [(b"content-length", b"%d" % (len(body) if declared is None else declared))]}
        self.record = RequestRecord("r", "POST", "/", trace_context(None, None), 0.0, 0)

    async def receive(self) -> Message:
        await self.may_come.wait()
        return {"type": "http.request", "body": self.parts.pop(0), "more_body": bool(self.parts)}

    async def read(self, body_reader: BodyReader, tenant: str = "t", key: str = "k") -> tuple[object, bool]:
        """What was read, and whether on the thread of the loop."""

        def parse(body: JsonBody) -> tuple[object, bool]:
            return body.loads(), threading.current_thread() is threading.main_thread()

        return await body_reader.read(self.scope, self.receive, tenant, key, self.record, parse)


@pytest.mark.parametrize("size", [10, INLINE_BYTES - 100, INLINE_BYTES, 60_000, 70_000, MEBIBYTE - 100])
@pytest.mark.parametrize("part", [1000, 30_000, 200_000])
async def test_a_body_in_any_parts_is_read_and_parsed_beside_the_loop_unless_it_is_small(
    body_reader: BodyReader, size: int, part: int
) -> None:
    value = {"prompt": "x" * size}
    upload = Upload(orjson.dumps(value), part)
    upload.may_come.set()
    assert await upload.read(body_reader) == (value, size < INLINE_BYTES - 50)
    assert upload.record.body_bytes == len(orjson.dumps(value))


async def test_a_body_of_too_many_elements_is_refused_before_it_has_come(body_reader: BodyReader) -> None:
    upload = Upload(b"[" + b"{}," * 300_000 + b"1]")
    upload.may_come.set()
    with pytest.raises(RequestTooLarge, match="elements"):
        await upload.read(body_reader)
    assert len(upload.parts) > 20


async def test_a_key_has_half_of_its_tenants_bytes_and_small_bodies_need_none(body_reader: BodyReader) -> None:
    body, size = orjson.dumps({"prompt": "x" * 100_000}), MEBIBYTE
    async with body_reader._reserve_bytes("t", "a", size):
        with pytest.raises(ConcurrencyExceeded, match="Your API key"):
            await Upload(body).read(body_reader, key="a")
        async with body_reader._reserve_bytes("t", "b", size):
            with pytest.raises(ConcurrencyExceeded, match="Your tenant"):
                await Upload(body).read(body_reader, key="c")
            for tenant, key, size in (("other", "c", 100_000), ("t", "a", 1000)):
                upload = Upload(orjson.dumps("x" * size))
                upload.may_come.set()
                assert (await upload.read(body_reader, tenant, key))[0] == "x" * size
    upload = Upload(body)
    upload.may_come.set()
    assert (await upload.read(body_reader, key="a"))[0] == orjson.loads(body)


async def test_bytes_are_granted_in_order_when_others_leave() -> None:
    body_reader, order = BodyReader(MEBIBYTE, 2 * MEBIBYTE, timeout=3600, max_model_len=1024), []

    async def hold(name: str, size: int) -> None:
        async with body_reader._reserve_bytes("t", "k", size):
            order.append(name)
            await asyncio.sleep(0)

    names = ("large", "left", "small", "other")
    tasks = [asyncio.create_task(hold(name, MEBIBYTE // (1 + 3 * (name == "small")))) for name in names]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert order == ["large", "small", "other"]
    async with body_reader._reserve_bytes("t", "k", MEBIBYTE):
        body_reader.close()


async def test_tenants_take_turns_one_in_a_turn_of_the_loop() -> None:
    lock, order = RoundRobinLock(), []
    loop_turns = 0

    async def count() -> None:
        nonlocal loop_turns
        while True:
            loop_turns += 1
            await asyncio.sleep(0)

    async def work(tenant: str) -> None:
        async with lock.hold(tenant):
            order.append((tenant, loop_turns))

    counting = asyncio.create_task(count())
    await asyncio.gather(*(work(tenant) for tenant in "aaaaabbc"))
    counting.cancel()
    assert [tenant for tenant, _ in order] == ["a", "a", "b", "c", "a", "b", "a", "a"]
    assert len({turn for _, turn in order}) == len(order)


async def test_the_turn_of_a_client_that_has_left_is_passed_on() -> None:
    lock, done = RoundRobinLock(), []

    async def work(name: str, gate: asyncio.Event) -> None:
        async with lock.hold("t"):
            await gate.wait()
            done.append(name)

    opened, closed = asyncio.Event(), asyncio.Event()
    opened.set()
    first = asyncio.create_task(work("first", closed))
    others = [asyncio.create_task(work(name, opened)) for name in ("left", "late", "last")]
    await asyncio.sleep(0)
    others[0].cancel()
    await asyncio.sleep(0)
    closed.set()
    await first
    others[1].cancel()  # its turn is being passed on
    await others[2]
    assert done == ["first", "last"]


@pytest.mark.parametrize("where", ["bodies", "tokenizer"])
async def test_work_of_a_client_that_has_left_keeps_its_tenants_place_until_it_ends(
    body_reader: BodyReader, embedded_tokenizer: Tokenizer, where: str
) -> None:
    began, may_end, is_over = threading.Event(), threading.Event(), list[bool]()

    def run(function: Callable[[], object]) -> Awaitable[object]:
        if where == "bodies":
            return body_reader.offload("t", 2 * INLINE_BYTES, function)
        return body_reader.encode("t", embedded_tokenizer, function)

    def work() -> None:
        began.set()
        may_end.wait(240)
        is_over.append(True)

    leaving = asyncio.ensure_future(run(work))
    while not began.is_set():
        await asyncio.sleep(0)
    leaving.cancel()
    following = asyncio.ensure_future(run(lambda: list(is_over)))
    left = asyncio.ensure_future(run(lambda: is_over.append(False)))
    for _ in range(5):
        await asyncio.sleep(0)
    left.cancel()
    assert leaving.cancelled() and not following.done()
    if where == "tokenizer":
        assert await body_reader.encode("other", embedded_tokenizer, lambda: 1) == 1
    may_end.set()
    assert await following == [True]
    assert await run(lambda: is_over) == [True]
