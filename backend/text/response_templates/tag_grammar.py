"""The grammar of arguments in tags, one tag for each property of a schema: strings as plain text, other values as
JSON.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from backend.grammar import lark_text
from backend.text.response_templates.contents import ContentError, coerced, tag_pattern, value_of
from backend.text.response_templates.lark import TEXT, Lark, literal_start, ways_to_begin
from backend.text.response_templates.pattern_syntax import Character, Concat, Group, Node
from backend.text.response_templates.template import ResponseField

_PLAIN = frozenset({"type", "description", "title", "default", "examples", "enum", "const", "nullable"})
_DEFINITIONS = ("$defs", "definitions")
_NAME_ENDS = frozenset("<>\n")  # that no tag has within the name
_ANY_TEXT: Mapping[str, Any] = {"type": "string"}


class UnsupportedSchema(ValueError):
    """A schema demands of text in a tag more than a grammar can enforce. The message names the property."""


def tag_arguments(lark: Lark, field: ResponseField, schema: Mapping[str, Any], is_strict: bool) -> str:
    """Return the rule of the tags of a call's arguments, in the order of the properties. Raises `UnsupportedSchema`,
    about a property only if the schema is strict; otherwise the property may be any text.
    """
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise UnsupportedSchema("its properties must be an object, and what is required an array")
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    around = _around(tag_pattern(field.args).node)
    end = _beginning(field.close.node) if field.close else ""
    free, closings = lark.without(end) if end else TEXT, [*_last_literals(around[1]), *filter(None, [end])]
    written = []
    for name, one in properties.items():
        if not _NAME_ENDS.isdisjoint(name) or name != name.strip():
            raise UnsupportedSchema(f"the name of its property {name!r} does not fit into a tag")
        checked = _checked(name, one, is_strict)
        if not _comes_back(checked, closings, field):
            if is_strict:
                raise UnsupportedSchema(f"a value of its property {name!r} would not come back as it stands in a tag")
            checked = _ANY_TEXT
        tag = _tag(lark, name, checked, definitions, around, free)
        written.append(f"({tag} (/\\n/)?)" + ("" if name in required else "?"))
    return " ".join(written)


def _comes_back(schema: Mapping[str, Any], closings: list[str], field: ResponseField) -> bool:
    """Return True if the values that a schema names are parsed as they were written: a tag ends at the first of its
    closings, and the space around a text may belong to the tag.
    """
    texts = _texts(schema)
    written = "\n".join(texts) if texts else json.dumps(schema, ensure_ascii=False)
    try:
        read = [coerced(value_of(text.strip(), field.args), schema) for text in texts or ()]
    except ContentError:
        return False
    return read == (texts or []) and not any(closing in written for closing in closings)


def _around(node: Node) -> tuple[Node, Node]:
    """Return the parts before and after the value of a tag."""
    if isinstance(node, Concat):
        for index, part in enumerate(node.parts):
            if isinstance(part, Group) and part.name == "value":
                return Concat(node.parts[:index]), Concat(node.parts[index + 1 :])
    raise UnsupportedSchema("the format of the model's calls has no value that stands by itself")


def _tag(
    lark: Lark,
    name: str,
    schema: Mapping[str, Any],
    definitions: Mapping[str, Any],
    around: tuple[Node, Node],
    free: str,
) -> str:
    before, after = around
    opening = lark.node(before, {"key": name})
    closing = "".join(_last_literals(after))
    if not opening or not closing:
        raise UnsupportedSchema("the format of the model's calls has no delimiters around a value")
    texts = _texts(schema)
    if texts is None:
        return f"{opening} {lark.json({**schema, **definitions})} {lark.node(after, {})}"
    if texts:
        options = " | ".join(map(lark_text, texts))
        return f"{opening} ({options}) {lark.node(after, {})}"
    return f"{opening} {lark.until(closing, free)}"


def _checked(name: str, schema: Any, is_strict: bool) -> Mapping[str, Any]:
    """Return a property's schema, or the schema of any text if it is not strict and demands more than is enforced."""
    texts: Mapping[str, Any] = schema if isinstance(schema, dict) else {}
    types = texts.get("type")
    if isinstance(types, str) and types != "string":
        return texts
    enum = texts.get("enum", [""])
    is_plain = types == "string" and not set(texts) - _PLAIN and not texts.get("nullable")
    if is_plain and isinstance(enum, list) and all(isinstance(one, str) for one in enum):
        return texts
    if is_strict:
        raise UnsupportedSchema(
            f"its property {name!r} stands as text in a tag, where a string with an enum or without is enforced, "
            "and any other single type"
        )
    return _ANY_TEXT


def _texts(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the texts that a value may be: [] for any, None for a value that is written as JSON."""
    if schema["type"] != "string":
        return None
    enum = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return [text for text in enum if isinstance(text, str)]


def _beginning(node: Node) -> str:
    """Return the first characters of a region's closing."""
    return literal_start(next(ways_to_begin(node)))


def _last_literals(node: Node) -> Iterator[str]:
    """Yield the characters with which a sequence must end."""
    if isinstance(node, Concat):
        literal = ""
        for part in node.parts:
            literal = literal + part.char if isinstance(part, Character) else ""
        yield literal
