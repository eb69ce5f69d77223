"""Tells whether JSON schemas are mutually exclusive, by simple sufficient conditions."""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

_KINDS = frozenset(("array", "boolean", "null", "number", "object", "string"))  # an integer is a number
_KIND_OF = {str: "string", bool: "boolean", type(None): "null", dict: "object", list: "array"}


def are_exclusive(schemas: Sequence[Any]) -> bool:
    """True only if no value can match two schemas: by their types, their constants, or those of a property that each of
    them requires.
    """
    alike: dict[str, list[dict[str, Any]]] = {}
    for schema in schemas:
        for kind in _kinds(schema):
            alike.setdefault(kind, []).append(schema)
    return all(len(some) == 1 or _differ(some) or _tags_differ(some) for some in alike.values())


def _kinds(schema: Any) -> Iterable[str]:
    if not isinstance(schema, dict) or ("type" not in schema and _constants(schema) is None):
        return _KINDS
    if (constants := _constants(schema)) is not None:
        return {_KIND_OF.get(type(one), "number") for one in constants}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {"number" if kind == "integer" else str(kind) for kind in kinds}


def _constants(schema: Any) -> list[Any] | None:
    match schema:
        case {"const": one}:
            return [one]
        case {"enum": [*several]}:
            return several
    return None


def _differ(schemas: Sequence[Any]) -> bool:
    known = [constants for schema in schemas if (constants := _constants(schema)) is not None]
    each = [{orjson.dumps(one) for one in constants} for constants in known]
    return len(known) == len(schemas) and len(set().union(*each)) == sum(map(len, each))


def _tags_differ(schemas: Sequence[Any]) -> bool:
    required = [schema.get("required") if isinstance(schema, dict) else None for schema in schemas]
    names = [{name for name in some if isinstance(name, str)} if isinstance(some, list) else set() for some in required]
    properties = [schema.get("properties") if isinstance(schema, dict) else None for schema in schemas]
    return any(
        _differ([some.get(name) if isinstance(some, dict) else None for some in properties])
        for name in set[str].intersection(*names)
    )
