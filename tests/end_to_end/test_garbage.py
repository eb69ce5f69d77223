"""No request leaves a ring of objects behind, which only the garbage collector would find, stopping the loop for it."""

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from backend.text.tokenizer import Tokenizer
from gateway.telemetry.request_record import RequestRecord
from quotas.errors import LimitExceeded, StoreUnavailable
from tests.gateway.paper_gateway import KEY, Client, Gateway

REQUESTS = 50
BODY: dict[str, Any] = {"model": "paper", "prompt": [5, 6, 7], "max_tokens": 6}


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.freeze()  # so that only what a test makes is looked at
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture
async def gateway(embedded_tokenizer: Tokenizer) -> Gateway:
    gateway = Gateway(embedded_tokenizer)
    gateway.engine.start()
    return gateway


async def ask(gateway: Gateway, body: dict[str, Any], key: str = KEY, **headers: str) -> int:
    client = Client("/v1/completions", [json.dumps(body).encode()], key=key, headers=headers)
    await client.ask(gateway.app)
    client.left.set()
    status: int = client.sent[0]["status"]
    return status


async def leave(gateway: Gateway, body: dict[str, Any]) -> None:
    client = Client("/v1/completions", [json.dumps(body).encode()])
    leaving = asyncio.create_task(client.leave_after(40))
    await client.ask(gateway.app)
    await leaving


def forgotten() -> int:
    """Requests in rings that nothing but the collector can reach."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    records = sum(isinstance(thing, RequestRecord) for thing in gc.garbage)
    gc.garbage.clear()
    gc.collect()
    return records


async def rings(gateway: Gateway, act: Callable[[], Awaitable[object]]) -> int:
    """How many of 50 requests leave one."""
    await act()
    forgotten()
    for _ in range(REQUESTS):
        await act()
    await asyncio.sleep(0)
    found = forgotten()
    await gateway.engine.stop()
    return found


@pytest.mark.parametrize(
    ("change", "key", "status"),
    [
        ({}, KEY, 200),
        ({"stream": True}, KEY, 200),
        ({"prompt": [[5], [6], [7]]}, KEY, 200),
        ({"max_tokens": -1}, KEY, 400),
        ({"model": "other"}, KEY, 404),
        ({}, "sk-nobody", 401),
    ],
)
async def test_a_request_that_is_answered_leaves_none(
    gateway: Gateway, change: dict[str, Any], key: str, status: int
) -> None:
    async def act() -> None:
        assert await ask(gateway, BODY | change, key) == status

    assert await rings(gateway, act) == 0


@pytest.mark.parametrize("refusal", [LimitExceeded, StoreUnavailable])
async def test_a_request_that_a_limit_refuses_leaves_none(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, refusal: type[Exception]
) -> None:
    async def reserve(*arguments: Any) -> None:
        raise LimitExceeded(arguments[2][0], 5, 1, 2.0) if refusal is LimitExceeded else StoreUnavailable("away")

    monkeypatch.setattr(gateway.store, "reserve", reserve)

    async def act() -> None:
        assert await ask(gateway, BODY) in (429, 503)

    assert await rings(gateway, act) == 0


async def test_a_request_that_would_come_too_late_leaves_none(gateway: Gateway) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(ask(gateway, BODY | {"prompt": [5] * 50, "max_tokens": 40}))
        await asyncio.sleep(0)
        found = await rings(gateway, lambda: ask(gateway, BODY, **{"x-sluice-ttft-ms": "0.001"}))
    assert found == 0


async def test_a_client_that_leaves_leaves_none(gateway: Gateway) -> None:
    assert await rings(gateway, lambda: leave(gateway, BODY | {"stream": True, "max_tokens": 80})) == 0
