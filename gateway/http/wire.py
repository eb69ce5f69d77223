"""Reads JSON bodies into strict models, and writes the sentence that a client is sent if one does not fit."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from gateway.errors import BadRequest
from gateway.http.json_body import JsonBody

NAMELESS = '""'  # stands for a field whose name is empty
MAX_FIELDS = 64  # in one JSON object; a body can hold 400,000, each of them an error to describe


class Wire(BaseModel):
    """A JSON object with known fields and no others. Types are exact: no "1" for 1, no true for 1, no 1.0 for 1.

    `neutral` names fields that the server does not act on, with the values besides null that change nothing. They are
    checked apart, because a model pays with every body for each field that it declares.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, value: Any) -> Any:
        if isinstance(value, dict):
            if len(value) > MAX_FIELDS:
                raise PydanticCustomError("too_many_fields", "must hold at most {limit} fields", {"limit": MAX_FIELDS})
            if not cls.neutral.keys().isdisjoint(value):
                return {name: item for name, item in value.items() if not cls._is_neutral(name, item)}
        return value

    @classmethod
    def _is_neutral(cls, name: str, value: Any) -> bool:
        """Returns whether a field has no effect. Raises if it would have one that this server does not support."""
        if name not in cls.neutral:
            return False
        neutral = cls.neutral[name]
        if value is None or any(type(value) is type(known) and value == known for known in neutral):
            return True
        allowed = " or ".join(["null", *(orjson.dumps(known).decode() for known in neutral)])
        raise PydanticCustomError(
            "unsupported",
            "is not supported here; leave it out or send {allowed}",
            {"allowed": allowed, "field": name},
        )


WireT = TypeVar("WireT", bound=Wire)


def read(model: type[WireT], raw: JsonBody) -> WireT:
    """Returns the body as `model`. Raises `BadRequest` if it is not JSON, no object, or has other fields or types."""
    body = raw.loads()
    if not isinstance(body, dict):
        raise BadRequest(f"The body must be a JSON object, got {shown(body)}.")
    try:
        return model.model_validate(body)
    except ValidationError as exc:
        raise _bad_request(exc.errors(include_url=False)[0]) from exc


def shown(value: Any) -> str:
    """Returns a short form of any JSON value for a message."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case list():
            return f"an array of {len(value)}"
        case dict():
            return "an object"
        case str() if len(value) > 40:
            return f"a string of {len(value)} characters"
    return repr(value)


def _bad_request(error: ErrorDetails) -> BadRequest:
    field = (error["ctx"]["field"],) if error["type"] == "unsupported" else ()
    param = _param((*error["loc"], *field))
    return BadRequest(_sentence(error, param or "The body"), param or None)


def _param(loc: tuple[int | str, ...]) -> str:
    """Returns a location such as ("messages", 2, "content") as messages[2].content."""
    names = (f"[{part}]" if isinstance(part, int) else f".{part[:64] or NAMELESS}" for part in loc)
    return "".join(names).removeprefix(".")


_EXPECTED = {
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "none_required": "null",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "too_long": "at most {max_length} items long",
    "too_short": "at least {min_length} item long",
}


def _sentence(error: ErrorDetails, param: str) -> str:
    kind = error["type"]
    if kind in _EXPECTED:
        expected = _EXPECTED[kind].format(**error.get("ctx", {}))
        return f"{param} must be {expected}, got {shown(error['input'])}."
    if kind == "missing":
        return f"{param} is required."
    if kind == "extra_forbidden":
        return f"{param} is not a field that this server knows."
    return f"{param} {error['msg']}."  # the message of one of our own validators
