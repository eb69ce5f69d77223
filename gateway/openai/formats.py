"""The formats of a JSON schema as patterns of texts or bounds of numbers."""

from collections.abc import Mapping
from typing import Any

_MAX_NUMBER, _MAX_INTEGER = 2**63 - 2**10, 2**63 - 1  # bounds for which the compiler has regular expressions
_NUMERIC = ("integer", "number", "null")  # types to which formats of numbers apply
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

_YEAR = r"(?:\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)"  # Python has none with the number 0
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_MINUTE = r"(?:[01]\d|2[0-3]):[0-5]\d"
_SECOND, _OFFSET = r":[0-5]\d(?:\.\d{1,9})?", f"(?:Z|[+-]{_MINUTE})"
_TIME, _ANY_TIME = f"{_MINUTE}{_SECOND}{_OFFSET}", f"{_MINUTE}(?:{_SECOND})?{_OFFSET}?"
_TIME_SPAN = r"T(?:\d{1,6}H(?:\d{1,6}M(?:\d{1,9}S)?)?|\d{1,6}M(?:\d{1,9}S)?|\d{1,9}S)"
_DAY_SPAN = r"(?:\d{1,4}Y(?:\d{1,4}M(?:\d{1,6}D)?)?|\d{1,4}M(?:\d{1,6}D)?|\d{1,6}D)"
_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
_HEX = "[0-9a-fA-F]"
_LETTER = "[A-Za-z0-9_+-]"

_LIBRARY = frozenset(("hostname", "ipv4", "ipv6", "unknown", "uri"))  # the compiler's own
PATTERNS: Mapping[str, str] = {  # where the compiler has none, or accepts invalid values, such as 30 February
    "base64": _BASE64,
    "base64url": "(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}(?:==)?|[A-Za-z0-9_-]{3}=?)?",
    "byte": _BASE64,
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "decimal": r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?",
    "duration": rf"P(?:{_DAY_SPAN}(?:{_TIME_SPAN})?|{_TIME_SPAN}|\d{{1,4}}W)",
    "email": (
        rf"{_LETTER}(?:{_LETTER}|\.{_LETTER}){{0,31}}"
        r"@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,3}[A-Za-z]{2,24}"
    ),
    "time": _TIME,
    "uuid": f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    **{f"uuid{n}": f"{_HEX}{{8}}-{_HEX}{{4}}-{n}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}" for n in range(1, 9)},
}
_BESIDE_A_PATTERN = {"date-time": f"{_DATE}T{_ANY_TIME}", "time": _ANY_TIME}  # a pattern says how exact they are
_NUMBERS: Mapping[str, tuple[int, int] | None] = {  # OpenAPI's and Rust's
    "float": None, "double": None, "int": None, "uint": (0, _MAX_INTEGER), "uint64": (0, _MAX_INTEGER),
    "int64": (-_MAX_NUMBER, _MAX_INTEGER),
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
}  # fmt: skip
_ANY_TEXT = frozenset(("binary", "directory-path", "file-path", "password", "path"))
KNOWN = ", ".join(sorted({*_LIBRARY, *PATTERNS, *_NUMBERS, *_ANY_TEXT} - {"unknown"}))


def said_by_format(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """A schema's format expressed in other keywords, perhaps none; None for an unknown format."""
    form, kinds = schema["format"], _kinds(schema)
    if not isinstance(form, str):
        return None
    pattern = (_BESIDE_A_PATTERN if "pattern" in schema else PATTERNS).get(form, PATTERNS.get(form))
    if pattern is not None:
        return {"pattern": f"^(?:{pattern})$"}
    if form in _NUMBERS and all(kind in _NUMERIC for kind in kinds):
        return dict(zip(("minimum", "maximum"), _NUMBERS[form] or (), strict=False))
    if form in _LIBRARY:
        return {"format": form}
    return {} if form in _ANY_TEXT else None


def keep_bounds_small(schema: dict[str, Any]) -> None:
    """Clamp bounds of numbers to the compiler's range; no further value matches by that."""
    is_integer = all(kind in ("integer", "null") for kind in _kinds(schema))
    for keyword in _BOUNDS:
        if type(schema.get(keyword)) in (int, float):
            most = _MAX_INTEGER if is_integer else _MAX_NUMBER
            schema[keyword] = max(-_MAX_NUMBER, min(schema[keyword], most))


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    kind = schema.get("type")
    return kind if isinstance(kind, list) else [kind]
