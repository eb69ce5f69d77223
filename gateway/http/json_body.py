"""Reads JSON bodies as exact types: counted as they arrive and parsed in pieces, so that no body can stop the loop.

Parsing costs by the element, not by the byte: 4 MiB of text take a few milliseconds, 4 MiB of `{}` a hundred, with the
interpreter lock held all the while. So commas, colons and opening brackets outside of strings are counted block by
block, and a body that has too many is refused in the block that has them. Token ids count apart: a list of them is
cheap, and as long as a context.

A long piece, a text of megabytes or a run of token ids, is decoded by itself and leaves a marker in its place. What
then remains to be parsed at once, the skeleton, is small. What does not fit its model is told in one sentence.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from os import urandom
from typing import Annotated, Any, Generic, TypeVar, get_args

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import ErrorType

from gateway.errors import BadRequest, RequestTooLarge
from quotas.policy.units import show_size

BLOCK = 65_536  # bytes that are scanned, or decoded, at once: well under a millisecond
MAX_ELEMENTS = 16_384
MIN_IDS = 65_536  # token ids that a body may have, whatever the context
IDS_CONTEXTS = 4  # contexts full of token ids that a body may have, if that is more
MAX_SKELETON = 5 * 2**18  # bytes: 1.25 MiB, or 2,048 messages that are shorter than a piece
PIECE = 512  # bytes from which a string is decoded by itself, in a body that is larger than a skeleton
CROWDED = 2_048  # parts of a block whose strings are too many to look for the long ones among them
RUN = 64  # bytes from which digits, commas and spaces are a run of token ids
MAX_FIELDS = 96  # in one JSON object; each that a model does not know is an error to describe
NAMELESS = '""'  # stands for a field whose name is empty
_RUN = re.compile(rb"(?<![\d,\s])[\d,\s]{%d,}" % RUN)
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]..", re.DOTALL)
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b",:[{")

_Span = tuple[int, int, bool]  # start and end; whether it is text


class JsonScanner:
    """Scans a body that is fed to it in blocks, in order."""

    def __init__(self, max_model_len: int) -> None:
        self._max_ids = max(MIN_IDS, IDS_CONTEXTS * max_model_len)
        self._blocks: list[bytes] = []
        self._size = 0
        self._elements = self._ids = self._quotes = 0
        self._other_bytes = 0  # neither in strings nor in runs
        self._in_string = self._escaped = False
        self._began = 0  # position at which the open string begins
        self._texts: list[_Span] = []  # of `PIECE` bytes and more, without their quotes
        self._runs: list[_Span] = []  # of token ids

    def feed(self, block: bytes) -> None:
        """Scan the next `BLOCK` bytes or fewer. Raises `RequestTooLarge`, with the limit and the remedy."""
        masked = self._without_escapes(block)
        self._quotes += masked.count(b'"')
        if self._quotes > 2 * (MAX_ELEMENTS + 1):  # a string follows a comma, a colon or a bracket, or is the body
            raise _too_many_elements()
        parts = masked.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        ids, run_bytes = self._note(parts)
        self._ids += ids
        self._elements += len(outside.translate(None, _NO_MARKS)) - ids
        self._other_bytes += len(outside) - run_bytes
        self._in_string ^= not len(parts) % 2
        self._size += len(block)
        self._blocks.append(block)
        if self._elements > MAX_ELEMENTS:
            raise _too_many_elements()
        if self._other_bytes > MAX_SKELETON:
            raise _too_large_a_skeleton()
        if self._ids > self._max_ids:
            raise RequestTooLarge(
                f"The request body holds more than {self._max_ids} token ids, the most that this server takes at once: "
                "send fewer or shorter prompts in one request."
            )

    def body(self) -> "JsonBody":
        """Returns all that was fed as a body to parse."""
        is_long = self._size > MAX_SKELETON
        spans = [*(self._runs if is_long or self._ids > MAX_ELEMENTS else ()), *(self._texts if is_long else ())]
        return JsonBody(b"".join(self._blocks), sorted(spans))

    def _without_escapes(self, block: bytes) -> bytes:
        """Returns a block of the same length, in which every quote begins or ends a string."""
        if not self._escaped and b"\\" not in block:
            return block
        masked = b"_" + block[1:] if self._escaped else block
        masked = masked.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        self._escaped = masked.endswith(b"\\")
        return masked

    def _note(self, parts: list[bytes]) -> tuple[int, int]:
        """Note long texts and runs of token ids, and return how many ids the runs hold and how many bytes they have."""
        ids, run_bytes, position, is_text = 0, 0, self._size, self._in_string
        last = len(parts) - 1
        if last and is_text:
            self._note_text(self._began, position + len(parts[0]))
        for index, part in enumerate(parts if last < CROWDED else ()):
            if not is_text and len(part) >= RUN:
                for run in _RUN.finditer(part):
                    if (commas := part.count(b",", run.start(), run.end())) > 1:
                        self._note_run(position + run.start(), position + run.end())
                        ids, run_bytes = ids + commas, run_bytes + run.end() - run.start()
            elif is_text and 0 < index < last:
                self._note_text(position, position + len(part))
            position += len(part) + 1
            is_text = not is_text
        if last:
            self._began = self._size + sum(map(len, parts)) + last - len(parts[-1])
        return ids, run_bytes

    def _note_text(self, start: int, end: int) -> None:
        if end - start >= PIECE:
            self._texts.append((start, end, True))

    def _note_run(self, start: int, end: int) -> None:
        """Note a run; one that continues a run of the block before is joined to it."""
        if self._runs and self._runs[-1][1] == start:
            start = self._runs.pop()[0]
        self._runs.append((start, end, False))


class JsonBody:
    """A body to parse, scanned if it is not small; `len` is its size in bytes."""

    def __init__(self, raw: bytes, spans: Sequence[_Span] = ()) -> None:
        """`spans` are the texts, without their quotes, and the runs of token ids that are decoded by themselves.

        A body of at most `MAX_ELEMENTS` bytes need not be scanned: it has no more elements, and no span.
        """
        self._raw = raw
        self._spans = spans

    @staticmethod
    def of(raw: bytes) -> "JsonBody":
        """Scan a body that is there as a whole. Raises `RequestTooLarge`."""
        scanner = JsonScanner(0)
        for start in range(0, len(raw), BLOCK):
            scanner.feed(raw[start : start + BLOCK])
        return scanner.body()

    def __len__(self) -> int:
        return len(self._raw)

    @property
    def raw(self) -> bytes:
        """The bytes as they came."""
        return self._raw

    def loads(self) -> Any:
        """Parse the body and return its value. No call holds the interpreter lock for more than about 2 ms.

        Raises `BadRequest` if it is not JSON, and `RequestTooLarge` if it cannot be read in pieces.
        """
        pieces: dict[str, str | list[int]] = {}
        skeleton = self._skeleton(pieces) if self._spans else self._raw
        if len(skeleton) > MAX_SKELETON:
            raise _too_large_a_skeleton()
        try:
            value = orjson.loads(skeleton)
        except orjson.JSONDecodeError as exc:
            where = "" if pieces else f" at line {exc.lineno} column {exc.colno}"
            raise BadRequest(f"The body is not valid JSON: {exc.msg}{where}.") from exc
        return _restored(value, pieces) if pieces else value

    def _skeleton(self, pieces: dict[str, str | list[int]]) -> bytes:
        """Returns the body with a marker, which no client can foresee, in place of each piece; `pieces` has both."""
        raw, nonce, kept, position = self._raw, urandom(16).hex(), list[bytes](), 0
        try:
            for start, end, is_text in self._spans:
                first, last = (start, end) if is_text else (raw.find(b",", start, end) + 1, raw.rfind(b",", start, end))
                if not 0 < first < last:
                    continue
                marker = f"{nonce}{first}"
                pieces[marker] = _text(raw, first, last) if is_text else _ids(raw, first, last)
                kept += raw[position:first], marker.encode() if is_text else f'"{marker}"'.encode()
                position = last
        except orjson.JSONDecodeError as exc:
            raise BadRequest(f"The body is not valid JSON: {exc.msg}.") from exc
        return b"".join([*kept, raw[position:]])


def _text(raw: bytes, start: int, end: int) -> str:
    """Decode the inside of a JSON string."""
    texts = []
    while start < end:
        stop = end if end - start <= BLOCK else _boundary(raw, start)
        texts.append(orjson.loads(b'"%b"' % raw[start:stop]))
        start = stop
    return "".join(texts)


def _boundary(raw: bytes, start: int) -> int:
    """Returns a position at most `BLOCK` bytes on that cuts no escape, pair of surrogates or UTF-8 character."""
    position = start + BLOCK
    position -= _is_escaped(raw, start, position)
    for length in range(2, 6):
        escape = position - length
        if raw[escape : escape + 2] == b"\\u" and not _is_escaped(raw, start, escape):
            position = escape
            break
    if raw[position : position + 2] == b"\\u" and _HIGH_SURROGATE.fullmatch(raw, position - 6, position):
        position -= 6
    for _ in range(3):
        position -= raw[position] & 0xC0 == 0x80
    return position


def _is_escaped(raw: bytes, start: int, position: int) -> bool:
    """Returns whether an odd number of backslashes stands before a position; no escape crosses `start`."""
    before = raw[start:position]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1


def _ids(raw: bytes, start: int, end: int) -> list[int]:
    """Decode the integers of a run, which commas separate."""
    ids: list[int] = []
    while start < end:
        comma = raw.find(b",", start + BLOCK, end)
        stop = end if comma < 0 else comma
        numbers = orjson.loads(b"[%b]" % raw[start:stop])
        if not numbers:
            raise orjson.JSONDecodeError("unexpected comma", "", 0)
        ids += numbers
        start = stop + 1
    return ids


def _restored(value: Any, pieces: dict[str, str | list[int]]) -> Any:
    """Returns a value of the skeleton, which is changed, with the pieces in place of their markers, however deep."""
    whole = [value]
    left: list[Any] = [whole]
    while left:
        container = left.pop()
        is_list = type(container) is list
        items = container.copy() if is_list else list(container.values())
        if is_list:
            container[:] = _with_pieces(items, pieces)
        else:
            named = {pieces.get(name, name): _whole(item, pieces) for name, item in container.items()}
            container.clear()
            container.update(named)
        left += [item for item in items if type(item) in (dict, list)]
    return whole[0]


def _whole(item: Any, pieces: dict[str, str | list[int]]) -> Any:
    return pieces.get(item, item) if type(item) is str else item


def _with_pieces(items: list[Any], pieces: dict[str, str | list[int]]) -> list[Any]:
    """Returns the items of a list; those of a run of token ids are its own."""
    restored: list[Any] = []
    for item in items:
        whole = _whole(item, pieces)
        if type(item) is str and type(whole) is list:
            restored += whole
        else:
            restored.append(whole)
    return restored


def _too_many_elements() -> RequestTooLarge:
    return RequestTooLarge(
        f"The request body has more than {MAX_ELEMENTS} elements, the most that this server reads (commas, colons and "
        "opening brackets outside of strings, token ids apart): send fewer messages, content parts or fields."
    )


def _too_large_a_skeleton() -> RequestTooLarge:
    return RequestTooLarge(
        f"The request body holds more than {show_size(MAX_SKELETON)} beside its long texts and token ids: send less in "
        "one request."
    )


EXACT = ConfigDict(extra="forbid", strict=True)
"""Known fields and no others, of exactly their types: no "1" for 1, no true for 1, no 1.0 for 1."""


def json_object(neutral: Mapping[str, Sequence[Any]] | None = None) -> BeforeValidator:
    """Returns the check of an object before its fields are: it has a bounded number of them, and those of `neutral`,
    on which the server does not act, have a value that changes nothing, such as null. They are left out.
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
    """Returns whether a field has no effect. Raises if it would have one that this server does not support."""
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
        """`form` is the type of a JSON object, and `check` what is looked at first; None: the number of its fields."""
        check = check or json_object()
        self._validate: Callable[..., T] = TypeAdapter(Annotated[form, check]).validator.validate_python

    def read(self, raw: JsonBody, context: object = None) -> T:
        """Returns a body. Raises `BadRequest` if it is not JSON, no object, or has other fields or types. `context` is
        what checks of its fields are given.
        """
        body = raw.loads()
        if not isinstance(body, dict):
            raise BadRequest(f"The body must be a JSON object, got {shown(body)}.")
        try:
            return self._validate(body, context=context)
        except ValidationError as exc:
            raise _bad_request(exc.errors(include_url=False)[0]) from exc


@cache
def _body_type(model: type[WireT]) -> BodyType[WireT]:
    return BodyType(model)


def read(model: type[WireT], raw: JsonBody) -> WireT:
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


def _bad_request(error: ErrorDetails) -> BadRequest:
    field = error["ctx"]["field"] if error["type"] == "unsupported" else ()
    param = _param((*error["loc"], *(field if isinstance(field, tuple) else (field,))))
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
_KINDS = frozenset(get_args(ErrorType))  # of pydantic, whose words are not ours


def _sentence(error: ErrorDetails, param: str) -> str:
    kind = error["type"]
    if kind in _EXPECTED:
        return f"{_rule(error, param)}, got {shown(error['input'])}."
    if kind == "missing":
        return f"{param} is required."
    if kind == "extra_forbidden":
        return f"{param} is not a field that this server knows."
    if kind in _KINDS:
        return f"{param} has a value that this server does not take, got {shown(error['input'])}."
    return f"{param} {error['msg']}."  # the message of one of our own validators


def _rule(error: ErrorDetails, param: str) -> str:
    return f"{param} must be {_EXPECTED[error['type']].format(**error.get('ctx', {}))}"
