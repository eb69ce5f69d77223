"""Every refusal and failure that a client can be sent, with its HTTP status: this is where each 429 is defined.

ApiError
├── BadRequest           400  a malformed, unknown or unsupported field; `param` names it
├── Unsatisfiable        400  can never fit: KV quota, window limit
├── InvalidGrammar       400  of `grammar_errors`, as the two that follow; `grammar_too_complex` is one
├── NoTokenAllowed       400  the answer's grammar lets it go on with none
├── GrammarsExceeded     429  too many of the tenant's wait to be compiled, or are in use
├── GrammarsUnavailable  503  the processes that compile end for reasons of their own
├── ContextLengthExceeded 400  the model's context cannot hold prompt and answer
├── RequestTimedOut      400  its headers or body did not arrive in time
├── GuardrailRefused         400  the guardrail of the tenant refuses the prompt or the answer
├── InvalidApiKey        401
├── Forbidden            403  the key lacks a scope
├── PolicyChanged        412  on the admin port: a policy file is not as the admin has seen it
├── KeyChanged           412  on the admin port: a key is not as the admin has seen it
├── RoleNotAllowed       403  on the admin port: the admin's role does not include this
├── ModelNotFound        404  unknown, or not allowed to this tenant
├── RouteNotFound        404
├── StoredFileNotFound, BatchNotFound  404  not of this tenant, or expired
├── ResponseNotFound     404  not stored for this tenant; 400 where a request names it as the one before
├── ConversationNotFound 404  not of this tenant, or expired
├── RequestNotFound, TenantNotFound, KeyNotFound  404  on the admin port
├── TenantNotNamed       400  on the admin port: a key for it was not confirmed
├── MethodNotAllowed     405
├── RequestTooLarge      413  while reading the body, chunked ones too
├── HeadersTooLarge      431
├── RateLimited          429  the tenant's rate window is spent
│   └── TooManyRefused   429  too many of its requests were refused: more are not read for now
├── ConcurrencyExceeded  429  the tenant's requests in flight
├── KvQuotaExceeded      429  the tenant's KV bytes in use
├── InsufficientQuota    429  the tenant's long-period budget is spent
├── InternalError        500  our fault; the message says nothing of the inside
├── ModelFailed          500  the model computed no numbers for this request
├── AuditUnavailable     500  on the admin port
├── KeysUnavailable      500  on the admin port
├── Overloaded           503  the shared queue is full, or every connection is taken
├── DeadlineUnmeetable   503
├── ShuttingDown         503
├── Preempted            503  before the first byte; an error event after it
├── CancelledByAdmin     503  before the first byte; an error event after it
├── GuardrailUnavailable     503  the guardrail gives no verdict and policy says closed
├── FilesUnavailable     503  the disk has no room for a file
├── QuotaUnverifiable    503  the quota store is unreachable and policy says closed
└── DeadlineExceeded     504  while queued

Limits, the queue and the engine refuse with errors of their own; `gateway.api.refusals.refusal_of` turns those into
these, and `Endpoint.__call__` sends them. 408 and 409 are never used: clients retry them.
"""

import math
import re
from collections.abc import Mapping
from typing import ClassVar

import orjson

from admission.outcome import Outcome
from backend.errors import InvalidRequest
from gateway.key_mask import masked
from gateway.sse import event

_FIELD = re.compile(r"[A-Za-z_]\w{0,39}(\[\d+\]|\.[A-Za-z_]\w{0,39}){0,8}", re.ASCII)
_FOUND = re.compile(r", got |: ")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
MAX_RETRY_AFTER_S = 60.0  # clients ignore longer waits and retry at once


class ApiError(Exception):
    """One row of the table above; `str(error)` is the message for the client.

    `retry_after` is in seconds, already jittered; `details` are further keys of the error object, such as estimate_ms.
    """

    status: int
    type: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = None
    outcome: ClassVar[Outcome] = Outcome.INVALID  # outcome of the request
    dropped_reason: ClassVar[str | None] = None  # one low-cardinality word for refusals under load or by policy
    should_retry: bool | None = None  # None: the client's own rule

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        retry_after: float | None = None,
        details: dict[str, int | float | str] | None = None,
    ) -> None:
        self.message = masked(message)
        super().__init__(self.message)
        self.param = None if param is None else masked(param)
        self.retry_after = None if retry_after is None else min(max(retry_after, 0.001), MAX_RETRY_AFTER_S)
        self.details = details or {}
        self.rate_headers: Mapping[str, str] = {}  # the rest of the checked limits
        self.logged_as: str | None = None  # the refusal's id in the event log, for `sluice explain`

    @property
    def discreet_param(self) -> str | None:
        """The field at fault, for logs; None if the client may have made its name up."""
        return self.param if self.param and _FIELD.fullmatch(self.param) else None

    @property
    def discreet_message(self) -> str:
        """The message for logs, without quotes of the request."""
        return self.message

    def to_body(self) -> bytes:
        """Returns the JSON body. A lone surrogate echoed from a field name or value becomes "?"."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": {key: _encodable(value) for key, value in error.items()} | self.details})

    def to_sse(self) -> bytes:
        """Returns the last event of a stream that fails after its first byte. No [DONE] may follow."""
        return event(self.to_body())

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.dropped_reason:
            headers["x-sluice-dropped-reason"] = self.dropped_reason
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        if self.retry_after is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after))
            headers["retry-after-ms"] = str(math.ceil(self.retry_after * 1000))
        logged = {} if self.logged_as is None else {"x-sluice-logged-as": self.logged_as}
        return {**headers, **self.rate_headers, **logged}


class BadRequest(ApiError):
    status = 400
    rule: str | None = None  # the broken rule, in a sentence without quotes of the request

    @property
    def discreet_message(self) -> str:
        """The broken rule, without the value found."""
        if self.param and not self.discreet_param:
            return "The body is not valid."
        if self.rule is not None:
            return self.rule
        rule = _QUOTED.sub("...", _FOUND.split(self.message, 1)[0]).removesuffix(".")
        return f"{rule}."


class GuardrailRefused(BadRequest):
    """Its `rule` leaves out the guardrail's reason, which may quote what it refuses."""

    code = "content_filter"
    dropped_reason = "guardrail"


class Unsatisfiable(ApiError):
    status = 400
    code = "quota_unsatisfiable"
    dropped_reason = "unsatisfiable"


class ContextLengthExceeded(ApiError):
    status = 400
    code = "context_length_exceeded"
    dropped_reason = "unsatisfiable"


class InvalidApiKey(ApiError):
    status = 401
    code = "invalid_api_key"

    @classmethod
    def missing(cls) -> "InvalidApiKey":
        """Returns the refusal of a request without a key."""
        return cls("You didn't provide an API key: send it in a header, Authorization: Bearer YOUR_KEY.")

    def headers(self) -> dict[str, str]:
        return super().headers() | {"www-authenticate": "Bearer"}


class Forbidden(ApiError):
    status = 403
    code = "insufficient_permissions"


class ClassNotAllowed(ApiError):
    status = 403
    code = "class_not_allowed"


class KeySettingsInvalid(ApiError):
    status = 403
    code = "key_settings_invalid"


class RoleNotAllowed(ApiError):
    status = 403
    code = "role_not_allowed"


class ModelNotFound(ApiError):
    status = 404
    code = "model_not_found"


class RouteNotFound(ApiError):
    status = 404
    code = "unknown_url"


class ResponseNotFound(ApiError):
    status = 404
    code = "response_not_found"


class ConversationNotFound(ApiError):
    status = 404
    code = "conversation_not_found"


class StoredFileNotFound(ApiError):
    status = 404
    code = "file_not_found"


class BatchNotFound(ApiError):
    status = 404
    code = "batch_not_found"


class PreviousResponseNotFound(BadRequest):
    code = "previous_response_not_found"


class RequestNotFound(ApiError):
    status = 404
    code = "request_not_found"


class PolicyChanged(ApiError):
    """A file of the policy is not as the admin has seen it."""

    status = 412
    code = "policy_changed"


class KeyChanged(ApiError):
    """A key is not as the admin has seen it."""

    status = 412
    code = "key_changed"


class PolicyUnavailable(ApiError):
    """The policy's files cannot be read."""

    status = 500
    type = "internal_error"
    code = "policy_unavailable"
    outcome = Outcome.FAILED


class RequestLogUnavailable(ApiError):
    """The log of ended requests is off, or cannot be read."""

    status = 500
    type = "internal_error"
    code = "request_log_unavailable"
    outcome = Outcome.FAILED


class TenantNotFound(ApiError):
    status = 404
    code = "tenant_not_found"


class KeyNotFound(ApiError):
    status = 404
    code = "key_not_found"


class AdapterNotFound(ApiError):
    status = 404
    code = "adapter_not_found"


class TenantNotNamed(ApiError):
    """A key was requested for a tenant outside the policy: the name may be mistyped, and would then have no limits."""

    status = 400
    code = "tenant_not_named"


class MethodNotAllowed(ApiError):
    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: str) -> None:
        """`allowed` are the methods of this path, as in "GET, HEAD"."""
        super().__init__(message)
        self.allowed = allowed

    def headers(self) -> dict[str, str]:
        return super().headers() | {"allow": self.allowed}


class RequestTooLarge(ApiError):
    status = 413
    code = "request_too_large"


class HeadersTooLarge(ApiError):
    status = 431
    code = "headers_too_large"


class RequestTimedOut(ApiError):
    status = 400
    code = "request_timeout"


class RateLimited(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    outcome = Outcome.REFUSED
    dropped_reason = "rate"


class TooManyRefused(RateLimited):
    dropped_reason = "refused_rate"


class ConcurrencyExceeded(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "concurrency_exceeded"
    outcome = Outcome.REFUSED
    dropped_reason = "concurrency"


class KvQuotaExceeded(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "kv_quota_exceeded"
    outcome = Outcome.REFUSED
    dropped_reason = "kv_quota"


class InsufficientQuota(ApiError):
    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"
    outcome = Outcome.REFUSED
    dropped_reason = "budget"
    should_retry = False


class InternalError(ApiError):
    status = 500
    type = "internal_error"
    code = "internal_error"
    outcome = Outcome.FAILED


class ModelFailed(ApiError):
    """The model's weights, or a type too narrow for them, are at fault; the same request would fail again."""

    status = 500
    type = "internal_error"
    code = "model_failed"
    outcome = Outcome.FAILED
    should_retry = False

    def __init__(self) -> None:
        super().__init__("The model computed no numbers for this request. Its operator finds more in the log.")


class AuditUnavailable(ApiError):
    """The audit log cannot be written, and nothing is changed that cannot be recorded."""

    status = 500
    type = "internal_error"
    code = "audit_unavailable"
    outcome = Outcome.FAILED


class KeysUnavailable(ApiError):
    """The directory of the API keys cannot be written, or is damaged."""

    status = 500
    type = "internal_error"
    code = "keys_unavailable"
    outcome = Outcome.FAILED


class Overloaded(ApiError):
    status = 503
    type = "service_unavailable_error"
    code = "server_is_overloaded"
    outcome = Outcome.REFUSED
    dropped_reason = "queue_full"


class DeadlineUnmeetable(ApiError):
    """The request would have taken `estimate_ms`, longer than its deadline allows. A retry can help only if that
    deadline is relative; the status is 429 if the tenant's own backlog is the cause.
    """

    status = 503
    type = "service_unavailable_error"
    code = "deadline_unmeetable"
    outcome = Outcome.REFUSED
    dropped_reason = "deadline"

    def __init__(
        self,
        message: str,
        estimate_ms: float,
        retry_after: float,
        deadline_is_relative: bool = False,
        own_backlog: bool = False,
    ) -> None:
        super().__init__(message, retry_after=retry_after, details={"estimate_ms": estimate_ms})
        self.status = 429 if own_backlog else 503
        self.should_retry = None if deadline_is_relative else False


class ShuttingDown(ApiError):
    status = 503
    type = "service_unavailable_error"
    code = "shutting_down"
    outcome = Outcome.FAILED
    dropped_reason = "draining"
    should_retry = True

    def __init__(self, message: str = "The server is shutting down. Send the request again.") -> None:
        super().__init__(message, retry_after=1)

    def headers(self) -> dict[str, str]:
        """Headers that make the client reconnect, perhaps to another server, and try again."""
        return super().headers() | {"connection": "close"}


class Preempted(ApiError):
    status = 503
    type = "service_unavailable_error"
    code = "preempted"
    outcome = Outcome.FAILED
    dropped_reason = "preempted"
    should_retry = True

    def __init__(self, message: str = "The request lost its memory to others too often. Send it again.") -> None:
        super().__init__(message, retry_after=1)


class CancelledByAdmin(ApiError):
    status = 503
    type = "service_unavailable_error"
    code = "cancelled"
    outcome = Outcome.FAILED
    dropped_reason = "cancelled"
    should_retry = False

    def __init__(self, message: str = "The request was cancelled by an administrator of this server.") -> None:
        super().__init__(message)


class QuotaUnverifiable(ApiError):
    status = 503
    type = "service_unavailable_error"
    code = "quota_unverifiable"
    outcome = Outcome.REFUSED
    dropped_reason = "quota_store"


class FilesUnavailable(ApiError):
    status = 503
    type = "service_unavailable_error"
    code = "files_unavailable"
    outcome = Outcome.FAILED
    dropped_reason = "disk"

    def __init__(self) -> None:
        told = "The server could not write this file to its disk, and has kept nothing of it. Try again later."
        super().__init__(told, retry_after=MAX_RETRY_AFTER_S)


class GuardrailUnavailable(ApiError):
    status = 503
    type = "service_unavailable_error"
    code = "guardrail_unavailable"
    outcome = Outcome.FAILED
    dropped_reason = "guardrail"


class DeadlineExceeded(ApiError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"
    outcome = Outcome.EXPIRED
    dropped_reason = "deadline"
    should_retry = False


def with_subclasses(kind: type[ApiError]) -> list[type[ApiError]]:
    """A class with all that are derived from it."""
    return [kind, *(found for below in kind.__subclasses__() for found in with_subclasses(below))]


def context_exceeded(num_tokens: int, max_model_len: int, param: str, at_least: bool = False) -> ApiError:
    """Returns the refusal of a prompt that the context cannot hold."""
    count = f"at least {num_tokens}" if at_least else f"{num_tokens}"
    context = f"This model's maximum context length is {max_model_len} tokens, answer included"
    return ContextLengthExceeded(f"{context}, but {param} holds {count} tokens.", param)


def translate(error: Exception) -> ApiError:
    """Returns the error that a client is sent for an exception. An unforeseen one says nothing of itself."""
    match error:
        case ApiError():
            return error
        case InvalidRequest(param=param):
            return BadRequest(f"{error}.", param)
    return InternalError("The server failed to answer this request. It has been logged; a retry may succeed.")


def _encodable(value: str | None) -> str | None:
    return value and value.encode("utf-8", "replace").decode()
