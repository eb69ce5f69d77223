"""Asking replicas for their states, which they tell, refuse, garble or keep to themselves."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import orjson
import pytest

from fleet.fleet import LEARNED_AT_ONCE
from fleet.poller import Poller
from fleet.view import SILENCE_SECONDS
from gateway.replica.digests import BLOCK_BYTES
from gateway.replica.state import Changes
from tests.fleet.states import IDLE
from tests.fleet.test_fleet import Three

Answer = Callable[[httpx.Request], httpx.Response]


def telling(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=orjson.dumps(replace(IDLE, beginnings=Changes(7, ["0a"], [], is_all=True))))


def saying(status: int, text: str) -> Answer:
    return lambda request: httpx.Response(status, text=text)


def unreachable(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@asynccontextmanager
async def polling(fleet: Three, **answers: Answer) -> AsyncIterator[list[httpx.Request]]:
    """Have a fleet poll its replicas all the time; yield its polls. An unmentioned replica tells its state."""
    asked: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answers.get(request.url.host, telling)(request)

    async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
        task = asyncio.create_task(Poller(fleet, client, "the-key", 0.0001).run())
        try:
            while len(asked) < 9:
                await asyncio.sleep(0.0001)
            yield asked
        finally:
            task.cancel()


async def test_each_is_asked_with_the_key_for_what_has_changed() -> None:
    fleet = Three()
    async with polling(fleet) as asked:
        assert {request.url.port for request in asked} == {8001}
        assert {request.headers["authorization"] for request in asked} == {"Bearer the-key"}
        of_a = [str(request.url) for request in asked if request.url.host == "a"]
        assert of_a[0] == "http://a:8001/admin/v1/state?since=0"
        assert of_a[-1] == "http://a:8001/admin/v1/state?since=7"
        assert fleet.prefixes.cached_bytes("a:8000", (b"\x0a",), fleet.clock()) == BLOCK_BYTES


async def test_a_replica_with_a_closed_port_is_gone_at_once() -> None:
    fleet = Three()
    async with polling(fleet, b=unreachable):
        assert fleet.names == "ac"


@pytest.mark.parametrize("answer", [saying(401, "no"), saying(200, "{}"), saying(200, "?"), saying(500, "")])
async def test_a_silent_replica_is_gone_after_a_while_and_logged_once(
    answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Three()
    async with polling(fleet, b=answer) as asked:
        assert fleet.names == "abc"
        fleet.pass_time(SILENCE_SECONDS)
        seen = len(asked)
        while len(asked) < seen + 9:
            await asyncio.sleep(0.0001)
        assert fleet.names == "ac"
        assert fleet.views["b:8000"].problem
        assert not fleet.views["a:8000"].problem
    warnings = [record for record in caplog.records if record.name == "fleet.poller"]
    assert [record.levelno for record in warnings] == [logging.WARNING]


async def test_of_thousands_of_beginnings_all_are_learned_a_part_at_a_time() -> None:
    fleet, digests = Three(), [f"{number:06x}" for number in range(2 * LEARNED_AT_ONCE + 1)]
    told = replace(IDLE, beginnings=Changes(7, digests, [], is_all=True, behind={digests[-1]: 5}))
    content, last = orjson.dumps(told), (bytes.fromhex(digests[-1]),)
    async with polling(fleet, a=lambda _: httpx.Response(200, content=content)):
        assert fleet.prefixes.cached_bytes("a:8000", last, fleet.clock()) == BLOCK_BYTES + 5
    fleet.told(fleet.views["b:8000"], told, fleet.clock())
    assert fleet.prefixes.cached_bytes("b:8000", last, fleet.clock()) == 0, "the rest is learned later"
