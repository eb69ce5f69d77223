"""What every endpoint does with an error that nobody foresaw."""

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from admission.outcome import Outcome
from gateway.endpoint import Call, Endpoint
from gateway.telemetry.logs.log_format import JsonFormat
from gateway.telemetry.story import Story
from gateway.telemetry.telemetry import Telemetry


class Unforeseen(Endpoint):
    """Chokes on what a client sent."""

    async def answer(self, call: Call) -> Outcome:
        raise ValueError(f"cannot read {(await call.receive())['body']!r}")


async def test_an_unforeseen_error_is_logged_with_its_place_and_without_what_it_quotes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    telemetry, stories, sent = Telemetry(lambda: 0.0), list[Story](), list[Any]()
    telemetry.on_end.append(stories.append)
    service: Any = SimpleNamespace(telemetry=telemetry)
    scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": [(b"x-request-id", b"r1")]}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"a secret"}

    async def send(message: Any) -> None:
        sent.append(message)

    await Unforeseen(service)(scope, receive, send)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    line = json.loads(JsonFormat().format(record))
    assert (line["message"], line["request_id"]) == ("a request failed", "r1")
    assert "in answer" in line["exception"] and line["exception"].endswith("builtins.ValueError")
    assert "secret" not in JsonFormat().format(record) + str(sent)
    assert sent[0]["status"] == 500
    assert [story.outcome for story in stories] == [Outcome.FAILED]
