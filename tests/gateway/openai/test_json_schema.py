"""What of a JSON schema cannot be enforced is found wherever it stands, and nowhere else; the rest is enforced."""

import json
from typing import Any

import jsonschema
import pytest

from backend.grammar import GrammarKind
from backend.structured_output.compile import CompileError, compile_grammar, make_tokenizer
from gateway.grammar_errors import InvalidGrammar
from gateway.openai.json_schema import MAX_LEVELS, enforce, located, places_of, without_source
from tests.backend.structured_output.grammars import CONFIG, END, TOKENIZER_JSON

TOKENIZER = make_tokenizer(TOKENIZER_JSON, CONFIG.vocab_size, [END])


def copied(schema: Any) -> Any:
    return json.loads(json.dumps(schema))


def fault_of(schema: Any) -> str | None:
    """What a schema is refused for that is strict."""
    try:
        assert enforce(copied(schema), "schema") == []
    except InvalidGrammar as error:
        return f"{error.param}: {error.message}"
    return None


def rewritten(schema: Any, is_strict: bool = True) -> Any:
    schema = copied(schema)
    assert enforce(schema, "schema", is_strict) == []
    return schema


def allows(schema: Any, *values: Any, is_strict: bool = True) -> list[bool]:
    """Whether answers may be these values, as `json.dumps` or the client writes them."""
    schema = copied(schema)
    enforce(schema, "schema", is_strict)
    compiled, found = compile_grammar(TOKENIZER, GrammarKind.JSON_SCHEMA, json.dumps(schema)), list[bool]()
    for value in values:
        text = value.decode() if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False)
        matcher, tokens = compiled.deep_copy(), TOKENIZER.tokenize_str(text)
        found.append(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
    return found


def nested(levels: int) -> Any:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"not_a_keyword": schema}
    return schema


UNENFORCED: list[tuple[Any, str]] = [
    ({"not": {"const": 1}}, "#/not"),
    ({"if": {}, "then": {}}, "#/if"),
    ({"$defs": {"a": {"uniqueItems": True}}}, "#/$defs/a/uniqueItems"),
    ({"properties": {"not": {"dependencies": {"a": ["b"]}}}}, "#/properties/not/dependencies"),
    ({"items": [{"contains": {}}]}, "#/items/0/contains"),
    ({"items": {"propertyNames": {"format": "idn-email"}}}, "#/items/propertyNames"),
    ({"allOf": [True, {"anyOf": [{}], "unevaluatedProperties": False}]}, "#/allOf/1/unevaluatedProperties"),
    ({"patternProperties": {"^a": {"dependentRequired": {"a": ["b"]}}}}, "#/patternProperties/^a/dependentRequired"),
    ({"additionalProperties": {"format": "iri"}}, "#/additionalProperties/format"),
    ({"prefixItems": [{"pattern": "(?!a)b"}]}, "#/prefixItems/0/pattern"),
    ({"properties": {"a": {"pattern": r"\bword\b"}}}, "#/properties/a/pattern"),
    ({"pattern": r"(a|b)\1"}, "#/pattern"),
    ({"pattern": r"^(/[a-z]+($|/))+$"}, "#/pattern"),
    ({"properties": {"a": {"$ref": "#/parts/b/0"}}, "parts": {"b": [{"contains": {}}]}}, "#/parts/b/0/contains"),
    ({"$ref": "https://example.com/schema"}, "#/$ref"),
    ({"type": "object", "minProperties": 2}, "#/minProperties"),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "#/minProperties"),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 3}, "#/maxProperties"),
    ({"properties": {"a": {"type": "string", "required": True}}}, "#/properties/a/required"),
    ({"patternProperties": {"^(?!x)": {}}}, "#/patternProperties"),
]


@pytest.mark.parametrize(("schema", "pointer"), UNENFORCED)
def test_an_unenforced_keyword_is_named_by_its_pointer(schema: Any, pointer: str) -> None:
    message = fault_of(schema)
    assert message is not None
    assert f" at {pointer}" in message


@pytest.mark.parametrize(("schema", "pointer"), UNENFORCED)
def test_unenforced_keywords_are_left_out_of_a_schema_that_is_not_strict(schema: Any, pointer: str) -> None:
    schema = copied(schema)
    assert enforce(schema, "f.schema", is_strict=False) == [f"f.schema{pointer[1:]}"]
    assert enforce(schema, "f.schema", is_strict=False) == []
    compile_grammar(TOKENIZER, GrammarKind.JSON_SCHEMA, json.dumps(schema))


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
        {"items": deep},
    ):
        assert "more than 100 levels" in str(fault_of(schema))


def test_how_a_schema_is_enforced_is_not_the_clients_choice() -> None:
    assert "x-guidance" in str(fault_of({"x-guidance": {"lenient": True}}))
    assert fault_of({"properties": {"x-guidance": {}}}) is None


def test_keywords_that_say_nothing_are_left_out() -> None:
    schema = {"uniqueItems": False, "items": {"uniqueItems": False}, "properties": {"uniqueItems": {"type": "null"}}}
    assert rewritten(schema) == {"items": {}, "properties": {"uniqueItems": {"type": "null"}}}


@pytest.mark.parametrize(
    "said",
    [
        {"propertyNames": {"type": "string"}}, {"propertyNames": {}}, {"propertyNames": True}, {"format": "path"},
        {"propertyNames": {"type": "string", "description": "a name"}}, {"format": "file-path"}, {"format": None},
        {"not": False}, {"not": {"not": {}}}, {"not": {"not": True}}, {"uniqueItems": True, "maxItems": 1},
        {"then": {}}, {"if": {"type": "null"}}, {"minContains": 2}, {"unevaluatedProperties": True},
        {"minProperties": 0}, {"dependentRequired": {}}, {"required": ["a"], "minProperties": 1},
    ],
)  # fmt: skip
def test_a_keyword_that_constrains_nothing_is_no_reason_to_refuse(said: dict[str, Any]) -> None:
    left = rewritten(said)
    assert not (said.keys() - {"maxItems", "required"}) & left.keys()


def test_a_schema_that_nothing_matches_takes_its_place_among_others() -> None:
    never: list[Any] = [{"not": {}}, {"not": True}, {"not": {"description": "anything"}}]
    for schema in never:
        assert allows({"anyOf": [schema, {"type": "integer"}]}, 1, "a") == [True, False]
        assert allows({"properties": {"a": schema, "b": {}}}, {"b": 1}, {"a": 1}) == [True, False]
        with pytest.raises(CompileError):
            allows(schema)


VERSIONS = [
    "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft-07/schema",
    "https://json-schema.org/draft/2019-09/schema", "https://json-schema.org/draft/2020-12/schema",
    "http://json-schema.org/schema#", "https://spec.openapis.org/oas/3.1/dialect/base", "draft-07", "", 7, None, [],
]  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_keywords_are_enforced_in_schemas_of_every_version(version: Any) -> None:
    def read(schema: dict[str, Any], *values: Any) -> list[bool]:
        return allows({"properties": {"a": {"$schema": version, **schema}}, "$schema": version}, *values)

    assert read({"const": 1}, {"a": 1}, {"a": 2}) == [True, False]
    assert read({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, {"a": 5}, {"a": 6}) == [False, True]
    assert read({"type": "integer", "exclusiveMinimum": 5}, {"a": 5}, {"a": 6}) == [False, True]
    pairs: list[Any] = [{"a": [1]}, {"a": [2]}, {"a": [1, 1]}]
    one: dict[str, Any] = {"type": "array", "minItems": 1}
    assert read({**one, "items": [{"const": 1}], "additionalItems": False}, *pairs) == [True, False, False]
    assert read({**one, "prefixItems": [{"const": 1}], "items": False}, *pairs) == [True, False, False]


@pytest.mark.parametrize("version", ["http://json-schema.org/draft-04/schema#", None])
@pytest.mark.parametrize("key", ["$id", "id"])
def test_a_name_of_a_schema_may_be_anything(key: str, version: str | None) -> None:
    for name in ("User", "#User", "http://a/b", "urn:a:b", "My Type", "#", "a b#", "<x>", "Größe", "", 5, None):
        for of_all, of_one in (({key: name}, {}), ({}, {key: name})):
            schema = {"$schema": version, **of_all, "additionalProperties": {**of_one, "const": 1}}
            assert allows(schema, {"a": 1}, {"a": 2}) == [True, False]


@pytest.mark.parametrize("name", ["User", "#User", "http://a/b", "urn:a:b"])
def test_schemas_are_found_by_their_names(name: str) -> None:
    named = {"$id": "http://a/", "$defs": {"user": {"$id": name, "const": 1}}, "additionalProperties": {"$ref": name}}
    assert allows(named, {"a": 1}, {"a": 2}) == [True, False]
    with pytest.raises(CompileError) as error:
        allows(named | {"$defs": {}})
    assert "retriev" not in located(str(error.value), json.dumps(named))


def test_a_pattern_is_refused_for_what_it_has() -> None:
    for pattern in (r"\bword\b", r"(a|b)\1", "(?i)^abc$", "^a(?:b|(?=c))"):
        fault = fault_of({"pattern": pattern})
        assert fault is not None and "a word boundary, a back-reference, or an anchor or look-around within" in fault


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
        ({"type": "integer", "format": "uint8", "minimum": 7}, {"type": "integer", "minimum": 7, "maximum": 255}),
    ],
)
def test_formats_of_numbers_are_bounds_or_say_nothing(schema: dict[str, Any], compiled: dict[str, Any]) -> None:
    assert rewritten(schema) == compiled


@pytest.mark.parametrize("kind", [{}, [{}], [["integer"]], [None], 3])
def test_what_is_no_type_is_refused_by_its_place(kind: Any) -> None:
    with pytest.raises(InvalidGrammar, match="#/type"):
        enforce({"type": kind, "format": "int32"}, "f")


def test_a_format_of_numbers_is_none_of_texts() -> None:
    with pytest.raises(InvalidGrammar, match="#/format"):
        enforce({"type": "string", "format": "int32"}, "f")


def test_bounds_are_clamped_to_the_compilers() -> None:
    assert allows({"type": "integer", "format": "int64"}, -5, 2**63 - 1, "a") == [True, True, False]
    assert allows({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, 1.5, -2) == [True, True]
    assert allows({"minimum": -1e300, "exclusiveMaximum": 1e300}, 1.5, "a") == [True, True]


FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2024-02-29", "2023-12-31", "0001-01-01"], ["2023-02-29", "0000-01-01", "2024-13-01", "2024-04-31"]),
    "date-time": (["2024-02-29T23:59:59Z", "2024-01-01T00:00:00.5+05:30"], ["2024-01-01T23:59:60Z", "2024-01-01"]),
    "time": (["12:30:00Z"], ["25:00:00Z", "12:30:00"]),
    "duration": (["P1Y2M3D", "PT5M", "P2W", "P1DT2H"], ["P", "PT", "P1W2D", "1D"]),
    "email": (["a.b+c@example.org"], ["a@b", "a..b@example.org", "@example.org", "a b@example.org"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    "uuid4": (["123e4567-e89b-42d3-a456-426614174000"], ["123e4567-e89b-12d3-a456-426614174000"]),
    "base64": (["", "YQ==", "YWI=", "YWJj"], ["YQ", "Y", "YQ=a"]),
    "decimal": (["1", "-0.5", ".5", "1e3"], [".", "", "-", "1.2.3"]),
    "ipv4": (["127.0.0.1"], ["256.0.0.1"]),
}


@pytest.mark.parametrize("form", FORMATS)
def test_formats_of_texts_are_enforced(form: str) -> None:
    good, bad = FORMATS[form]
    schema = {"type": "string", "format": form}
    assert allows(schema, *good) == [True] * len(good)
    assert allows(schema, *bad) == [False] * len(bad)


def test_a_format_and_a_pattern_hold_both() -> None:
    assert allows({"type": "string", "format": "date", "pattern": "^2024"}, "2024-05-01", "2023-05-01", "2024") == [
        True, False, False,
    ]  # fmt: skip
    local = {"type": "string", "format": "time", "pattern": r"^\d\d:\d\d$"}
    assert allows(local, "12:30", "12:30:00", "99:99") == [True, False, False]
    assert allows({"type": "string", "contentEncoding": "base64"}, "YQ==", "?") == [True, False]


def test_an_unknown_format_means_the_pattern_beside_it() -> None:
    schema = {"type": "string", "format": "nanoid", "pattern": "^[a-z]{3}$"}
    for is_strict in (True, False):
        assert enforce(copied(schema), "s", is_strict) == ["s/format"]
    assert allows(schema, "abc", "ab") == [True, False]
    parts = {"type": "string", "format": "includes", "allOf": [True, {"pattern": "^a"}, {"pattern": "b"}]}  # zod's
    assert enforce(copied(parts), "s") == ["s/format"]
    assert fault_of({"format": "includes", "allOf": [True, {"minLength": 1}]}) is not None


EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
AMOUNT = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,8}|(?=[\d.]{1,11}0*$)\d{0,8}\.\d{0,2}0*$)"  # pydantic's, of 10 digits, 2 places
LOOK_AROUND: dict[str, tuple[list[str], list[str]]] = {
    EMAIL: (["a.b@c.org", "o'x@a-b.co"], [".a@c.org", "a..b@c.org", "a@c"]),
    AMOUNT: (["1", "-0.50", "+.5", "00012345678.900"], ["", "-."]),
    r"^[a-z]*(?:\d{1,2}$|(?=[\d.]{1,6}$)\d{1,3}\.\d{0,2}$)": (["1", "ab1.5", "x123.45"], ["ab", "1234.5", "1.234"]),
    DECIMAL: (["1", "-0.50", "+.5", "007."], ["", "-", "+.", ".", "1.2.3", "a"]),
    r"^(?=.*[A-Z])(?=.*\d).{4,8}$": (["aB1x", "1234567A"], ["ab1x", "aBcd", "A1"]),
    r"^(?!-)[a-z0-9-]{1,63}(?<!-)$": (["a", "a-b"], ["-a", "a-", "-"]),
    r"^(?!(?:admin|root)$)[a-z]+$": (["adm", "admins", "user"], ["admin", "root"]),
    r"^(?=.{1,5}$)[a-z]+(\.[a-z]+)*$": (["ab.cd"], ["abc.def"]),
    r"^v-(?!0)\d+$": (["v-12"], ["v-012", "v-"]),
    r"^(?!.*foo).*$": (["", "fo", "bar"], ["foo", "a foo b"]),
    r"^[a-z.]+(?<!\.lock)$": (["a", "lock"], ["a.lock"]),
}


@pytest.mark.parametrize("pattern", LOOK_AROUND)
def test_patterns_that_look_around_at_their_ends_are_enforced(pattern: str) -> None:
    good, bad = LOOK_AROUND[pattern]
    schema = {"type": "string", "pattern": pattern}
    for text in (*good, *bad):
        assert jsonschema.Draft202012Validator(schema).is_valid(text) == (text in good)
    assert allows(schema, *good) == [True] * len(good)
    assert allows(schema, *bad) == [False] * len(bad)
    optional = {"anyOf": [{"type": "number"}, schema, {"type": "null"}]}  # as of an optional field of pydantic's
    assert allows({"properties": {"a": optional}}, *[{"a": one} for one in (good[0], bad[0], 1.5, None)]) == [
        True, False, True, True,
    ]  # fmt: skip


def test_the_ends_of_a_text_may_stand_in_a_choice() -> None:
    for pattern in ("(^a|^b)c", "a(b|c$|$)", "^(a|b$)", "^$|^x$", "^(?:(a)|(b$))"):
        assert fault_of({"pattern": pattern}) is None
        allows({"pattern": pattern})


@pytest.mark.parametrize("pattern", ["^a(?:b|(?=c))", "^(?=(?!a)b)c", "(?=a)b", "^(?!a)b|c", "^[a-z]*(?=x)x"])
def test_other_patterns_that_look_around_are_not(pattern: str) -> None:
    assert "#/pattern" in str(fault_of({"pattern": pattern}))


def test_a_bounded_number_of_look_arounds_is_worked_out_for_one_schema() -> None:
    fields = {f"f{n}": {"type": "string", "pattern": f"^(?!{chr(97 + n)})[a-z]+$"} for n in range(26)}
    again = {f"g{n}": {"type": "string", "pattern": "^(?!a)[a-z]+$"} for n in range(50)}
    left_out = enforce({"properties": {**fields, **again}}, "s", is_strict=False)
    assert left_out[:1] > ["s/properties/f10/pattern"] and len(left_out) < 16
    assert not [place for place in left_out if "/g" in place]


@pytest.mark.parametrize(
    ("names", "good", "bad"),
    [
        ({"enum": ["a", "b"]}, [{"a": 1}, {"a": 1, "b": 2}, {}], [{"c": 1}, {"a": "x"}]),
        ({"const": "a"}, [{"a": 1}], [{"b": 1}]),
        ({"$ref": "#/$defs/Key"}, [{"red": 1}], [{"pink": 1}]),
        ({"type": "string", "pattern": "^x_"}, [{"x_1": 1}, {}], [{"y": 1}, {"x_": "a"}]),
        ({"minLength": 1, "maxLength": 2}, [{"ab": 1}], [{"": 1}, {"abc": 1}]),
        ({"minLength": 1}, [{"abc": 1}], [{"": 1}]),
        ({"format": "uuid"}, [{"123e4567-e89b-12d3-a456-426614174000": 1}], [{"a": 1}]),
        ({"type": "string", "format": "uuid", "pattern": "^[0-9a-f-]{36}$"}, [{}], [{"a": 1}]),
    ],
)
def test_names_of_properties_are_enforced(names: Any, good: list[Any], bad: list[Any]) -> None:
    schema = {
        "type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"},
        "$defs": {"Key": {"enum": ["red", "blue"]}},
    }  # fmt: skip
    assert allows(schema, *good) == [True] * len(good)
    assert allows(schema, *bad) == [False] * len(bad)
    if "enum" in names:
        assert allows({**schema, "required": ["a", "b"]}, {"a": 1, "b": 2}, {"a": 1}) == [True, False]
    listed = {**schema, "propertyNames": {"enum": ["a"]}, "properties": {"a": {"const": 1}, "z": {"const": 2}}}
    assert allows(listed, {"a": 1}, {"a": 2}, {"z": 2}) == [True, False, False]


def test_no_property_comes_twice_under_two_spellings() -> None:
    schema = {"properties": {"a": {"type": "integer"}, "\n": {"type": "integer"}}, "required": ["a"]}
    assert allows(schema, rb'{"a":1,"\u0061":"x"}', rb'{"a":1,"a":"x"}', rb'{"a":1,"\u000a":"x"}') == [False] * 3
    assert allows(schema, rb'{"a":1,"\n":2,"b":"\"\\\t"}', {"a": 1, "é": "日本"}) == [True] * 2
    matched = {"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert allows(matched, rb'{"x":1,"\u0078":"a"}', {"x": 1, "y": "a"}) == [False, True]
    assert allows({"const": {"\x01": "\x7f"}}, {"\x01": "\x7f"}) == [False]
    assert allows({"const": {"\x01": "\x7f"}}, rb'{"\u0001":"\u007f"}') == [True]


def test_properties_are_counted_where_none_can_come_twice() -> None:
    texts = [b"{}", b'{"a":1}', b'{"a":1,"a":2}', b'{"a":1,"c":2}', b'{"a":1,"b":1,"c":2}']
    closed = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False}
    assert allows({**closed, "minProperties": 1}, *texts) == [False, True, False, True, True]
    assert allows({**closed, "minProperties": 2, "required": ["a"]}, *texts) == [False, False, False, True, True]
    assert allows({**closed, "maxProperties": 1}, *texts) == [True, True, False, False, False]
    assert allows({**closed, "maxProperties": 3}, *texts) == [True, True, False, True, True]
    for bounds in ({"minProperties": 2}, {"maxProperties": 2}, {"minProperties": 1, "maxProperties": 2}):
        (left_out,) = enforce(schema := {**closed, **bounds}, "s", is_strict=False)
        assert left_out in ("s/minProperties", "s/maxProperties") and allows(schema, {"a": 1, "b": 2}) == [True]
    assert allows({"type": "object", "minProperties": 1}, {}, {"a": 1}) == [False, True]
    named = {"type": "object", "required": ["a"], "minProperties": 2}
    assert allows(named, {"a": 1}, {"a": 1, "b": 2}, b'{"a":1,"a":2}') == [False, True, False]


def test_unevaluated_properties_are_the_unlisted_ones() -> None:
    schema = {"properties": {"a": {}}, "unevaluatedProperties": False}
    assert allows(schema, {"a": 1}, {"b": 1}) == [True, False]
    assert allows({"prefixItems": [{}], "unevaluatedItems": False}, [1], [1, 2]) == [True, False]


def test_a_schema_that_is_one_of_several_at_most_is_any_of_them_unless_it_is_strict() -> None:
    text, number = {"type": "string", "minLength": 1}, {"type": "integer"}
    tagged = [{"properties": {"k": {"const": k}}, "required": ["k"], "type": "object"} for k in "ab"]
    defined = {"$defs": {"A": tagged[0], "B": tagged[1]}}
    apart: list[Any] = [
        [text, number, {"type": "null"}], tagged, [{"const": "a"}, {"enum": ["b", 1]}], [*tagged, {"type": "string"}],
        [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], [{"type": ["string", "null"]}, number],
    ]  # fmt: skip
    for options in apart:
        assert enforce({"oneOf": copied(options), **copied(defined)}, "s", is_strict=False) == []
        assert fault_of({"oneOf": options, **defined}) is None
    crossing: list[Any] = [
        [text, {"type": "string"}], [number, {"type": "number"}], [tagged[0], {"type": "object"}], [{}, number],
        [{"enum": ["a", "b"]}, {"const": "a"}], [True, number], [{"$ref": "#/$defs/A"}] * 2,
    ]  # fmt: skip
    for options in crossing:
        assert enforce({"oneOf": copied(options), **copied(defined)}, "s", is_strict=False) == ["s/oneOf"]
    both = {"oneOf": [text, {"type": "string"}], "anyOf": [{"const": "a"}, number]}
    assert allows(both, "a", "b", 1, is_strict=False) == [True, False, False]


def test_one_schema_with_annotations_beside_it_may_refer_to_what_it_is_a_part_of() -> None:
    reference = {"allOf": [{"$ref": "#"}], "nullable": True, "description": "the next"}
    schema = {"type": "object", "properties": {"v": {"const": 1}, "next": reference}, "required": ["v"]}
    assert allows(schema, {"v": 1}, {"v": 1, "next": {"v": 1}}, {"v": 1, "next": {}}) == [True, True, False]


@pytest.mark.parametrize(
    ("complaint", "told"),
    [
        ("At 2(9): failed to compile JSON schema: Invalid type: x 1 | start: x 2 | json_0: {} ^", "Invalid type: x."),
        ("At 4(9): failed to compile JSON schema: Invalid type: x 2 | json_0: %json {} ^", "Invalid type: x."),
        ("At 1(3): unexpected token\n1 | start: x", "unexpected token."),
        ("The grammar is too large.", "The grammar is too large."),
    ],
)  # fmt: skip
def test_a_complaint_about_a_grammar_of_our_own_does_not_quote_it(complaint: str, told: str) -> None:
    assert without_source(complaint) == told


MISTAKEN: list[tuple[Any, str]] = [
    ({"type": "any"}, "#/type"), ({"type": ""}, "#/type"), ({"type": 5}, "#/type"), ({"type": [{"a": 1}]}, "#/type"),
    ({"items": {"type": ["string", "any"]}}, "#/items/type"), ({"items": "string"}, "#/items"),
    ({"properties": ["a"]}, "#/properties"), ({"additionalProperties": "no"}, "#/additionalProperties"),
    ({"enum": "a"}, "#/enum"), ({"required": "a"}, "#/required"), ({"anyOf": {"type": "null"}}, "#/anyOf"),
    ({"pattern": ["a"]}, "#/pattern"), ({"maxLength": "3"}, "#/maxLength"), ({"minimum": "0"}, "#/minimum"),
    ({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {}}, "#/properties/a/$ref"), ({"$ref": 5}, "#/$ref"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "pointer"), MISTAKEN)
def test_a_keyword_with_a_value_of_no_meaning_is_left_out_unless_the_schema_is_strict(
    schema: Any, pointer: str
) -> None:
    assert f" at {pointer}" in str(fault_of(schema))
    schema = copied(schema)
    assert enforce(schema, "s", is_strict=False) == [f"s{pointer[1:]}"]
    compile_grammar(TOKENIZER, GrammarKind.JSON_SCHEMA, json.dumps(schema))


def test_a_keyword_that_is_null_says_nothing() -> None:
    unsaid: dict[str, Any] = dict.fromkeys(
        ("type", "properties", "required", "items", "additionalProperties", "enum", "pattern", "format", "anyOf", "not",
         "minimum", "maxItems", "uniqueItems", "$ref", "$schema", "title")
    )  # fmt: skip
    said = {"const": None, "default": None}
    assert rewritten({**unsaid, **said}) == said
    assert rewritten({"properties": {"type": {**unsaid, "enum": [None]}}}) == {"properties": {"type": {"enum": [None]}}}
