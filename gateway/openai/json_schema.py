"""Reduces a JSON schema to its enforceable part, and lists the places of the rest."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import orjson

from gateway.grammar_errors import InvalidGrammar
from gateway.http.json_body import MAX_LEVELS, check_nesting, shown
from gateway.openai.exclusive_schemas import are_exclusive
from gateway.openai.formats import KNOWN, PATTERNS, keep_bounds_small, said_by_format
from gateway.openai.look_around import LookArounds

MAX_ADDED_BYTES = 2**19  # that rewriting adds to a schema, or reads besides it
MAX_REFERENCE_CHARS = 1_000
_WITH_SOURCE = re.compile(r"At \d+\(\d+\): (?:failed to compile JSON schema: )?(.*?)\s\d+ \| .*", re.DOTALL)
_CONTAINERS = frozenset((dict, list))
_SCHEMA = frozenset(("additionalItems", "additionalProperties", "items"))  # keywords whose value is a schema
_SCHEMAS = frozenset(  # an array or object of schemas
    ("allOf", "anyOf", "oneOf", "prefixItems", "$defs", "definitions", "properties", "patternProperties")
)
_ANNOTATIONS = frozenset(
    (
        "$anchor", "$comment", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "default", "deprecated",
        "description", "discriminator", "example", "examples", "id", "nullable", "readOnly", "title", "writeOnly",
    )
)  # fmt: skip
_IN_PLACE = frozenset(("$dynamicRef", "$ref", "allOf", "anyOf", "contains", "dependentSchemas", "if", "oneOf"))
_SAY_KIND = _IN_PLACE | {"const", "enum", "type"}
_NAME = re.compile(r"#(?P<anchor>[a-z_][\w.-]*)|[\w.~:/?@!$&'()*+,;=-]+#?", re.ASCII | re.IGNORECASE)
_KINDS: Mapping[str, tuple[type, ...]] = {  # of the values of keywords
    **dict.fromkeys(("additionalProperties", "contains", "else", "if", "not", "propertyNames", "then"), (dict, bool)),
    **dict.fromkeys(("allOf", "anyOf", "enum", "oneOf", "prefixItems", "required"), (list,)),
    **dict.fromkeys(("$defs", "definitions", "patternProperties", "properties"), (dict,)),
    **dict.fromkeys(("$ref", "pattern"), (str,)),
    **dict.fromkeys(("maxItems", "maxLength", "maximum", "minItems", "minLength", "minimum"), (int, float)),
    "items": (dict, bool, list), "type": (str, list),
}  # fmt: skip
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_VALUES = frozenset(("const", "default", "example", "examples"))  # keywords for which null is a value
_COMPLAINTS = {  # keywords that a compiler's complaint may be about, by its text
    "oneof": ("oneOf",), "minproperties": ("minProperties", "maxProperties"), "min_properties": ("minProperties",),
    "max_properties": ("maxProperties",), "pattern propert": ("patternProperties",), "regex": ("pattern",),
    "resource": ("$ref",), "pointer": ("$ref",), "circular ref": ("$ref",), "enum": ("enum",), "type": ("type",),
}  # fmt: skip


_Way = tuple[Any, str | int] | None  # a linked list: the way so far, and the last step


class _Place(NamedTuple):
    """A schema within a schema: an object, and the way to it."""

    value: dict[str, Any]
    way: _Way

    @property
    def pointer(self) -> str:
        """The JSON pointer (RFC 6901) of the schema; "#" for the root."""
        parts, way = list[str](), self.way
        while way is not None:
            way, key = way
            parts.append(str(key)[:64].replace("~", "~0").replace("/", "~1"))
        return "/".join(["#", *reversed(parts)])


def enforce(schema: Any, param: str, is_strict: bool = True) -> list[str]:
    """Rewrite a schema to what is enforced of it; returns the places of keywords that are left out, each as `param` and
    a JSON pointer. What says nothing is left out without a word.

    Raises `InvalidGrammar` about the field `param`, for a strict schema with the first of these places. A value that
    passes may still be no valid schema: the compiler says the rest. O(values), without recursion; of values that are no
    schemas only the depth is looked at.
    """
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise InvalidGrammar(
            f"{param} must not hold x-guidance: how a schema is enforced is the server's choice.", param
        )
    rewriter, seen = _Rewriter(schema, param, is_strict), dict[int, Any]()
    check_depth = partial(check_nesting, param=param, error=InvalidGrammar)
    roots: list[tuple[Any, _Way]] = [(schema, None)]
    while roots:
        for root, way in roots:
            for place in _schemas(root, check_depth, way, seen):
                rewriter.rewrite(place)
        roots = rewriter.take_referred()  # a reference may point anywhere
    return rewriter.left_out


def places_of(schema: Any, keyword: str, most: int = 3) -> list[str]:
    """Return the JSON pointers of the first `most` places of a keyword, in a checked schema."""
    found = (f"{place.pointer}/{keyword}" for place in _schemas(schema) if keyword in place.value)
    return list(islice(found, most))


def _pass(value: Any, level: int) -> None:
    """Accept any value: the schema was checked."""


def _schemas(
    schema: Any,
    check_other: Callable[[Any, int], object] = _pass,
    way: _Way = None,
    seen: dict[int, Any] | None = None,
) -> Iterator[_Place]:
    """Yields a schema and its subschemas that are objects, in textual order, except those `seen`.

    `check_other` is called with arrays and objects that neither are nor hold schemas, and with values that lie too
    deep, with their depth.
    """
    seen = {} if seen is None else seen
    waiting: list[tuple[Any, bool, int, _Way]] = [(schema, True, 0, way)]  # whether it is a schema, or holds schemas
    while waiting:
        value, is_schema, level, way = waiting.pop()
        if level > MAX_LEVELS or (is_schema and type(value) is list):
            check_other(value, level)
        elif is_schema and type(value) is dict and id(value) not in seen:
            seen[id(value)] = value
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


def located(complaint: str, source: str) -> str:
    """A compiler's complaint about a schema, with the places that it may be about, if known."""
    about = [keyword for words, keywords in _COMPLAINTS.items() if words in complaint.lower() for keyword in keywords]
    found = [place for keyword in about[:2] for place in places_of(orjson.loads(source), keyword)]
    if "oneof" in complaint.lower():
        complaint = "oneOf is enforced only where no value can match two of its schemas; use anyOf"
    elif complaint.startswith("Resource "):  # the compiler would fetch it
        complaint = "$ref names no schema of this document"
    return f"{complaint.rstrip('.')}{' (at ' + ', '.join(found) + ')' if found else ''}."


def without_source(complaint: str) -> str:
    """A compiler's complaint about our own grammar, without the grammar's text."""
    said = _WITH_SOURCE.fullmatch(complaint)
    return complaint if said is None else f"{said[1].strip()}."


class _Rewriter:
    """Rewrites one schema by rules. A rule gets the place of its keyword, rewrites its value, and returns False where
    it cannot be enforced.
    """

    def __init__(self, root: Any, param: str, is_strict: bool) -> None:
        self.left_out: list[str] = []
        self._root, self._param, self._is_strict = root, param, is_strict
        self._look_arounds = LookArounds()
        self._room = MAX_ADDED_BYTES
        self._found: dict[str, tuple[Any, _Way]] = {}  # by reference
        self._referred: list[tuple[Any, _Way]] = []

    def take_referred(self) -> list[tuple[Any, _Way]]:
        """Targets of references within the document, since the last call."""
        referred, self._referred = self._referred, []
        return referred

    def _has_room(self, size: int) -> bool:
        self._room -= size
        return self._room >= 0

    def rewrite(self, place: _Place) -> None:
        value = place.value
        for keyword in [key for key, said in value.items() if said is None and key not in _VALUES]:
            del value[keyword]  # as clients write what they leave unsaid
        for keyword in [key for key in value if key in _KINDS and not _is_of_kind(key, value[key])]:
            self._leave_out(place, keyword)
        if _RULED.isdisjoint(value):
            return
        for keyword, rule in _RULES.items():
            if keyword in value and not rule(self, value, keyword):
                self._leave_out(place, keyword)

    def _leave_out(self, place: _Place, keyword: str) -> None:
        is_said = keyword == "format" and _has_pattern(place.value)  # the pattern says what the format means
        if self._is_strict and not is_said:
            raise InvalidGrammar(f"{self._param} {_fault(place, keyword)}", self._param)
        place.value.pop(keyword, None)
        self.left_out.append(f"{self._param}{place.pointer[1:]}/{keyword}")

    def _version(self, value: dict[str, Any], keyword: str) -> bool:
        """Drop the version: without it the compiler enforces the keywords of all versions; it refuses a version that it
        does not know.
        """
        return _drop(value, keyword, True)

    def _name(self, value: dict[str, Any], keyword: str) -> bool:
        """Turn a fragment into an anchor, as up to draft 7, and drop an invalid URI: the compiler refuses both."""
        match = _NAME.fullmatch(value[keyword]) if isinstance(value[keyword], str) else None
        if match is None or match["anchor"]:
            del value[keyword]
        if match is not None and match["anchor"]:
            value.setdefault("$anchor", match["anchor"])
        return True

    def _unenforced(self, value: dict[str, Any], keyword: str) -> bool:
        return _drop(value, keyword, value[keyword] == {} and keyword != "contains")

    def _counted(self, value: dict[str, Any], keyword: str) -> bool:
        return _drop(value, keyword, "contains" not in value)

    def _conditional(self, value: dict[str, Any], keyword: str) -> bool:
        return _drop(value, keyword, "if" not in value or not ("then" in value or "else" in value))

    def _all_of(self, value: dict[str, Any], keyword: str) -> bool:
        """Merge an `allOf` of one schema into a parent that has only annotations beside it: so the schema may refer to
        its parent.
        """
        for _ in range(MAX_LEVELS):
            match value:
                case {"allOf": [dict(one)], **others} if others.keys() <= _ANNOTATIONS:
                    del value["allOf"]
                    value |= one | others
                case _:
                    break
        return True

    def _one_of(self, value: dict[str, Any], keyword: str) -> bool:
        """Turn `oneOf` into `anyOf`, which is exact if the schemas are mutually exclusive: the compiler refuses a
        `oneOf` that may overlap.
        """
        options = value["oneOf"]
        if self._is_strict or not isinstance(options, list):
            return True
        resolved = [self._resolved(option) for option in options]
        is_exclusive = self._has_room(sum(map(_size, resolved))) and are_exclusive(resolved)
        if "anyOf" in value:
            _add(value, "anyOf", options)
            return _drop(value, keyword, is_exclusive)
        renamed = {"anyOf" if key == keyword else key: one for key, one in value.items()}  # properties keep their order
        value.clear()
        value |= renamed
        return is_exclusive

    def _not(self, value: dict[str, Any], keyword: str) -> bool:
        negated = value["not"]
        if not _says_nothing(negated):
            says_all = negated is False or (isinstance(negated, dict) and _says_nothing(negated.get("not")))
            return _drop(value, keyword, says_all)
        value.clear()
        value["enum"] = []  # no value
        return True

    def _reference(self, value: dict[str, Any], keyword: str) -> bool:
        """Drop annotations beside a reference: the compiler follows one to its own parent only if it stands alone."""
        for beside in [key for key in value if key in _ANNOTATIONS and not key.endswith(("id", "nchor"))]:
            del value[beside]
        reference = value["$ref"]
        if not isinstance(reference, str) or not reference.startswith("#"):
            is_named = isinstance(self._root, dict) and "$id" in self._root
            return is_named or not isinstance(reference, str)
        if reference not in self._found:
            self._referred.append(self._find(reference))
        return self._find(reference)[0] is not None

    def _unevaluated(self, value: dict[str, Any], keyword: str) -> bool:
        """Turn the keyword into `additionalProperties` or `items`, which mean the same if no other schema applies in
        place.
        """
        same = "items" if keyword == "unevaluatedItems" else "additionalProperties"
        is_same = _says_nothing(value[keyword]) or same in value or _IN_PLACE.isdisjoint(value)
        if is_same:
            value.setdefault(same, value[keyword])
        return _drop(value, keyword, is_same)

    def _unique(self, value: dict[str, Any], keyword: str) -> bool:
        most = value.get("maxItems")
        return _drop(value, keyword, value[keyword] is False or (type(most) is int and most < 2))

    def _names(self, value: dict[str, Any], keyword: str) -> bool:
        names = self._resolved(value[keyword])
        said = {key: names[key] for key in names.keys() - _ANNOTATIONS - {"type"}} if isinstance(names, dict) else {}
        if names is True or (not said and isinstance(names, dict) and names.get("type", "string") == "string"):
            return _drop(value, keyword, True)
        rest, properties = value.get("additionalProperties", True), value.get("properties", {})
        if "patternProperties" in value or not isinstance(properties, dict):
            return False
        allowed = said.get("enum") if said.keys() == {"enum"} else [said["const"]] if said.keys() == {"const"} else None
        if isinstance(allowed, list):
            if not self._has_room(len(allowed) * (32 + len(orjson.dumps(rest)))):
                return False
            listed = [name for name in allowed if isinstance(name, str)]
            others = {name: {"enum": list[Any]()} for name in properties if name not in listed}
            value["properties"] = dict.fromkeys(listed, rest) | properties | others
        elif properties or (pattern := self._name_pattern(said)) is None:
            return False
        else:
            value["patternProperties"] = {pattern: rest}
        value["additionalProperties"] = False
        return _drop(value, keyword, True)

    def _name_pattern(self, said: dict[str, Any]) -> str | None:
        """The pattern of property names to which this schema applies."""
        match said:
            case {"pattern": str(pattern), **others} if others.keys() <= {"format"}:
                return pattern if self._look_arounds.apart(pattern) == [pattern] else None
            case {"format": str(form), **others} if not others and form in PATTERNS:
                return f"^(?:{PATTERNS[form]})$"
            case {"minLength": int(least), **others} if not others:
                return rf"^[\s\S]{{{least},}}$"
            case {"maxLength": int(most), **others} if others.keys() <= {"minLength"}:
                return rf"^[\s\S]{{{others.get('minLength', 0)},{most}}}$"
        return None

    def _patterns_of_names(self, value: dict[str, Any], keyword: str) -> bool:
        names = value[keyword]
        return not isinstance(names, dict) or all(self._look_arounds.apart(name) == [name] for name in names)

    def _most_properties(self, value: dict[str, Any], keyword: str) -> bool:
        """True if the compiler counts right: one property besides the required ones, or any number if no others are
        listed.
        """
        most, (required, optional) = value[keyword], _properties(value)
        if type(most) is not int or not optional:
            return True
        is_closed = _is_closed(value)
        return _drop(value, keyword, is_closed and most >= required + optional) or (is_closed and most == required + 1)

    def _least_properties(self, value: dict[str, Any], keyword: str) -> bool:
        """As `_most_properties`; besides, an unlisted name may come twice, and counts once in the parsed value."""
        least, (required, optional) = value[keyword], _properties(value)
        if type(least) is not int:
            return True
        return _drop(value, keyword, least <= required) or (
            least == required + 1 and (_is_closed(value) or not optional)
        )

    def _pattern(self, value: dict[str, Any], keyword: str) -> bool:
        parts = self._look_arounds.apart(value[keyword]) if isinstance(value[keyword], str) else [value[keyword]]
        if parts is None or not self._has_room(sum(map(len, parts[1:]))):
            return False
        value[keyword] = parts[0]
        for part in parts[1:]:
            _add(value, keyword, part)
        return True

    def _encoding(self, value: dict[str, Any], keyword: str) -> bool:
        if value[keyword] == "base64" and "pattern" not in value:
            value.setdefault("format", "base64")
        return True

    def _format(self, value: dict[str, Any], keyword: str) -> bool:
        said = said_by_format(value) if value[keyword] is not None else {}
        if said is None or "format" in said:
            return said is not None
        if not self._has_room(len(said.get("pattern", ""))):
            return False
        del value[keyword]
        for key, one in said.items():
            bound = value.get(key)
            if key == "pattern":
                _add(value, key, one)
            elif not isinstance(bound, int | float) or (one > bound if key == "minimum" else one < bound):
                value[key] = one
        return True

    def _bound(self, value: dict[str, Any], keyword: str) -> bool:
        keep_bounds_small(value)
        return True

    def _resolved(self, schema: Any) -> Any:
        """The target of a schema's reference within the document, or the schema itself."""
        for _ in range(8):
            match schema:
                case {"$ref": str(reference)} if reference.startswith("#"):
                    schema, _ = self._find(reference)
                case _:
                    break
        return schema

    def _find(self, reference: str) -> tuple[Any, _Way]:
        """The target of a reference within the document, and the way there."""
        if reference not in self._found:
            self._found[reference] = self._follow(reference) if len(reference) <= MAX_REFERENCE_CHARS else (None, None)
        return self._found[reference]

    def _follow(self, reference: str) -> tuple[Any, _Way]:
        found: Any = self._root
        way: _Way = None
        for part in reference[2:].split("/") if reference.startswith("#/") else ():
            name: Any = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                name = int(name)
            elif not isinstance(found, dict):
                return None, None
            found, way = found[name] if isinstance(name, int) else found.get(name), (way, name)
        return found, way


_Rule = Callable[[_Rewriter, dict[str, Any], str], bool]
_RULES: Mapping[str, _Rule] = {  # in the order in which they apply
    "$schema": _Rewriter._version, "$id": _Rewriter._name,
    "allOf": _Rewriter._all_of, "not": _Rewriter._not, "oneOf": _Rewriter._one_of, "$ref": _Rewriter._reference,
    "if": _Rewriter._conditional, "then": _Rewriter._conditional, "else": _Rewriter._conditional,
    "unevaluatedItems": _Rewriter._unevaluated, "unevaluatedProperties": _Rewriter._unevaluated,
    "contains": _Rewriter._unenforced, "minContains": _Rewriter._counted, "maxContains": _Rewriter._counted,
    "uniqueItems": _Rewriter._unique, "propertyNames": _Rewriter._names,
    "patternProperties": _Rewriter._patterns_of_names,
    "maxProperties": _Rewriter._most_properties, "minProperties": _Rewriter._least_properties,
    "dependencies": _Rewriter._unenforced, "dependentRequired": _Rewriter._unenforced,
    "dependentSchemas": _Rewriter._unenforced, "$dynamicRef": _Rewriter._unenforced,
    "$recursiveRef": _Rewriter._unenforced, "pattern": _Rewriter._pattern,
    "contentEncoding": _Rewriter._encoding, "format": _Rewriter._format,
    "minimum": _Rewriter._bound, "maximum": _Rewriter._bound,
    "exclusiveMinimum": _Rewriter._bound, "exclusiveMaximum": _Rewriter._bound,
}  # fmt: skip
_RULED = frozenset(_RULES)


def _is_of_kind(keyword: str, said: Any) -> bool:
    if keyword == "type":
        names = said if isinstance(said, list) else [said]
        return all(isinstance(name, str) and name in _TYPES for name in names)
    return isinstance(said, _KINDS[keyword])


def _fault(place: _Place, keyword: str) -> str:
    at = f"at {place.pointer}/{keyword}"
    if keyword in _KINDS and not _is_of_kind(keyword, place.value.get(keyword)):
        return (
            f"has {shown(place.value[keyword])} {at}, which no JSON schema may have there; leave it out or correct it."
        )
    match keyword:
        case "format":
            form = shown(place.value[keyword])
            return f"has the format {form} {at}; known formats, of texts or of numbers, are {KNOWN}."
        case "pattern":
            within = "a word boundary, a back-reference, or an anchor or look-around within"
            return f"has a pattern {at} that is not enforced here, for {within}."
    return f"has {keyword} {at}, which is not enforced here; leave it out and check the answer for it."


def says_kind(schema: dict[str, Any]) -> bool:
    """True if a schema restricts the type of a value, by itself or through others."""
    return not _SAY_KIND.isdisjoint(schema)


def _has_pattern(schema: dict[str, Any]) -> bool:
    parts = schema.get("allOf")
    return any(
        isinstance(one, dict) and "pattern" in one for one in [schema, *(parts if isinstance(parts, list) else [])]
    )


def _size(schema: Any) -> int:
    """The cost of comparing a schema with others, in bytes to read, approximately."""
    parts = [schema.get(key) for key in ("required", "properties", "enum")] if isinstance(schema, dict) else []
    return 16 * sum(len(part) for part in parts if isinstance(part, (list, dict)))


def _says_nothing(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _ANNOTATIONS)


def _drop(value: dict[str, Any], keyword: str, says_nothing: bool) -> bool:
    """Remove a keyword that restricts nothing further."""
    if says_nothing:
        del value[keyword]
    return says_nothing


def _add(value: dict[str, Any], keyword: str, said: Any) -> None:
    """Add a keyword's restriction to a schema, also beside an equal keyword."""
    if keyword not in value:
        value[keyword] = said
    elif isinstance(value.setdefault("allOf", []), list):
        value["allOf"].append({keyword: said})


def _is_closed(value: dict[str, Any]) -> bool:
    """True if an object may have listed properties only."""
    return value.get("additionalProperties") is False and not value.get("patternProperties")


def _properties(value: dict[str, Any]) -> tuple[int, int]:
    """The numbers of required properties and of other listed ones."""
    properties, required = value.get("properties"), value.get("required")
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set[str]()
    return len(names), len(properties.keys() - names) if isinstance(properties, dict) else 0
