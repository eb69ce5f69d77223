import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from admission.outcome import Outcome
from gateway.api.endpoint import Call, Endpoint
from gateway.http.request_scope import ActiveRequests
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
