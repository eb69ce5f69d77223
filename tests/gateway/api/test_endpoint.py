import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from admission.outcome import Outcome
from gateway.api.endpoint import Call, Endpoint
from gateway.errors import ShuttingDown
from gateway.http.request_scope import TRANSPORT, ActiveRequests
from gateway.telemetry.logs.log_format import JsonFormat
from gateway.telemetry.request_record import RequestRecord, Telemetry


class Uncounted:
    """An engine that delays no refusal."""

    async def refused(self, *_: object) -> float:
        return 0.0


class Unforeseen(Endpoint):
    async def answer(self, call: Call) -> Outcome:
        raise ValueError(f"cannot read {(await call.receive())['body']!r}")


async def test_an_unforeseen_error_is_logged_with_its_place_and_without_what_it_quotes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    telemetry, request_records, sent = Telemetry(lambda: 0.0), list[RequestRecord](), list[Any]()
    telemetry.on_end.append(request_records.append)
    frontend: Any = SimpleNamespace(
        telemetry=telemetry, active_requests=ActiveRequests(write_timeout=30), engine=Uncounted(), cors=None
    )
    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": [(b"x-request-id", b"r1")]}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"a secret"}

    async def send(message: Any) -> None:
        sent.append(message)

    await Unforeseen(frontend)(scope, receive, send)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    line = json.loads(JsonFormat().format(record))
    assert (line["message"], line["request_id"]) == ("a request failed", "r1")
    assert "in answer" in line["exception"] and line["exception"].endswith("builtins.ValueError")
    assert "secret" not in JsonFormat().format(record) + str(sent)
    assert sent[0]["status"] == 500
    assert [request_record.outcome for request_record in request_records] == [Outcome.FAILED]


class Refusing(Endpoint):
    async def answer(self, call: Call) -> Outcome:
        raise ShuttingDown


class StuckReader:
    """A connection whose client reads nothing: a write ends when the connection is dropped."""

    def __init__(self) -> None:
        self._dropped = asyncio.Event()

    def abort(self) -> None:
        self._dropped.set()

    async def send(self, message: Message) -> None:
        await self._dropped.wait()


class Answering(Endpoint):
    async def answer(self, call: Call) -> Outcome:
        return await self.complete(call, b"{}")


@pytest.mark.parametrize(
    ("endpoint", "ended"), [(Refusing, (Outcome.FAILED, ShuttingDown)), (Answering, (Outcome.COMPLETED, type(None)))]
)
async def test_an_unread_response_is_given_up_with_its_connection(
    endpoint: type[Endpoint], ended: tuple[Outcome, type]
) -> None:
    reader, telemetry, request_records = StuckReader(), Telemetry(lambda: 0.0), list[RequestRecord]()
    telemetry.on_end.append(request_records.append)
    frontend: Any = SimpleNamespace(
        telemetry=telemetry, active_requests=ActiveRequests(write_timeout=0.01), engine=Uncounted(), cors=None
    )
    extensions = {TRANSPORT: {"transport": reader}}
    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": [], "extensions": extensions}

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async with asyncio.timeout(240):
        await endpoint(frontend)(scope, receive, reader.send)
    assert [(request_record.outcome, type(request_record.error)) for request_record in request_records] == [ended]
