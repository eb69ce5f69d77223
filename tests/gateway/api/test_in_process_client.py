"""What waits for the quota store ends with its deadline and with its settlement."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from starlette.types import Message

from backend.text.tokenizer import Tokenizer
from quotas.errors import LimitExceeded
from quotas.policy.limit import Limit, Rate, Resource
from tests.gateway.paper_gateway import Client, Gateway

LIMIT = Limit(Resource.TOKENS, 10**9, Rate(60, 10**9))


@pytest.fixture
async def gateway(embedded_tokenizer: Tokenizer) -> AsyncIterator[Gateway]:
    gateway = Gateway(embedded_tokenizer)
    gateway.engine.start()
    yield gateway
    await gateway.engine.shut_down()


def completion(**fields: object) -> list[bytes]:
    return [json.dumps({"model": "paper", "prompt": "hi", **fields}).encode()]


@pytest.mark.parametrize("header", ["x-sluice-deadline-ms", "x-sluice-ttft-ms"])
async def test_a_deadline_that_passes_while_the_store_is_asked_is_told_then(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(gateway.store, "reserve", never)
    client = Client("/v1/completions", completion(max_tokens=2), headers={header: "20"})
    async with asyncio.timeout(240):
        await client.ask(gateway.app)
    assert client.sent[0]["status"] == 504
    assert json.loads(client.sent[1]["body"])["error"]["code"] == "deadline_exceeded"


async def test_no_more_is_reserved_for_an_answer_that_is_settled(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[bool]()

    async def refused(*_: object) -> None:
        waits.append(True)
        raise LimitExceeded(LIMIT, 1, 0, 3600.0)

    monkeypatch.setattr(gateway.store, "extend", refused)
    monkeypatch.setattr(gateway.service.admission, "expected_tokens", lambda *_: 8)
    extenders = list[asyncio.Task[object]]()

    class SlowReader(Client):
        async def send(self, message: Message) -> None:
            if message.get("more_body") is False:  # settled, and not closed yet
                for _ in range(3):
                    await asyncio.sleep(0)
                extenders.extend(task for task in asyncio.all_tasks() if "QuotaExtender" in repr(task.get_coro()))
            await super().send(message)

    client = SlowReader("/v1/completions", completion(stream=True, stop=["zz"]))
    await client.ask(gateway.app)
    assert client.sent[0]["status"] == 200 and waits
    assert not extenders
