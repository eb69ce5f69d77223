"""What an answer has to match, as OpenAI's and vLLM's clients say it."""

import json
from typing import Any

import pytest

from backend.grammar import Grammar, GrammarKind
from gateway.errors import ApiError
from gateway.openai.structured import ANY_OBJECT
from tests.gateway.openai.test_requests import chat, completion, refused

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def grammar(**fields: Any) -> Grammar | None:
    return chat(**fields).sampling.grammar


def of_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def test_an_answer_may_be_any_text_unless_something_else_is_asked_for() -> None:
    for fields in ({}, {"response_format": None}, {"response_format": {"type": "text"}}, {"structured_outputs": None}):
        assert grammar(**fields) is None
        assert chat(**fields).grammar_field is None


@pytest.mark.parametrize("parse", [chat, completion])
def test_a_schema_is_read_with_its_order_kept(parse: Any) -> None:
    request = parse(response_format=of_schema(PERSON, strict=True, description="who"))
    assert request.sampling.grammar == Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON, separators=(",", ":")))
    assert request.grammar_field == "response_format.json_schema.schema"


def test_without_strict_a_schema_is_enforced_all_the_same() -> None:
    assert grammar(response_format=of_schema(PERSON, strict=False)) == grammar(response_format=of_schema(PERSON))


def test_any_object_can_be_asked_for_in_three_ways() -> None:
    expected = Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)
    assert grammar(response_format={"type": "json_object"}) == expected
    assert grammar(structured_outputs={"json_object": True}) == expected
    assert grammar(structured_outputs={"json": {"type": "object"}}) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"json": PERSON}, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON, separators=(",", ":")))),
        ({"json": json.dumps(PERSON)}, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON, separators=(",", ":")))),
        ({"json": {}, "disable_any_whitespace": True}, Grammar(GrammarKind.JSON_LINE, "{}")),
        ({"json_object": True, "disable_any_whitespace": True}, Grammar(GrammarKind.JSON_LINE, ANY_OBJECT)),
        ({"json_object": True, "disable_any_whitespace": False}, Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)),
        ({"regex": "[a-z]+"}, Grammar(GrammarKind.REGEX, "[a-z]+")),
        ({"choice": ["a", "é"], "json": None}, Grammar(GrammarKind.CHOICE, '["a","é"]')),
        ({"grammar": 'start: "a"', "json_object": False}, Grammar(GrammarKind.LARK, 'start: "a"')),
    ],
)
def test_vllms_field_says_one_of_five(asked: dict[str, Any], expected: Grammar) -> None:
    request = chat(structured_outputs=asked)
    assert request.sampling.grammar == expected
    field = next(iter(asked))
    assert request.grammar_field == f"structured_outputs.{field}"
    assert request.keeps_spaces and not chat(response_format=of_schema(PERSON)).keeps_spaces


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": []}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"name": "a"}}},
            "response_format.schema",
        ),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": of_schema([])}, "response_format.json_schema.schema"),
        ({"response_format": of_schema("{}")}, "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"choice": ["a"] * 5000}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "x" * 300_000}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "x" * 300_000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_a_wrong_type_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    assert refused(chat, **fields).param == param


@pytest.mark.parametrize("schema", [{"enum": ["x" * 1000] * 300}, {"description": "x" * 300_000}])
def test_a_schema_has_a_bounded_size(schema: dict[str, Any]) -> None:
    refusal = refused(chat, response_format=of_schema(schema))
    assert "at most 262,144 are compiled here" in refusal.message
    assert refusal.code == "invalid_grammar"


def test_an_unenforced_schema_is_refused_by_its_place() -> None:
    with pytest.raises(ApiError, match=r"has not at #/properties/a~1b/items/anyOf/1/not, which is not enforced"):
        chat(
            response_format=of_schema(
                {"properties": {"a/b": {"items": {"anyOf": [{"type": "null"}, {"not": {"type": "string"}}]}}}},
                strict=True,
            )
        )


@pytest.mark.parametrize("strict", [{}, {"strict": False}, {"strict": None}])
def test_without_strict_what_is_not_enforced_is_told(strict: dict[str, Any]) -> None:
    schema = {"properties": {"a": {"format": "iri", "type": "string"}, "b": {"uniqueItems": True}}}
    request = chat(response_format=of_schema(schema, **strict))
    field = "response_format.json_schema.schema"
    assert request.left_out == [f"{field}/properties/a/format", f"{field}/properties/b/uniqueItems"]
    assert request.sampling.grammar is not None
    assert json.loads(request.sampling.grammar.source) == {"properties": {"a": {"type": "string"}, "b": {}}}
    assert chat(structured_outputs={"json": {"contains": {}}}).left_out == ["structured_outputs.json/contains"]


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_may_stand_beside_the_type(kind: str) -> None:
    request = chat(response_format={"type": kind, "schema": {**PERSON, "format": "iri"}})
    assert request.sampling.grammar == Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON, separators=(",", ":")))
    assert (request.grammar_field, request.left_out) == ("response_format.schema", ["response_format.schema/format"])


def test_a_chat_may_say_a_schema_in_the_form_of_responses() -> None:
    form = {"type": "json_schema", "name": "person", "description": "who", "strict": True, "schema": PERSON}
    request = chat(response_format=form)
    assert request.sampling.grammar == grammar(response_format=of_schema(PERSON))
    assert request.grammar_field == "response_format.schema"
    assert refused(chat, response_format={**form, "schema": {"contains": {}}}).param == "response_format.schema"


@pytest.mark.parametrize("schema", [{}, True, {"title": "x"}, {"additionalProperties": {"type": "integer"}}])
def test_a_json_object_is_one_also_where_its_schema_leaves_the_type_open(schema: Any) -> None:
    request = chat(response_format={"type": "json_object", "schema": schema})
    assert request.sampling.grammar is not None
    assert json.loads(request.sampling.grammar.source)["type"] == "object"
    for said in ({"type": "array"}, {"anyOf": [{"type": "object"}]}, {"enum": [1]}):
        request = chat(response_format={"type": "json_object", "schema": said})
        assert request.sampling.grammar == Grammar(GrammarKind.JSON_SCHEMA, json.dumps(said, separators=(",", ":")))
