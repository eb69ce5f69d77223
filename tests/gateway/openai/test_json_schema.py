"""What of a JSON schema cannot be enforced is found wherever it stands, and nowhere else."""

from typing import Any

import pytest

from gateway.grammar_errors import InvalidGrammar
from gateway.openai.json_schema import MAX_LEVELS, check_schema, located, places_of, to_compile


def fault_of(schema: Any) -> str | None:
    try:
        check_schema(schema, "schema")
    except InvalidGrammar as error:
        return f"{error.param}: {error.message}"
    return None


def nested(levels: int) -> Any:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not_a_keyword": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"not": {}}, "#/not"),
        ({"if": {}, "then": {}}, "#/if"),
        ({"$defs": {"a": {"uniqueItems": True}}}, "#/$defs/a/uniqueItems"),
        ({"properties": {"not": {"dependencies": {}}}}, "#/properties/not/dependencies"),
        ({"items": [{"contains": {}}]}, "#/items/0/contains"),
        ({"items": {"propertyNames": {}}}, "#/items/propertyNames"),
        ({"allOf": [True, {"unevaluatedProperties": False}]}, "#/allOf/1/unevaluatedProperties"),
        ({"patternProperties": {"^a": {"dependentRequired": {}}}}, "#/patternProperties/^a/dependentRequired"),
        ({"additionalProperties": {"format": "iri"}}, "#/additionalProperties/format"),
        ({"prefixItems": [{"pattern": "(?!a)b"}]}, "#/prefixItems/0/pattern"),
    ],
)
def test_what_is_not_enforced_is_named_by_its_pointer(schema: Any, pointer: str) -> None:
    message = fault_of(schema)
    assert message is not None
    assert f" at {pointer}" in message


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"enum": [{"not": 1}], "const": {"if": 2}, "default": {"contains": {}}, "examples": [{"not": {}}]},
        {"properties": {"not": {}, "if": {"type": "string"}, "format": {"type": "string", "format": "date-time"}}},
        {"uniqueItems": False, "nullable": True, "unknown": {"not": {}}},
        {"pattern": r"\(?=a\)"},
        nested(MAX_LEVELS - 1),
    ],
)
def test_names_values_and_annotations_are_no_keywords(schema: Any) -> None:
    assert fault_of(schema) is None


def test_nesting_is_bounded() -> None:
    assert "more than 100 levels" in str(fault_of(nested(MAX_LEVELS + 1)))
    assert fault_of({"enum": [[[[]]]]}) is None
    deep: Any = "leaf"
    for _ in range(MAX_LEVELS + 1):
        deep = [deep]
    for schema in (
        {"const": deep},
        {"items": {"enum": deep}},
        {"default": {"a": deep}},
        {"additionalProperties": deep},
    ):
        assert "more than 100 levels" in str(fault_of(schema))


def test_how_a_schema_is_enforced_is_not_the_clients_choice() -> None:
    assert "x-guidance" in str(fault_of({"x-guidance": {"lenient": True}}))
    assert fault_of({"properties": {"x-guidance": {}}}) is None


def test_keywords_that_say_nothing_are_left_out() -> None:
    schema = {"uniqueItems": False, "items": {"uniqueItems": False}, "properties": {"uniqueItems": {"type": "null"}}}
    assert to_compile(schema) == {"items": {}, "properties": {"uniqueItems": {"type": "null"}}}


def test_places_of_a_keyword_are_found() -> None:
    schema = {"oneOf": [{"properties": {"oneOf": {"oneOf": []}}}]}
    assert places_of(schema, "oneOf") == ["#/oneOf", "#/oneOf/0/properties/oneOf/oneOf"]


def test_a_compilers_complaint_is_given_the_places_that_it_is_about() -> None:
    schema = '{"properties":{"a":{"oneOf":[{},{}]}},"pattern":"("}'
    assert located("OneOf constraints are not supported. Enable it.", schema) == (
        "oneOf is enforced only where no value can match two of its schemas; use anyOf (at #/properties/a/oneOf)."
    )
    assert located("Regex parse error", schema) == "Regex parse error (at #/pattern)."
    assert located("Something else.", schema) == "Something else."


@pytest.mark.parametrize(
    ("schema", "compiled"),
    [
        (
            {"type": "integer", "format": "int32"},
            {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
        ),
        (
            {"type": ["integer", "null"], "format": "int64", "minimum": 1, "maximum": 2**70},
            {"type": ["integer", "null"], "minimum": 1, "maximum": 2**63 - 1},
        ),
        ({"items": {"type": "number", "format": "double"}}, {"items": {"type": "number"}}),
        ({"type": "string", "format": "password"}, {"type": "string"}),
        ({"properties": {"format": {"format": "date"}}}, {"properties": {"format": {"format": "date"}}}),
    ],
)
def test_formats_of_openapi_are_bounds_or_say_nothing(schema: dict[str, Any], compiled: dict[str, Any]) -> None:
    check_schema(schema, "f")
    assert to_compile(schema) == compiled


@pytest.mark.parametrize("kind", [{}, [{}], [["integer"]], [None], 3])
def test_a_format_of_what_is_no_type_is_refused_by_its_place(kind: Any) -> None:
    with pytest.raises(InvalidGrammar, match="#/format"):
        check_schema({"type": kind, "format": "int32"}, "f")


def test_a_format_of_numbers_is_none_of_texts() -> None:
    with pytest.raises(InvalidGrammar, match="#/format"):
        check_schema({"type": "string", "format": "int32"}, "f")
