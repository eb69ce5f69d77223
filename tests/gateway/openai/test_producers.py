"""Schemas as libraries write them are taken, and what is generated of them is read by the library again.

`producer_schemas.json` has those of zod 4 and 3, msgspec, OpenAPI 3.1 (FastAPI) and MCP servers, by producer and type.
"""

import datetime as dt
import decimal
import enum
import json
import pathlib
import uuid
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, TypeAdapter, constr

from backend.structured_output.compile import compile_grammar, make_tokenizer
from gateway.openai.structured import AskedGrammar, read_grammar
from tests.backend.structured_output.grammars import CONFIG, END, TOKENIZER_JSON, drawn

TOKENIZER = make_tokenizer(TOKENIZER_JSON, CONFIG.vocab_size, [END])
SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "producer_schemas.json").read_text(encoding="utf-8"))


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool = True


class Tree(BaseModel):
    value: Literal[1]
    children: Annotated[list["Tree"], Field(max_length=2)] = []


class Linked(BaseModel):
    value: Literal["a", None]
    next: "Linked | None" = None


class Pair(NamedTuple):
    first: int
    second: str = ""


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    when: dt.datetime
    pet: Cat | Dog = Field(discriminator="kind")
    color: Color
    where: pathlib.Path | None = None


TYPES: dict[str, Any] = {
    "closed model": Closed, "tree": Tree, "linked": Linked, "named tuple": Pair, "enum": Color,
    "union": Annotated[Cat | Dog, Field(discriminator="kind")], "date": dt.date, "time": dt.time,
    "datetime": dt.datetime, "timedelta": dt.timedelta, "uuid": uuid.UUID, "path": pathlib.Path,
    "url": AnyUrl, "pattern": constr(pattern=r"^[a-z]{2,4}-\d+$"), "length": constr(min_length=1, max_length=3),
    "literal": Literal["a", 1, None], "dict": dict[str, int], "dict of names": dict[Literal["a", "b"], int],
    "dict of colors": dict[Color, bool], "dict of ids": dict[uuid.UUID, int], "dict of days": dict[dt.date, int],
    "dict of some": dict[Annotated[str, Field(min_length=1)], int], "tuple": tuple[int, str], "set": set[int],
    "bytes": bytes, "optional": int | None, "list": Annotated[list[bool], Field(min_length=1, max_length=3)],
    "integer": Annotated[int, Field(ge=3, le=30, multiple_of=3)],
}  # fmt: skip


def asked(schema: Any, **more: Any) -> AskedGrammar:
    named = {"name": "x", "schema": json.loads(json.dumps(schema)), **more}
    grammar = read_grammar({"type": "json_schema", "json_schema": named}, None)  # type: ignore[typeddict-item]
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("strict", [{}, {"strict": False}])
@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_of_libraries_are_taken(name: str, strict: dict[str, bool]) -> None:
    grammar = asked(SCHEMAS[name], **strict).grammar
    compile_grammar(TOKENIZER, grammar.kind, grammar.source)


def test_most_of_them_are_enforced_to_the_letter() -> None:
    left_out = {name: asked(schema).left_out for name, schema in SCHEMAS.items()}
    said = {place.rsplit("/", 1)[1] for places in left_out.values() for place in places}
    assert said == {"format", "pattern", "uniqueItems"}
    assert sum(not places for places in left_out.values()) > 0.8 * len(SCHEMAS)


@pytest.mark.parametrize("name", TYPES)
def test_an_answer_by_a_pydantic_schema_is_read_by_pydantic(name: str) -> None:
    adapter, random = TypeAdapter[Any](TYPES[name]), Random(name)
    grammar = asked(adapter.json_schema()).grammar
    answers = [drawn(TOKENIZER, grammar.kind, grammar.source, random) for _ in range(6)]
    texts = [TOKENIZER.decode_bytes(tokens[:-1]) for tokens in answers if tokens is not None]
    assert texts
    for text in texts:
        adapter.validate_json(text)


DECIMAL = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}


@pytest.mark.parametrize("strict", [True, False])
def test_an_answer_by_the_schema_of_a_decimal_is_a_decimal(strict: bool) -> None:
    """As pydantic has described it, and several other libraries with it."""
    schema = {"type": "object", "properties": {"price": DECIMAL}, "required": ["price"], "additionalProperties": False}
    grammar, left_out = asked(schema, strict=strict)[::2]
    assert not left_out
    for seed in range(12):
        tokens = drawn(TOKENIZER, grammar.kind, grammar.source, Random(seed))
        if tokens is not None:
            decimal.Decimal(str(json.loads(TOKENIZER.decode_bytes(tokens[:-1]))["price"]))
