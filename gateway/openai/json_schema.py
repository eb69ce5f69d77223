"""Looks through a JSON schema for what nothing here enforces, so that it is refused by its place and not ignored."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import orjson

from gateway.grammar_errors import InvalidGrammar
from gateway.http.json_body import shown

MAX_LEVELS = 100  # of arrays and objects in one another
_CONTAINERS = frozenset((dict, list))
_SCHEMA = frozenset(("additionalItems", "additionalProperties", "items"))  # keywords whose value is a schema
_SCHEMAS = frozenset(  # an array or object of schemas
    ("allOf", "anyOf", "oneOf", "prefixItems", "$defs", "definitions", "properties", "patternProperties")
)
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
_NUMERIC = ("integer", "number", "null")  # the types that formats of numbers go with
_ANY_TEXT = frozenset(("binary", "password"))  # formats that say nothing of what a text is
_LOOKAROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?<?[=!]")
_COMPLAINTS = {  # by what a compiler's complaint says, the keywords that it may be about
    "oneof": ("oneOf",), "minproperties": ("minProperties", "maxProperties"), "min_properties": ("minProperties",),
    "max_properties": ("maxProperties",), "pattern propert": ("patternProperties",), "regex": ("pattern",),
    "resource": ("$ref",), "pointer": ("$ref",), "circular ref": ("$ref",), "enum": ("enum",), "type": ("type",),
}  # fmt: skip


_Way = tuple[Any, str | int] | None  # the last step of a way, behind the way of those before it


class _Place(NamedTuple):
    """A schema within a schema: an object, and the way to it."""

    value: dict[str, Any]
    way: _Way

    @property
    def pointer(self) -> str:
        """Returns the JSON pointer (RFC 6901) of the schema; that of the outermost is "#"."""
        parts, way = list[str](), self.way
        while way is not None:
            way, key = way
            parts.append(str(key)[:64].replace("~", "~0").replace("/", "~1"))
        return "/".join(["#", *reversed(parts)])


def check_schema(schema: Any, param: str) -> None:
    """Raises `InvalidGrammar` about the field `param`, with the JSON pointer of what cannot be enforced first.

    That it passes does not say that it is a schema: whoever compiles it says the rest. O(values), without recursion; of
    values that are no schemas only the depth is looked at.
    """
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise InvalidGrammar(
            f"{param} must not hold x-guidance: how a schema is enforced is the server's choice.", param
        )
    for place in _schemas(schema, partial(_check_depth, param)):
        _check_keywords(place, param)


def places_of(schema: Any, keyword: str, most: int = 3) -> list[str]:
    """Returns the JSON pointers of the first so many places of a keyword, in a schema that was checked."""
    found = (f"{place.pointer}/{keyword}" for place in _schemas(schema) if keyword in place.value)
    return list(islice(found, most))


def _pass(value: Any, level: int) -> None:
    """Say nothing of a value: the schema was checked."""


def _schemas(schema: Any, check_other: Callable[[Any, int], object] = _pass) -> Iterator[_Place]:
    """Yields a schema and all within it that are objects, in their order in the text. `check_other` is told of arrays
    and objects that are no schemas and hold none, and of whatever lies too deep, and how deep that is.
    """
    waiting: list[tuple[Any, bool, int, _Way]] = [(schema, True, 0, None)]  # whether it is a schema, or holds schemas
    while waiting:
        value, is_schema, level, way = waiting.pop()
        if level > MAX_LEVELS or (is_schema and type(value) is list):
            check_other(value, level)
        elif is_schema and type(value) is dict:
            yield _Place(value, way)
            for key, item in reversed(value.items()):
                if type(item) not in _CONTAINERS:
                    continue
                if key in _SCHEMAS or (key == "items" and type(item) is list):
                    waiting.append((item, False, level + 1, (way, key)))
                elif key in _SCHEMA:
                    waiting.append((item, True, level + 1, (way, key)))
                else:
                    check_other(item, level + 1)
        elif not is_schema:
            pairs = [*(value.items() if type(value) is dict else enumerate(value))]
            waiting += [
                (item, True, level + 1, (way, key)) for key, item in reversed(pairs) if type(item) in _CONTAINERS
            ]


def _check_depth(param: str, value: Any, level: int) -> None:
    """Raises `InvalidGrammar` where a value, which lies so deep, has arrays or objects deeper than is read."""
    layer = [value]
    while layer:
        if level > MAX_LEVELS:
            raise InvalidGrammar(f"{param} is nested in more than {MAX_LEVELS} levels, the most that are read.", param)
        layer = [
            item
            for holder in layer
            for item in (holder.values() if type(holder) is dict else holder)
            if type(item) in _CONTAINERS
        ]
        level += 1


def _check_keywords(place: _Place, param: str) -> None:
    value = place.value
    if not _UNENFORCED.isdisjoint(value):
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
    if form in _FORMATS | _ANY_TEXT:
        return True
    return form in _NUMBERS and all(one in _NUMERIC for one in (kind if isinstance(kind, list) else [kind]))


def to_compile(schema: Any) -> Any:
    """Returns a schema that was checked as it is compiled: without what says nothing, a `uniqueItems` of false and
    formats that any text or number has, and with bounds for the formats of numbers that have some.
    """
    for value, _ in _schemas(schema):
        if "uniqueItems" in value:
            del value["uniqueItems"]
        if (form := value.get("format")) in _ANY_TEXT or form in _NUMBERS:
            del value["format"]
            _bound(value, _NUMBERS.get(form))
    return schema


def _bound(schema: dict[str, Any], bounds: tuple[int, int] | None) -> None:
    """Have a number lie within these bounds, where the schema's own are wider or none."""
    if bounds is not None:
        least, most = schema.get("minimum"), schema.get("maximum")
        schema["minimum"] = max(least, bounds[0]) if isinstance(least, int | float) else bounds[0]
        schema["maximum"] = min(most, bounds[1]) if isinstance(most, int | float) else bounds[1]
