import logging
from typing import Any

import pytest

from admission.outcome import Outcome
from gateway.errors import BadRequest, RateLimited
from gateway.telemetry.logs.request_log import RequestLog, log_requests
from gateway.telemetry.request_record import Telemetry
from tests.gateway.telemetry.records import a_record, a_timeline

BLOCK_BYTES = 1000


def line(caplog: pytest.LogCaptureFixture, **changes: Any) -> tuple[int, dict[str, Any]]:
    caplog.set_level(logging.DEBUG, "gateway.telemetry.logs.request_log")
    RequestLog(BLOCK_BYTES)(a_record(**changes))
    (record,) = caplog.records
    caplog.clear()
    return record.levelno, vars(record)["fields"]


def test_a_line_has_the_ids_the_outcome_the_tokens_and_the_times(caplog: pytest.LogCaptureFixture) -> None:
    timeline = a_timeline()
    timeline.promise.charged, timeline.sequence.block_table.block_seconds = 0.03, 0.12
    timeline.sequence.num_preemptions = 1
    timeline.sequence.num_cached_tokens = 8
    level, fields = line(caplog, timelines=[timeline], num_retries=2)
    assert level == logging.INFO
    assert fields == {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "outcome": "completed",
        "code": None,
        "param": None,
        "error": None,
        "request_id": "req_1",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "tenant": "acme",
        "key_id": "k1",
        "seconds": 0.08,
        "retries": 2,
        "operation": "text_completion",
        "model": "embedded",
        "class": "standard",
        "response_id": "cmpl-1",
        "prompt_tokens": 10,
        "cached_tokens": 8,
        "output_tokens": 4,
        "queue_seconds": 0.006,
        "first_token_seconds": 0.03,
        "engine_time": 0.03,
        "kv_byte_seconds": 120,
        "preemptions": 1,
    }


def test_choices_are_added_up_and_the_queue_is_that_of_the_last(caplog: pytest.LogCaptureFixture) -> None:
    _, fields = line(caplog, timelines=[a_timeline(), a_timeline(admitted=100.02, first_token=100.025)])
    assert (fields["prompt_tokens"], fields["output_tokens"]) == (20, 8)
    assert (fields["queue_seconds"], fields["first_token_seconds"]) == (0.016, 0.025)


def test_a_request_that_never_left_the_queue_waited_until_its_end(caplog: pytest.LogCaptureFixture) -> None:
    _, fields = line(caplog, outcome=Outcome.EXPIRED, timelines=[a_timeline(admitted=None, first_token=None)])
    assert (fields["queue_seconds"], fields["first_token_seconds"]) == (0.076, None)


def test_a_refusal_has_its_code_and_not_what_it_quotes(caplog: pytest.LogCaptureFixture) -> None:
    _, fields = line(caplog, outcome=Outcome.REFUSED, error=RateLimited("limit rpm of acme"), status=429, timelines=[])
    assert (fields["code"], fields["status"], fields["prompt_tokens"]) == ("rate_limit_exceeded", 429, 0)
    _, fields = line(caplog, outcome=Outcome.INVALID, error=BadRequest("not a role: 'a secret'"), status=400)
    assert fields["code"] == "invalid_request_error"
    assert "secret" not in str(fields)


def test_a_400_names_the_field_and_says_what_the_client_was_told(caplog: pytest.LogCaptureFixture) -> None:
    error = BadRequest("messages[2].content must be a string, got 'a secret'.", "messages[2].content")
    _, fields = line(caplog, outcome=Outcome.INVALID, error=error, status=400)
    assert (fields["param"], fields["error"]) == ("messages[2].content", "messages[2].content must be a string.")
    _, fields = line(caplog)
    assert (fields["param"], fields["error"]) == (None, None)


def test_a_request_that_generates_nothing_logs_no_tokens(caplog: pytest.LogCaptureFixture) -> None:
    _, fields = line(caplog, operation=None, path="/v1/models", method="GET")
    assert "prompt_tokens" not in fields and "queue_seconds" not in fields


def test_a_failure_is_a_warning_and_a_probe_is_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    assert line(caplog, outcome=Outcome.FAILED)[0] == logging.WARNING
    assert line(caplog, outcome=Outcome.COMPLETED, tenant=None, operation=None, path="/livez")[0] == logging.DEBUG
    assert line(caplog, outcome=Outcome.INVALID, tenant=None, operation=None)[0] == logging.INFO


def test_long_names_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    _, fields = line(caplog, path="/" + "x" * 9000, model="y" * 9000)
    assert len(fields["path"]) == len(fields["model"]) == 200


async def test_no_line_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.telemetry.logs.request_log")
    telemetry = Telemetry(lambda: 100.1)
    async with log_requests(telemetry, BLOCK_BYTES):
        for number in range(3):
            telemetry.ended(a_record(request_id=f"req_{number}"), Outcome.COMPLETED)
    assert [vars(line)["fields"]["request_id"] for line in caplog.records] == ["req_0", "req_1", "req_2"]
