"""Reads the constraint on an answer's text: OpenAI's `response_format`, and vLLM's `structured_outputs`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Required

import orjson
from pydantic import BeforeValidator, Field, with_config
from typing_extensions import TypedDict  # as in `bodies`

from backend.grammar import Grammar, GrammarKind
from gateway.errors import BadRequest
from gateway.grammar_errors import InvalidGrammar
from gateway.http.json_body import EXACT, json_object, shown
from gateway.openai.foreign_fields import known_object
from gateway.openai.json_schema import enforce, says_kind
from quotas.policy.policy import MAX_SCHEMA_BYTES

MAX_CHOICES = 4_096

ANY_OBJECT = '{"type":"object"}'

_Text = Annotated[str, Field(min_length=1)]


@with_config(EXACT)
class JsonSchemaFormat(TypedDict, total=False):
    """A schema in OpenAI's form; without `strict` its enforceable part is enforced."""

    name: Required[Annotated[str, Field(min_length=1, max_length=64)]]
    description: str | None
    schema: Any
    strict: bool | None


@with_config(EXACT)
class AnswerFormat(TypedDict, total=False):
    """The constraint on a response's text."""

    type: Required[Literal["text", "json_object", "json_schema"]]
    name: str | None
    description: str | None
    schema: Any
    strict: bool | None


@with_config(EXACT)
class ResponseFormat(AnswerFormat, total=False):
    """A chat's, or a response's, as llama.cpp's clients and others send it."""

    json_schema: JsonSchemaFormat | None


def text_format(place: str) -> BeforeValidator:
    """The validator that unpacks a chat's `json_schema` before the fields are checked."""
    return known_object(AnswerFormat, f"{place}.", refused={"json_schema": f"{place}.schema"})


@with_config(EXACT)
class StructuredOutputs(TypedDict, total=False):
    """vLLM's constraints, of which one is set; `disable_any_whitespace` refines JSON."""

    json: Any
    regex: _Text | None
    choice: Annotated[list[_Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None
    grammar: _Text | None
    json_object: bool | None
    disable_any_whitespace: bool | None


_NOT_SUPPORTED: Mapping[str, Sequence[Any]] = {
    "disable_additional_properties": [False], "whitespace_pattern": (),
    "structural_tag": (), "disable_fallback": [True, False],
}  # fmt: skip
StructuredOutputsField = Annotated[StructuredOutputs, json_object(_NOT_SUPPORTED)]


class AskedGrammar(NamedTuple):
    """The constraint on an answer, and its field."""

    grammar: Grammar
    field: str  # of the request, that holds it
    left_out: Sequence[str] = ()  # places of its parts that are not enforced


def read_grammar(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, most_bytes: int = MAX_SCHEMA_BYTES
) -> AskedGrammar | None:
    """The grammar of an answer; None if any text may follow.

    Raises `BadRequest`, as `InvalidGrammar` with a JSON pointer for the parts of a strict schema that cannot be
    enforced.
    """
    asked = _of_format(response_format, most_bytes) if response_format is not None else None
    if structured is None:
        return asked
    if asked is not None:
        raise BadRequest("Send either response_format or structured_outputs.", "structured_outputs")
    return _of_structured(structured, most_bytes)


def _of_format(asked: ResponseFormat, most_bytes: int) -> AskedGrammar | None:
    given, field = asked.get("json_schema"), "response_format.json_schema"
    if given is None:
        if asked["type"] == "json_schema" and asked.get("schema") is None:
            raise BadRequest(f'{field} is required when response_format.type is "json_schema".', field)
        return read_text_format(asked, "response_format", most_bytes)
    if asked["type"] != "json_schema":
        raise BadRequest(f'{field} is only allowed when response_format.type is "json_schema".', field)
    if asked.get("schema") is not None:
        raise BadRequest("response_format.schema cannot be combined with json_schema.", "response_format.schema")
    return _of_schema(given.get("schema"), f"{field}.schema", most_bytes, is_strict=given.get("strict") is True)


def read_text_format(asked: AnswerFormat | None, field: str, most_bytes: int = MAX_SCHEMA_BYTES) -> AskedGrammar | None:
    """The grammar of an answer's text; None if it may be any. `field` of the request holds the format. Raises as
    `read_grammar`.
    """
    if asked is None:
        return None
    schema = asked.get("schema")
    if asked["type"] == "text":
        if schema is not None:
            raise BadRequest(f'{field}.schema cannot be combined with the type "text".', f"{field}.schema")
        return None
    if asked["type"] == "json_object":
        if schema is None:
            return AskedGrammar(Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT), field)
        schema = {} if schema is True else schema
        if isinstance(schema, dict) and not says_kind(schema):
            schema = {"type": "object"} | schema
    return _of_schema(schema, f"{field}.schema", most_bytes, is_strict=asked.get("strict") is True)


def _of_structured(structured: StructuredOutputs, most_bytes: int) -> AskedGrammar:
    asked = {name: value for name, value in structured.items() if value is not None and value is not False}
    is_line = bool(asked.pop("disable_any_whitespace", False))
    if len(asked) != 1:
        expected = "json, regex, choice, grammar and json_object"
        raise BadRequest(f"structured_outputs must hold one of {expected}, got {len(asked)}.", "structured_outputs")
    ((name, value),) = asked.items()
    field = f"structured_outputs.{name}"
    if is_line and name not in ("json", "json_object"):
        raise BadRequest(
            f"structured_outputs.disable_any_whitespace is about JSON; leave it out with {name}.",
            "structured_outputs.disable_any_whitespace",
        )
    kind = GrammarKind.JSON_LINE if is_line else GrammarKind.JSON_SCHEMA
    match name:
        case "json":
            return _of_schema(_parsed(value, field, most_bytes), field, most_bytes, kind)
        case "regex":
            return _bounded(GrammarKind.REGEX, str(value), field, most_bytes)
        case "choice":
            return _bounded(GrammarKind.CHOICE, orjson.dumps(value).decode(), field, most_bytes)
        case "grammar":
            return _of_lark(str(value), field, most_bytes)
    return AskedGrammar(Grammar(kind, ANY_OBJECT), field)


def _parsed(value: Any, field: str, most_bytes: int) -> Any:
    """The schema, also if it was sent as text."""
    if not isinstance(value, str):
        return value
    if len(value) > most_bytes:
        raise _too_long(field, len(value), most_bytes)
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise InvalidGrammar(f"{field} must be a JSON schema, got a string that is not JSON: {error}.", field) from None


def _of_schema(
    schema: Any, field: str, most_bytes: int, kind: GrammarKind = GrammarKind.JSON_SCHEMA, is_strict: bool = False
) -> AskedGrammar:
    if schema is None:
        schema = {}
    if not isinstance(schema, dict | bool):
        raise BadRequest(f"{field} must be a JSON schema, an object, got {shown(schema)}.", field)
    try:
        size = len(orjson.dumps(schema))
    except TypeError:  # it is nested too deeply for the library
        raise InvalidGrammar(f"{field} is nested too deeply.", field) from None
    if size > most_bytes:
        raise _too_long(field, size, most_bytes)
    left_out = enforce(schema, field, is_strict)
    return AskedGrammar(Grammar(kind, orjson.dumps(schema).decode()), field, left_out)


def _of_lark(source: str, field: str, most_bytes: int) -> AskedGrammar:
    if "::=" in source:
        raise InvalidGrammar(f"{field} must be in Lark's notation (rule: ...), and not in EBNF with ::=.", field)
    return _bounded(GrammarKind.LARK, source, field, most_bytes)


def _bounded(kind: GrammarKind, source: str, field: str, most_bytes: int) -> AskedGrammar:
    size = len(source.encode("utf-8", "replace"))
    if size > most_bytes:
        raise _too_long(field, size, most_bytes)
    return AskedGrammar(Grammar(kind, source), field)


def _too_long(field: str, size: int, most_bytes: int) -> InvalidGrammar:
    bounds = f"{size:,} bytes; at most {most_bytes:,} are compiled here"
    return InvalidGrammar(f"{field} has {bounds}. Make it smaller.", field)
