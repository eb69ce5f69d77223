"""The replicas asked to settle a lost replica's requests, and the fate of unsettled ones."""

import asyncio
import logging
from collections import Counter

import httpx
import orjson
import pytest

from fleet.settlements import PATH, Settlements
from quotas.reservation import Delivered
from tests.fleet.test_fleet import Three

CUT = Delivered("0" * 32, True, 5)


class Asked:
    """The replicas, which answer with the statuses in turn; 0: they cannot be reached."""

    def __init__(self, **statuses: list[int]) -> None:
        self.statuses = statuses
        self.hosts: list[str] = []
        self.bodies: list[object] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        assert (request.url.path, request.headers["authorization"]) == (PATH, "Bearer key")
        host = request.url.host
        self.hosts.append(host)
        self.bodies.append(orjson.loads(request.content))
        left = self.statuses.get(host, [200])
        status = left.pop(0) if len(left) > 1 else left[0]
        if not status:
            raise httpx.ConnectError("gone")
        return httpx.Response(status)


async def settle(asked: Asked, lost: str) -> Settlements:
    async with httpx.AsyncClient(transport=httpx.MockTransport(asked)) as client:
        settlements = Settlements(Three(), client, "key")
        settlements.cut("acme", lost, CUT)
        (task,) = settlements._waiting
        await task
        await settlements.close()
    return settlements


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.settlements.PAUSE_SECONDS", (0.0, 1e-9, 1e-9))


async def test_another_replica_than_the_lost_one_is_asked_and_once() -> None:
    asked = Asked()
    settlements = await settle(asked, "a:8000")
    assert (asked.hosts, settlements.num_settled, settlements.num_left) == (["b"], 1, 0)
    assert asked.bodies == [{"tenant": "acme", "request": "0" * 32, "has_begun": True, "output_tokens": 5}]


async def test_a_replica_that_cannot_settle_is_followed_by_the_next_and_all_are_asked_again() -> None:
    asked = Asked(a=[0], b=[503], c=[0, 200])
    settlements = await settle(asked, "a:8000")
    assert (asked.hosts, settlements.num_settled) == (["b", "c", "a", "b", "c"], 1)


async def test_an_unsettleable_request_is_left_to_its_lease_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    asked = Asked(a=[0], b=[0], c=[503])
    settlements = await settle(asked, "a:8000")
    assert Counter(asked.hosts) == {"a": 2, "b": 3, "c": 3}
    assert (settlements.num_settled, settlements.num_left) == (0, 1)
    assert any("left to its lease" in one.message for one in caplog.records if one.levelno == logging.WARNING)


async def test_a_router_that_stops_waits_for_what_is_being_settled() -> None:
    begun, answer = asyncio.Event(), asyncio.Event()

    async def slow(request: httpx.Request) -> httpx.Response:
        begun.set()
        await answer.wait()
        return httpx.Response(200)

    async with httpx.AsyncClient(transport=httpx.MockTransport(slow)) as client:
        settlements = Settlements(Three(), client, "key")
        settlements.cut("acme", "a:8000", CUT)
        await begun.wait()
        closing = asyncio.create_task(settlements.close())
        await asyncio.sleep(0)
        answer.set()
        await closing
        assert settlements.num_settled == 1
