"""The event streams of stored responses: a tenant has as many as responses in the background."""

import asyncio
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from admission.outcome import Outcome
from gateway.api.stored_responses import ResponseEndpoint
from gateway.errors import ConcurrencyExceeded
from gateway.http.request_scope import ActiveRequests

POLICY = SimpleNamespace(name="acme", tenant=SimpleNamespace(stored_responses=SimpleNamespace(background=1)))


class PaperEndpoint(ResponseEndpoint):
    """Its store answers once `may_read` is set; a stream goes on until its client leaves."""

    def __init__(self) -> None:
        active = ActiveRequests(write_timeout=3600)
        told = {
            "policy": lambda *_: POLICY,
            "active_requests": active,
            "telemetry": SimpleNamespace(clock=time.monotonic),
        }
        super().__init__(SimpleNamespace(**told))  # type: ignore[arg-type]
        self.may_read, self.num_events = asyncio.Event(), 0
        self._stored: Any = SimpleNamespace(read=lambda *_: self.may_read.wait(), events=self._events)

    def authenticate(self, call: object) -> Any:
        return None

    async def charge(self, *_: object, **__: object) -> Any:
        return SimpleNamespace(close=lambda: None, was_served=False)

    async def _events(self, *_: object) -> AsyncGenerator[bytes]:
        while True:
            self.num_events += 1
            yield b"event: response.in_progress\n\n"
            await asyncio.sleep(0)

    def ask(self, gone: asyncio.Event) -> "asyncio.Task[Outcome]":
        async def receive() -> dict[str, str]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def nothing(*_: object) -> None:
            pass

        path = {"response": "resp_" + "0" * 48}
        scope = {"type": "http", "method": "GET", "query_string": b"stream=true", "path_params": path, "headers": []}
        response = SimpleNamespace(stream=nothing, end_stream=nothing, send=nothing, exchange=None)
        record = SimpleNamespace(scope=None)
        told = {"scope": scope, "receive": receive, "send": nothing, "response": response, "record": record}
        return asyncio.create_task(self.answer(SimpleNamespace(**told)))  # type: ignore[arg-type]


async def test_a_stream_counts_from_before_the_store_is_asked_until_its_client_leaves() -> None:
    endpoint, gone = PaperEndpoint(), asyncio.Event()
    followed = endpoint.ask(gone)
    await asyncio.sleep(0)
    for _ in range(2):
        with pytest.raises(ConcurrencyExceeded, match="event streams of its responses are open"):
            await endpoint.ask(gone)
        endpoint.may_read.set()
        while not endpoint.num_events:
            await asyncio.sleep(0)
    gone.set()
    assert await followed is Outcome.DISCONNECTED
    assert await endpoint.ask(gone) is Outcome.DISCONNECTED, "there is a place again"
