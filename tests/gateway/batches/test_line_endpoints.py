"""Which answers to a line are final."""

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from gateway import errors
from gateway.batches.line_endpoints import LineEndpoints
from gateway.telemetry.request_record import current


@pytest.mark.parametrize(
    ("refusal", "is_final"),
    [
        (errors.CancelledByAdmin(), True),
        (errors.ModelFailed(), True),
        (errors.InsufficientQuota("spent"), False),
        (errors.BadRequest("wrong"), True),
        (errors.RateLimited("wait", retry_after=2.0), False),
        (errors.Preempted(), False),
        (errors.InternalError("broken"), False),
    ],
)
async def test_a_line_is_tried_again_unless_its_refusal_says_that_it_would_stay(
    refusal: errors.ApiError, is_final: bool
) -> None:
    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        current.set(record)
        headers = [(name.encode(), value.encode()) for name, value in refusal.headers().items()]
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": refusal.to_body()})

    record: Any = SimpleNamespace(request_id="r", error=refusal, engine=SimpleNamespace(measure=None, usage_row=None))
    lines = object.__new__(LineEndpoints)
    lines._endpoints = {"/v1/x": endpoint}  # type: ignore[dict-item]
    answer = await lines.answer("/v1/x", "t", "k", b"{}")
    assert (answer.status, answer.retry_after is None) == (refusal.status, is_final)
