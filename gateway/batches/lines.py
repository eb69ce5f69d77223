"""The lines of a batch's input: one request each, checked before any of them runs."""

import time
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import orjson

from gateway.errors import ApiError
from gateway.http.json_body import JsonBody, check_nesting, shown

Json = dict[str, Any]
T = TypeVar("T")

SLICE_SECONDS, PAUSE_SECONDS = 0.002, 0.008  # of work on the lines of a file, and between them
MAX_PROBLEMS = 50  # told of one batch
MAX_CUSTOM_ID_CHARS = 256
_FIELDS = frozenset({"custom_id", "method", "url", "body"})


class Line(NamedTuple):
    number: int  # from 0, blank lines not counted
    custom_id: str
    model: str | None
    body: bytes  # of the request, JSON


class LineProblem(Exception):
    """A line that cannot run: what is wrong with which of its fields."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


class Checked(NamedTuple):
    total: int
    model: str | None
    problems: list[Json]  # as a batch's `errors` has them


def split_lines(chunks: Iterable[bytes], most: int) -> Iterator[bytes | None]:
    """Yield each line that is not blank; None for one of more than `most` bytes."""
    rest, is_long = b"", False
    for chunk in chunks:
        *ends, tail = chunk.split(b"\n")
        for end in ends:
            line, rest = rest + end, b""
            if is_long or len(line) > most:
                yield None
            elif line.strip():
                yield line
            is_long = False
        rest += tail
        if len(rest) > most:
            rest, is_long = b"", True
    if is_long or rest.strip():
        yield None if is_long else rest


def paced(lines: Iterable[T]) -> Iterator[T]:
    """Yield lines to a thread for a fifth of its time: all the while, the event loop waits for the interpreter."""
    began = time.monotonic()
    for line in lines:
        yield line
        if time.monotonic() - began >= SLICE_SECONDS:
            time.sleep(PAUSE_SECONDS)
            began = time.monotonic()


def read_line(raw: bytes | None, number: int, endpoint: str, most: int) -> Line:
    """Read a line of a batch. Raises `LineProblem`."""
    if raw is None:
        raise LineProblem("line_too_long", f"The line has more than {most} bytes: shorten its request.")
    try:
        value = JsonBody.of(raw if number else raw.removeprefix(BOM_UTF8)).loads()
    except ApiError as error:
        raise LineProblem("invalid_json_line", error.message.replace("The body", "The line")) from None
    if not isinstance(value, dict):
        raise LineProblem("invalid_json_line", f"The line must be a JSON object, got {shown(value)}.")
    _check_fields(value, endpoint)
    body = value["body"]
    try:
        check_nesting(body, param="body")
    except ApiError as error:
        raise LineProblem("invalid_request", error.message, "body") from None
    model = body.get("model")
    return Line(number, value["custom_id"], model if isinstance(model, str) else None, orjson.dumps(body))


def _check_fields(value: Json, endpoint: str) -> None:
    for name in sorted(value.keys() - _FIELDS)[:1]:
        told = f"{name[:80]} is not a field: a line has custom_id, method, url and body."
        raise LineProblem("unknown_field", told, name[:80])
    custom_id, method, url, body = (value.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        told = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters, got {shown(custom_id)}."
        raise LineProblem("invalid_custom_id", told, "custom_id")
    if method != "POST":
        raise LineProblem("invalid_method", f"method must be 'POST', got {shown(method)}.", "method")
    if url != endpoint:
        told = f"url must be {endpoint!r}, the endpoint of the batch, got {shown(url)}."
        raise LineProblem("mismatched_endpoint", told, "url")
    if not isinstance(body, dict):
        raise LineProblem("invalid_request", f"body must be a JSON object, got {shown(body)}.", "body")
    for name, told in (("stream", "not streamed"), ("background", "in a file")):
        if body.get(name):
            raise LineProblem("invalid_request", f"The answer to a line is {told}: leave out {name}.", f"body.{name}")


def check_lines(
    lines: Iterable[bytes | None], endpoint: str, *, most_lines: int, most_bytes: int, models: frozenset[str]
) -> Checked:
    """Check every line, as far as `MAX_PROBLEMS`; None is a line of more than `most_bytes`. `models` may be asked of
    this endpoint by the tenant.
    """
    seen: dict[bytes, int] = {}
    found: list[Json] = []
    total, model = 0, None
    for number, raw in enumerate(lines):
        total += 1
        if total > most_lines or len(found) >= MAX_PROBLEMS:
            break
        try:
            line = read_line(raw, number, endpoint, most_bytes)
            first = seen.setdefault(line.custom_id.encode("utf-8", "surrogatepass"), number)
            if first != number:
                told = f"custom_id {line.custom_id[:80]!r} is that of line {first + 1} already: each is used once."
                raise LineProblem("duplicate_custom_id", told, "custom_id")
            if line.model not in models:
                told = f"body.model must be one of {sorted(models)}, got {shown(line.model)}."
                raise LineProblem("model_not_found", told, "body.model")
            model = model or line.model
        except LineProblem as problem:
            found.append(problem_object(problem.code, problem.message, number + 1, problem.param))
    if total > most_lines:
        told = f"The file has more than {most_lines} lines, your tenant's limit batches.lines: send several batches."
        found.append(problem_object("too_many_lines", told, most_lines + 1))
    if not total:
        found.append(problem_object("empty_file", "The file has no line: send one request a line."))
    return Checked(total, model, found)


def problem_object(code: str, message: str, line: int | None = None, param: str | None = None) -> Json:
    return {"code": code, "message": message, "line": line, "param": param}
