import json

import pytest

from backend.errors import DeviceError, InvalidRequest
from fleet import errors as fleet_errors
from gateway import errors, grammar_errors
from gateway.errors import ApiError

INVALID, UNAVAILABLE = "invalid_request_error", "service_unavailable_error"
TABLE = [
    # error, status, type, code, retry-after, x-should-retry
    (errors.BadRequest("m", "n"), 400, INVALID, None, None, None),
    (errors.Unsatisfiable("m"), 400, INVALID, "quota_unsatisfiable", None, None),
    (errors.RequestTimedOut("m"), 400, INVALID, "request_timeout", None, None),
    (errors.context_exceeded(5, 4, "prompt"), 400, INVALID, "context_length_exceeded", None, None),
    (errors.InvalidApiKey("m"), 401, INVALID, "invalid_api_key", None, None),
    (errors.Forbidden("m"), 403, INVALID, "insufficient_permissions", None, None),
    (errors.RoleNotAllowed("m"), 403, INVALID, "role_not_allowed", None, None),
    (errors.PolicyChanged("m"), 412, INVALID, "policy_changed", None, None),
    (errors.KeyChanged("m"), 412, INVALID, "key_changed", None, None),
    (errors.PolicyUnavailable("m"), 500, "internal_error", "policy_unavailable", None, None),
    (errors.RequestLogUnavailable("m"), 500, "internal_error", "request_log_unavailable", None, None),
    (errors.ClassNotAllowed("m"), 403, INVALID, "class_not_allowed", None, None),
    (errors.KeySettingsInvalid("m"), 403, INVALID, "key_settings_invalid", None, None),
    (errors.ModelNotFound("m"), 404, INVALID, "model_not_found", None, None),
    (errors.RouteNotFound("m"), 404, INVALID, "unknown_url", None, None),
    (errors.RequestNotFound("m"), 404, INVALID, "request_not_found", None, None),
    (errors.TenantNotFound("m"), 404, INVALID, "tenant_not_found", None, None),
    (errors.KeyNotFound("m"), 404, INVALID, "key_not_found", None, None),
    (errors.AdapterNotFound("m"), 404, INVALID, "adapter_not_found", None, None),
    (errors.TenantNotNamed("m", "tenant"), 400, INVALID, "tenant_not_named", None, None),
    (errors.MethodNotAllowed("m", "POST"), 405, INVALID, "method_not_allowed", None, None),
    (errors.RequestTooLarge("m"), 413, INVALID, "request_too_large", None, None),
    (errors.HeadersTooLarge("m"), 431, INVALID, "headers_too_large", None, None),
    (errors.RateLimited("m", retry_after=7.25), 429, "rate_limit_error", "rate_limit_exceeded", "8", None),
    (errors.ConcurrencyExceeded("m", retry_after=2), 429, "rate_limit_error", "concurrency_exceeded", "2", None),
    (errors.KvQuotaExceeded("m", retry_after=2), 429, "rate_limit_error", "kv_quota_exceeded", "2", None),
    (errors.InsufficientQuota("m"), 429, "insufficient_quota", "insufficient_quota", None, "false"),
    (errors.InternalError("m"), 500, "internal_error", "internal_error", None, None),
    (errors.AuditUnavailable("m"), 500, "internal_error", "audit_unavailable", None, None),
    (errors.ModelFailed(), 500, "internal_error", "model_failed", None, "false"),
    (errors.KeysUnavailable("m"), 500, "internal_error", "keys_unavailable", None, None),
    (errors.Overloaded("m", retry_after=0.4), 503, UNAVAILABLE, "server_is_overloaded", "1", None),
    (errors.DeadlineUnmeetable("m", 900, 3), 503, UNAVAILABLE, "deadline_unmeetable", "3", "false"),
    (errors.DeadlineUnmeetable("m", 9, 3, own_backlog=True), 429, UNAVAILABLE, "deadline_unmeetable", "3", "false"),
    (errors.DeadlineUnmeetable("m", 9, 3, True), 503, UNAVAILABLE, "deadline_unmeetable", "3", None),
    (errors.DeadlineExceeded("m"), 504, "timeout_error", "deadline_exceeded", None, "false"),
    (errors.ResponseNotFound("m"), 404, INVALID, "response_not_found", None, None),
    (errors.ConversationNotFound("m"), 404, INVALID, "conversation_not_found", None, None),
    (errors.StoredFileNotFound("m"), 404, INVALID, "file_not_found", None, None),
    (errors.BatchNotFound("m"), 404, INVALID, "batch_not_found", None, None),
    (errors.ShuttingDown(), 503, UNAVAILABLE, "shutting_down", "1", "true"),
    (errors.Preempted(), 503, UNAVAILABLE, "preempted", "1", "true"),
    (errors.CancelledByAdmin(), 503, UNAVAILABLE, "cancelled", None, "false"),
    (errors.GuardrailUnavailable("m", retry_after=1), 503, UNAVAILABLE, "guardrail_unavailable", "1", None),
    (errors.FilesUnavailable(), 503, UNAVAILABLE, "files_unavailable", "60", None),
    (errors.QuotaUnverifiable("m", retry_after=5), 503, UNAVAILABLE, "quota_unverifiable", "5", None),
    (grammar_errors.NoTokenAllowed(), 400, INVALID, "no_token_allowed", None, None),
    (grammar_errors.GrammarsUnavailable("m", retry_after=1), 503, UNAVAILABLE, "grammars_unavailable", "1", "true"),
    (grammar_errors.GrammarsExceeded("m"), 429, "rate_limit_error", "grammars_exceeded", None, None),
    (fleet_errors.ReplicaNotFound("m"), 404, INVALID, "replica_not_found", None, None),
    (fleet_errors.NoReplica(), 503, UNAVAILABLE, "no_replica", "1", "true"),
    (fleet_errors.ReplicaLost(), 503, UNAVAILABLE, "replica_lost", "1", "true"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code", "retry_after", "should_retry"), TABLE)
def test_every_row_of_the_table(
    error: ApiError, status: int, kind: str, code: str | None, retry_after: str | None, should_retry: str | None
) -> None:
    body = json.loads(error.to_body())["error"]
    assert error.status == status
    assert {"message", "type", "param", "code"} <= body.keys()
    assert (body["type"], body["code"]) == (kind, code)
    assert body["message"]
    assert error.headers().get("retry-after") == retry_after
    assert error.headers().get("x-should-retry") == should_retry
    assert error.status not in {408, 409}


def test_the_table_covers_the_tree() -> None:
    assert {type(row[0]) for row in TABLE} == set(ApiError.__subclasses__())


@pytest.mark.parametrize("error", [row[0] for row in TABLE if row[1] in {429, 503, 504}])
def test_refusals_say_why_in_one_word(error: ApiError) -> None:
    assert error.headers()["x-sluice-dropped-reason"].replace("_", "").isalpha()


@pytest.mark.parametrize(("wait", "seconds", "milliseconds"), [(0.25, "1", "250"), (1e9, "60", "60000"), (0, "1", "1")])
def test_waits_are_capped_where_clients_stop_honouring_them(wait: float, seconds: str, milliseconds: str) -> None:
    headers = errors.RateLimited("m", retry_after=wait).headers()
    assert (headers["retry-after"], headers["retry-after-ms"]) == (seconds, milliseconds)


def test_an_unmeetable_deadline_carries_the_estimate() -> None:
    assert json.loads(errors.DeadlineUnmeetable("m", 1234, 1).to_body())["error"]["estimate_ms"] == 1234


def test_headers_of_single_rows() -> None:
    assert errors.InvalidApiKey("m").headers()["www-authenticate"] == "Bearer"
    assert errors.MethodNotAllowed("m", "GET, HEAD").headers()["allow"] == "GET, HEAD"


def test_a_stream_error_is_one_event_with_a_truthy_error_key() -> None:
    event = errors.Preempted().to_sse()
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "preempted"
    assert b"[DONE]" not in event


def test_refusals_of_the_backend_are_translated() -> None:
    refusal = errors.translate(InvalidRequest("top_p must be above 0", "top_p"))
    assert (refusal.status, refusal.param, refusal.message) == (400, "top_p", "top_p must be above 0.")
    own = errors.ShuttingDown()
    assert errors.translate(own) is own


@pytest.mark.parametrize("failure", [DeviceError("CUDA 0xdead"), KeyError("secret"), RuntimeError("/etc/passwd")])
def test_failures_of_ours_say_nothing_of_the_inside(failure: Exception) -> None:
    error = errors.translate(failure)
    assert error.status == 500
    assert not any(word in error.message for word in ("CUDA", "secret", "passwd"))


def test_an_undecodable_name_is_echoed_harmlessly() -> None:
    assert json.loads(errors.BadRequest("\ud800", "\ud800").to_body())["error"]["param"] == "?"


@pytest.mark.parametrize(
    ("message", "param", "discreet"),
    [
        ("temperature must be a number, got 'my secret'.", "temperature", "temperature must be a number."),
        ("The body is not valid JSON: unexpected my secret.", None, "The body is not valid JSON."),
        ("role 'my secret' is unknown.", "role", "role ... is unknown."),
        ("the template refuses these messages: my secret.", "messages", "the template refuses these messages."),
        ("my secret field is not a field that this server knows.", "my secret field", "The body is not valid."),
        ("frobnicate is not a field that this server knows.", "frobnicate", None),
    ],
)
def test_a_bad_request_is_told_in_logs_without_what_it_quotes(message: str, param: str, discreet: str | None) -> None:
    error = errors.BadRequest(message, param)
    assert error.discreet_message == (discreet or message)
    assert "secret" not in f"{error.discreet_message} {error.discreet_param}"
