"""Texts of each kind stand for the values that transformers reads in them."""

from typing import Any

import pytest
from transformers.utils.chat_parsing.content_parsers import parse_content
from transformers.utils.chat_parsing.response_parser import _coerce, _schema_types

from backend.text.response_templates.contents import CONTENTS, ContentError, coerced, parse

TAGS = {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</>"}


@pytest.mark.parametrize(
    ("kind", "text", "args"),
    [
        ("text", " a ", {}),
        ("text", " a ", {"strip": False}),
        ("int", " 7\n", {}),
        ("float", " 7.5", {}),
        ("bool", " True", {}),
        ("bool", "no", {}),
        ("json", '{"a": [1, null]}', {}),
        ("json", "not", {"allow_non_json": True}),
        ("json", '{a:1,b_2:{c:"d:e"}}', {"unquoted_keys": True}),
        (
            "json",
            "{a:<q>x \"y\" {z:1}</q>,b:'u'}",
            {"unquoted_keys": True, "string_delims": [["<q>", "</q>"], ["'", "'"]]},
        ),
        ("xml-inline", "<a>1</><b>x</><a>2</>", TAGS),
        ("xml-inline", "<a>1</><b>x</><a>2</><a>3</>", {**TAGS, "merge_duplicates": True}),
        (
            "xml-inline",
            "<a>[1]</><b>x</>",
            {**TAGS, "value_parser": {"name": "json", "args": {"allow_non_json": True}}},
        ),
        ("kv-lines", "a: 1\n\nb : x:y\nno", {}),
        ("kv-lines", "a=1;b=2", {"line_sep": ";", "kv_sep": "=", "value_parser": {"name": "int"}}),
    ],
)
def test_a_text_stands_for_what_transformers_reads(kind: str, text: str, args: dict[str, Any]) -> None:
    CONTENTS[kind].check(args)
    assert parse(kind, text, args) == parse_content(text, kind, args)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("int", "x"), ("json", "{a:1}"), ("json", "[" * 100_000), ("json", "\x01<q>a</q>"), ("int", "9" * 5000)],
)
def test_a_text_of_another_kind_is_an_error(kind: str, text: str) -> None:
    with pytest.raises(ContentError):
        parse(kind, text, {"string_delims": [["<q>", "</q>"]]} if "\x01" in text else {})


@pytest.mark.parametrize(
    "text", ["7", "1.50", "3.0", "true", "0", "null", "None", "[1]", '{"a": 1}', "inf", "nan", "x", "1e999"]
)
@pytest.mark.parametrize(
    "schema",
    [
        *({"type": name} for name in ("integer", "number", "boolean", "null", "array", "object", "string")),
        {"type": ["integer", "null"]},
        {"anyOf": [{"type": "number"}, {"type": "null"}]},
        {"type": "array", "nullable": True},
        {},
        None,
    ],
)
def test_arguments_are_typed_as_transformers_types_them(text: str, schema: Any) -> None:
    expected, actual = _coerce(text, _schema_types(schema)), coerced(text, schema)
    assert (actual, type(actual)) == (expected, type(expected))


def test_of_a_key_that_came_several_times_each_value_is_typed() -> None:
    assert coerced(["1", 2], {"type": "integer"}) == [1, 2]
    assert coerced(["1"], {"type": "array"}) == ["1"]
    assert coerced(True, {"type": "integer"}) is True
