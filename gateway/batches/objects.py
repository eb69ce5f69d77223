"""Files and batches as OpenAI's API has them on the wire, and as the store keeps them."""

import re
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from os import urandom
from typing import Annotated, Any, Literal, Required

import orjson
from pydantic import Field, with_config
from typing_extensions import TypedDict  # as in `bodies`

from gateway.errors import BadRequest
from gateway.http.json_body import EXACT, BodyType
from gateway.openai.response_request import Metadata
from gateway.tenants.sealer import Sealer

Json = dict[str, Any]
Fields = dict[str, str]  # of a batch, as the store has them

MAX_LISTED = 100  # files or batches of a page

MAX_WINDOW_S = 7 * 86400
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86400  # that a client may ask for, as OpenAI's API has them
FILE_ID, BATCH_ID = re.compile(r"file-[0-9a-f]{32}"), re.compile(r"batch_[0-9a-f]{32}")
TIMES = ("created", "in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_WINDOW = re.compile(r"([1-9][0-9]{0,5})(s|min|h|d)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


@with_config(EXACT)
class ExpiresAfter(TypedDict):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


@with_config(EXACT)
class FileForm(TypedDict, total=False):
    """The fields of a form, which are read as they come."""

    file: Required[bytes]
    purpose: Required[Literal["batch"]]
    expires_after: ExpiresAfter | None


@with_config(EXACT)
class BatchBody(TypedDict, total=False):
    input_file_id: Required[str]
    endpoint: Required[Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]]
    completion_window: Required[str]
    metadata: Metadata | None
    output_expires_after: ExpiresAfter | None


BATCH = BodyType[BatchBody](BatchBody)


def new_id(kind: str) -> str:
    return f"{kind}{urandom(16).hex()}"


def window_seconds(text: str) -> int:
    """The seconds of a completion window. Raises `BadRequest`."""
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise BadRequest(
            f"completion_window must be a time such as 24h, 90min or 7d, at most 7d, got {text[:40]!r}.",
            "completion_window",
        )
    return seconds


def sealed_record(sealer: Sealer, tenant: str, name: str, record: Json) -> str:
    """A record as the store keeps it."""
    return b64encode(sealer.seal(tenant, name, orjson.dumps(record))).decode()


def opened_record(sealer: Sealer, tenant: str, name: str, sealed: str) -> Json | None:
    """The record; None if the secret that it was sealed under has been removed, or it is damaged."""
    try:
        contents = sealer.open(tenant, name, b64decode(sealed))
    except ValueError:
        return None
    opened: Json | None = None if contents is None else orjson.loads(contents)
    return opened


def file_object(name: str, size: int, filename: str, purpose: str, expires: float) -> Json:
    return {
        "id": name,
        "object": "file",
        "bytes": size,
        "created_at": int(time.time()),
        "expires_at": int(expires),
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(sealer: Sealer, tenant: str, name: str, fields: Mapping[str, str]) -> Json:
    """A batch as clients see it, from the fields in the store. Raises `KeyError` and `ValueError` for damaged ones."""
    asked = opened_record(sealer, tenant, name, fields["record"]) or {}
    problems = opened_record(sealer, tenant, name, fields["errors"]) if "errors" in fields else None
    count = {what: int(fields.get(what, 0)) for what in ("total", "completed", "failed")}
    tokens = {what: int(fields.get(f"{what}_tokens", 0)) for what in ("input", "output", "cached", "reasoning")}
    told: Json = {
        "id": name,
        "object": "batch",
        "endpoint": asked.get("endpoint"),
        "model": fields.get("model"),
        "errors": problems,
        "input_file_id": asked.get("input_file_id"),
        "completion_window": asked.get("completion_window"),
        "status": fields["status"],
        "output_file_id": fields.get("output_file_id"),
        "error_file_id": fields.get("error_file_id"),
        **{f"{when}_at": int(fields[f"{when}_at"]) if f"{when}_at" in fields else None for when in TIMES},
        "request_counts": count,
        "usage": {
            "input_tokens": tokens["input"],
            "input_tokens_details": {"cached_tokens": tokens["cached"]},
            "output_tokens": tokens["output"],
            "output_tokens_details": {"reasoning_tokens": tokens["reasoning"]},
            "total_tokens": tokens["input"] + tokens["output"],
        },
        "metadata": asked.get("metadata"),
    }
    if fields["status"] == "in_progress":
        told["expected_completed_at"] = _expected_end(fields, count)
    return told


def _expected_end(fields: Mapping[str, str], count: Mapping[str, int]) -> int | None:
    """The Unix time at which the batch ends at its mean pace so far: the time that others leave it is not known."""
    done, now, began = count["completed"] + count["failed"], time.time(), int(fields["in_progress_at"])
    return int(now + (now - began) * (count["total"] - done) / done) if done else None
