"""Reads JSON bodies as exact types. Their structure is bounded while they arrive, so that no body can stop the loop.

Parsing costs by the element, not by the byte: 4 MiB of text take some milliseconds, 4 MiB of `{}` a hundred, with the
interpreter lock held all the while. So commas, colons and opening brackets outside of strings are counted block by
block, and a body that has too many is refused in the block that has them. Token ids count apart: a list of them is
cheap, and as long as a context. What does not fit its model is told in one sentence.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Generic, TypeVar, get_args

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import ErrorType

from gateway.errors import BadRequest, RequestTooLarge

BLOCK_BYTES = 65_536  # scanned at once, in well under a millisecond
MAX_ELEMENTS = 16_384
MIN_TOKEN_IDS = 131_072  # in a body, even with a shorter context: 5 ms of parsing
MAX_FIELDS = 96  # in one JSON object; each unknown field is an error to describe
MAX_LEVELS = 100  # of nested arrays and objects in values that are written again
NAMELESS = '""'  # stands for a field whose name is empty
_CONTAINERS = frozenset((dict, list))
_DIGITS_AND_SPACE = b"0123456789 \t\r\n"
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b",:[{")


class JsonScanner:
    """Scans a body that is fed to it in blocks, in order."""

    def __init__(self, max_model_len: int) -> None:
        self._max_ids = max(MIN_TOKEN_IDS, max_model_len)
        self._blocks: list[bytes] = []
        self._elements = self._ids = self._quotes = 0
        self._in_string = self._escaped = False

    def feed(self, block: bytes) -> None:
        """Scan the next `BLOCK_BYTES` or fewer. Raises `RequestTooLarge`, with the limit and the remedy."""
        self._blocks.append(block)
        masked = self._without_escapes(block)
        self._quotes += masked.count(b'"')
        if self._quotes > 2 * (MAX_ELEMENTS + 1):  # each string follows a comma, a colon or a bracket, or is the body
            raise _too_many_elements()
        parts = masked.split(b'"')
        outside = b'"'.join(parts[self._in_string :: 2])
        self._in_string ^= not len(parts) % 2
        marks = outside.translate(None, _DIGITS_AND_SPACE)
        ids = 2 * marks.count(b",,")  # commas between integers
        self._ids += ids
        self._elements += len(marks.translate(None, _NO_MARKS)) - ids
        if self._elements > MAX_ELEMENTS:
            raise _too_many_elements()
        if self._ids > self._max_ids:
            raise RequestTooLarge(
                f"The request body holds more than {self._max_ids} token ids, this server's limit: send fewer or "
                "shorter prompts in one request."
            )

    def body(self) -> "JsonBody":
        """The fed blocks as a body to parse."""
        return JsonBody(b"".join(self._blocks))

    def _without_escapes(self, block: bytes) -> bytes:
        """The block without escaped quotes: each remaining quote begins or ends a string."""
        if not self._escaped and b"\\" not in block:
            return block
        masked = b"_" + block[1:] if self._escaped else block
        masked = masked.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        self._escaped = masked.endswith(b"\\")
        return masked


class JsonBody:
    """A body to parse, scanned unless it has fewer bytes than `MAX_ELEMENTS`; `len` is its size in bytes."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    @staticmethod
    def of(raw: bytes) -> "JsonBody":
        """Scan a body that is there as a whole. Raises `RequestTooLarge`."""
        scanner = JsonScanner(0)
        for start in range(0, len(raw), BLOCK_BYTES):
            scanner.feed(raw[start : start + BLOCK_BYTES])
        return JsonBody(raw)

    def __len__(self) -> int:
        return len(self.raw)

    def loads(self) -> Any:
        """Parse the body and return its value. Raises `BadRequest` if it is not JSON."""
        try:
            return orjson.loads(self.raw)
        except orjson.JSONDecodeError as exc:
            raise BadRequest(f"The body is not valid JSON: {exc.msg} at line {exc.lineno} column {exc.colno}.") from exc


def _too_many_elements() -> RequestTooLarge:
    return RequestTooLarge(
        f"The request body has more than {MAX_ELEMENTS} elements, this server's limit (commas, colons and "
        "opening brackets outside of strings, token ids apart): send fewer messages, content parts or fields."
    )


EXACT = ConfigDict(extra="forbid", strict=True)
"""Known fields and no others, of exactly their types: no "1" for 1, no true for 1, no 1.0 for 1."""


def json_object(neutral: Mapping[str, Sequence[Any]] | None = None) -> BeforeValidator:
    """The validator of an object before its fields are checked.

    It bounds their number, and removes those in `neutral`, which the server ignores, if their value changes nothing,
    such as null.
    """
    named = neutral or {}
    names = frozenset(named)

    def check(value: Any) -> Any:
        if isinstance(value, dict):
            if len(value) > MAX_FIELDS:
                raise PydanticCustomError("too_many_fields", "must hold at most {limit} fields", {"limit": MAX_FIELDS})
            if not names.isdisjoint(value):
                return {name: item for name, item in value.items() if not _is_neutral(named, name, item)}
        return value

    return BeforeValidator(check)


def _is_neutral(known: Mapping[str, Sequence[Any]], name: str, value: Any) -> bool:
    """True if a known field has a neutral value. Raises if the value would have an effect."""
    if name not in known:
        return False
    neutral = known[name]
    if value is None or any(type(value) is type(one) and value == one for one in neutral):
        return True
    allowed = " or ".join(["null", *(orjson.dumps(one).decode() for one in neutral)])
    raise PydanticCustomError(
        "unsupported",
        "is not supported here; leave it out or send {allowed}",
        {"allowed": allowed, "field": name},
    )


class Wire(BaseModel):
    """A JSON object of the operators' API, with the defaults of its fields."""

    model_config = ConfigDict(**EXACT, frozen=True)


T = TypeVar("T")
WireT = TypeVar("WireT", bound=Wire)


class BodyType(Generic[T]):
    """A type that bodies are read as. A `TypedDict` costs a third of a model: it holds no defaults."""

    def __init__(self, form: Any, check: BeforeValidator | None = None) -> None:
        """`form` is the type of a JSON object; `check` runs first, by default on the number of its fields."""
        check = check or json_object()
        self._validate: Callable[..., T] = TypeAdapter(Annotated[form, check]).validator.validate_python

    def read(self, raw: JsonBody, context: object = None) -> T:
        """The body as this type. Raises `BadRequest` if it is not JSON, no object, or has other fields or types.
        `context` is passed to the checks of its fields.
        """
        body = raw.loads()
        if not isinstance(body, dict):
            raise BadRequest(f"The body must be a JSON object, got {shown(body)}.")
        return self.checked(body, context)

    def checked(self, value: Any, context: object = None, place: tuple[int | str, ...] = ()) -> T:
        """The object at this `place` of a body, as this type. Raises `BadRequest`."""
        try:
            return self._validate(value, context=context)
        except ValidationError as exc:
            raise _bad_request(exc.errors(include_url=False)[0], place) from exc


def check_nesting(value: Any, level: int = 0, *, param: str, error: type[BadRequest] = BadRequest) -> None:
    """Raises an error about `param` for an array or an object which lies at this level and has others below
    `MAX_LEVELS`.
    """
    layer = [value]
    while layer:
        if level > MAX_LEVELS:
            raise error(f"{param} is nested in more than {MAX_LEVELS} levels, this server's limit: flatten it.", param)
        layer = [
            item
            for holder in layer
            for item in (holder.values() if type(holder) is dict else holder)
            if type(item) in _CONTAINERS
        ]
        level += 1


@cache
def _body_type(model: type[WireT]) -> BodyType[WireT]:
    return BodyType(model)


def parse_body(model: type[WireT], raw: JsonBody) -> WireT:
    """Returns the body as `model`, as `BodyType.read` does."""
    body_type: BodyType[WireT] = _body_type(model)
    return body_type.read(raw)


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


def _bad_request(error: ErrorDetails, place: tuple[int | str, ...] = ()) -> BadRequest:
    field = error["ctx"]["field"] if error["type"] == "unsupported" else ()
    param = _param((*place, *error["loc"], *(field if isinstance(field, tuple) else (field,))))
    refusal = BadRequest(_sentence(error, param or "The body"), param or None)
    if error["type"] in _EXPECTED:
        refusal.rule = f"{_rule(error, param or 'The body')}."
    return refusal


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
    "less_than_equal": "at most {le}",
    "too_long": "at most {max_length} items long",
    "too_short": "at least {min_length} item long",
    "string_too_long": "at most {max_length} characters long",
    "string_too_short": "at least {min_length} character long",
    "string_pattern_mismatch": "a string of the pattern {pattern}",
}
_KINDS = frozenset(get_args(ErrorType))  # pydantic's own errors


def _sentence(error: ErrorDetails, param: str) -> str:
    kind = error["type"]
    if kind in _EXPECTED:
        return f"{_rule(error, param)}, got {shown(error['input'])}."
    if kind == "missing":
        return f"{param} is required."
    if kind == "extra_forbidden":
        return f"{param} is not a field that this server knows."
    if kind in _KINDS:
        return f"{param} has a value that this server does not support, got {shown(error['input'])}."
    return f"{param} {error['msg']}."  # our own validators' message


def _rule(error: ErrorDetails, param: str) -> str:
    return f"{param} must be {_EXPECTED[error['type']].format(**error.get('ctx', {}))}"
