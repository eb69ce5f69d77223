"""Looks through a JSON schema for what nothing here enforces, so that it is refused by its place and not ignored."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import orjson

from gateway.grammar_errors import InvalidGrammar
from gateway.http.json_body import shown

MAX_LEVELS = 100  # of arrays and objects in one another
_SCHEMA, _SCHEMAS, _OTHER = "a schema", "an array or object of schemas", "anything else"
_HOLDS = {  # by keyword, what its value is
    "additionalItems": _SCHEMA, "additionalProperties": _SCHEMA, "items": _SCHEMA,
    "allOf": _SCHEMAS, "anyOf": _SCHEMAS, "oneOf": _SCHEMAS, "prefixItems": _SCHEMAS,
    "$defs": _SCHEMAS, "definitions": _SCHEMAS, "properties": _SCHEMAS, "patternProperties": _SCHEMAS,
}  # fmt: skip
_UNENFORCED = frozenset(
    (
        "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains",
        "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems", "$dynamicAnchor",
        "$dynamicRef", "$recursiveAnchor", "$recursiveRef",
    )
)  # fmt: skip
_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
# OpenAPI's formats, and the bounds that they mean; the library has no regular expression for the least of 64 bits
_NUMBERS: dict[str, tuple[int, int] | None] = {
    "int32": (-(2**31), 2**31 - 1), "int64": (1 - 2**63, 2**63 - 1), "float": None, "double": None,
}  # fmt: skip
_ANY_TEXT = frozenset(("binary", "password"))  # formats that say nothing of what a text is
_LOOKAROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")
_COMPLAINTS = {  # by what a compiler's complaint says, the keywords that it may be about
    "oneof": ("oneOf",), "minproperties": ("minProperties", "maxProperties"), "min_properties": ("minProperties",),
    "max_properties": ("maxProperties",), "pattern propert": ("patternProperties",), "regex": ("pattern",),
    "resource": ("$ref",), "pointer": ("$ref",), "circular ref": ("$ref",), "enum": ("enum",), "type": ("type",),
}  # fmt: skip


class _Place(NamedTuple):
    """A value in the schema, with the way to it."""

    value: Any
    kind: str
    level: int
    key: str | int = ""
    parent: Optional["_Place"] = None

    @property
    def pointer(self) -> str:
        """The JSON pointer (RFC 6901) of the value; that of the whole schema is "#"."""
        parts: list[str] = []
        place: _Place | None = self
        while place is not None and place.parent is not None:
            parts.append(str(place.key)[:64].replace("~", "~0").replace("/", "~1"))
            place = place.parent
        return "/".join(["#", *reversed(parts)])


def check_schema(schema: Any, param: str) -> None:
    """Raises `InvalidGrammar` about the field `param`, with the JSON pointer of what cannot be enforced first.

    That it passes does not say that it is a schema: whoever compiles it says the rest. O(values), without recursion.
    """
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise InvalidGrammar(
            f"{param} must not hold x-guidance: how a schema is enforced is the server's choice.", param
        )
    waiting = [_Place(schema, _SCHEMA, 0)]
    while waiting:
        place = waiting.pop()
        if place.level > MAX_LEVELS:
            raise InvalidGrammar(f"{param} is nested in more than {MAX_LEVELS} levels, the most that are read.", param)
        if place.kind == _SCHEMA and isinstance(place.value, dict):
            _check_keywords(place, param)
        waiting += _inside(place)


def places_of(schema: Any, keyword: str, most: int = 3) -> list[str]:
    """Returns the JSON pointers of the first so many places of a keyword, in a schema that was checked."""
    waiting, found = [_Place(schema, _SCHEMA, 0)], list[str]()
    while waiting and len(found) < most:
        place = waiting.pop()
        if place.kind == _SCHEMA and isinstance(place.value, dict) and keyword in place.value:
            found.append(f"{place.pointer}/{keyword}")
        waiting += _inside(place)
    return found


def _inside(place: _Place) -> Iterator[_Place]:
    """Yields what a value holds, the last first."""
    value, level = place.value, place.level + 1
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    for key, item in reversed(pairs):
        if isinstance(item, dict | list | bool | str):
            yield _Place(item, _kind(place, key, item), level, key, place)


def _kind(place: _Place, key: Any, item: Any) -> str:
    if place.kind == _SCHEMAS:
        return _SCHEMA
    if place.kind == _SCHEMA and isinstance(place.value, dict):
        held = _HOLDS.get(key, _OTHER)
        return _SCHEMAS if key == "items" and isinstance(item, list) else held
    return _OTHER


def _check_keywords(place: _Place, param: str) -> None:
    value = place.value
    for keyword in value:
        if keyword in _UNENFORCED and not (keyword == "uniqueItems" and value[keyword] is False):
            raise InvalidGrammar(
                f"{param} has {keyword} at {place.pointer}/{keyword}, which is not enforced here; leave it "
                "out and check the answer for it.",
                param,
            )
    form, pattern = value.get("format"), value.get("pattern")
    if form is not None and not _is_known(form, value.get("type")):
        known = ", ".join(sorted((_FORMATS - {"unknown"}) | _NUMBERS.keys() | _ANY_TEXT))
        raise InvalidGrammar(
            f"{param} has the format {shown(form)} at {place.pointer}/format; those that are known here, of texts "
            f"or of numbers, are {known}.",
            param,
        )
    if isinstance(pattern, str) and _LOOKAROUND.search(pattern):
        raise InvalidGrammar(
            f"{param} has a pattern that looks ahead or behind at {place.pointer}/pattern, which is not enforced here.",
            param,
        )


def located(complaint: str, source: str) -> str:
    """Returns a compiler's complaint about a schema with the places that it can be about, as far as that is known."""
    about = [keyword for words, keywords in _COMPLAINTS.items() if words in complaint.lower() for keyword in keywords]
    found = [place for keyword in about[:2] for place in places_of(orjson.loads(source), keyword)]
    if "oneof" in complaint.lower():
        complaint = "oneOf is enforced only where no value can match two of its schemas; use anyOf"
    return f"{complaint.rstrip('.')}{' (at ' + ', '.join(found) + ')' if found else ''}."


def _is_known(form: Any, kind: Any) -> bool:
    if not isinstance(form, str):
        return False
    kinds = set(kind) if isinstance(kind, list) else {kind}
    return form in _FORMATS | _ANY_TEXT or (form in _NUMBERS and kinds <= {"integer", "number", "null"})


def to_compile(schema: Any) -> Any:
    """Returns a schema that was checked as it is compiled: without what says nothing, a `uniqueItems` of false and
    formats that any text or number has, and with bounds for the formats of numbers that have some.
    """
    waiting = [_Place(schema, _SCHEMA, 0)]
    while waiting:
        place = waiting.pop()
        if place.kind == _SCHEMA and isinstance(place.value, dict):
            place.value.pop("uniqueItems", None)
            if (form := place.value.get("format")) in _ANY_TEXT or form in _NUMBERS:
                del place.value["format"]
                _bound(place.value, _NUMBERS.get(form))
        waiting += _inside(place)
    return schema


def _bound(schema: dict[str, Any], bounds: tuple[int, int] | None) -> None:
    """Have a number lie within these bounds, where the schema's own are wider or none."""
    if bounds is not None:
        least, most = schema.get("minimum"), schema.get("maximum")
        schema["minimum"] = max(least, bounds[0]) if isinstance(least, int | float) else bounds[0]
        schema["maximum"] = min(most, bounds[1]) if isinstance(most, int | float) else bounds[1]
