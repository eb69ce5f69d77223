"""Errors in Anthropic's form, see https://docs.claude.com/en/api/errors."""

from typing import Any

import orjson

from gateway import sse
from gateway.errors import ApiError

OVERLOADED = 529

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_reply(error: ApiError) -> tuple[int, bytes]:
    """Returns the status and the body of an error; 503 is `OVERLOADED` there."""
    return OVERLOADED if error.status == 503 else error.status, orjson.dumps(_told(error))


def error_event(error: ApiError) -> bytes:
    """The last event of a failed stream."""
    return sse.named_event("error", orjson.dumps(_told(error)))


def _told(error: ApiError) -> dict[str, Any]:
    """The body of an error: OpenAI's members, under Anthropic's type."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {**orjson.loads(error.to_body())["error"], "type": kind}}
