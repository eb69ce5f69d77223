"""Deadlines count from a request's arrival, whatever its body takes to come."""

import json
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.types import Message

from backend.text.tokenizer import Tokenizer
from tests.gateway.paper_gateway import Client, Gateway

BODY_SECONDS = 3.0


@dataclass
class SlowUpload(Client):
    """The second part of its body comes `BODY_SECONDS` after the first, by the wall clock of the test."""

    passed: list[float] = field(default_factory=list)

    async def receive(self) -> Message:
        if len(self.parts) == 1:
            self.passed.append(BODY_SECONDS)
        return await super().receive()


async def test_an_absolute_deadline_is_the_moment_that_the_client_named(
    embedded_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, asked = Gateway(embedded_tokenizer), list[Any]()
    generate = gateway.client.generate

    async def spy(request: Any, *rest: Any) -> Any:
        asked.append(request)
        return await generate(request, *rest)

    monkeypatch.setattr(gateway.client, "generate", spy)
    real = time.time
    body = json.dumps({"model": "paper", "prompt": "hello", "max_tokens": 3}).encode()
    began = gateway.engine.clock()
    client = SlowUpload(
        "/v1/completions", [body[:9], body[9:]], headers={"x-sluice-deadline-at": f"{real() + 500:.3f}"}
    )
    monkeypatch.setattr(time, "time", lambda: real() + sum(client.passed))
    gateway.engine.start()
    await client.ask(gateway.app)
    await gateway.engine.shut_down()
    assert client.passed == [BODY_SECONDS] and client.sent[0]["status"] == 200
    assert asked[0].done_by > began + 499
