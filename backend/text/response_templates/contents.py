"""The kinds of text that a region of an answer may hold, and the values they stand for."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from backend.text.response_templates.pattern import Pattern
from backend.text.response_templates.pattern_syntax import PatternError
from backend.text.response_templates.scanner import DelimiterSet, Scanner

_UNQUOTED_KEY = re.compile(r"(?<=[{,])(\w+):")
_MAX_DELIMS = 16


class ContentError(ValueError):
    """The text is not of its kind, or the arguments of the kind are malformed."""


Args = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ContentKind:
    """A kind of text: the arguments it takes, and the parser that returns the value of a whole text."""

    keys: frozenset[str]
    parse: Callable[[str, Args], Any]

    def check(self, args: Any) -> None:
        """Raise `ContentError` for arguments that the kind does not take."""
        if not isinstance(args, dict) or set(args) - self.keys:
            raise ContentError(f"an object is expected with no keys but {', '.join(sorted(self.keys)) or 'none'}")
        if "tag_pattern" in self.keys:
            tag_pattern(args)
        if (delims := args.get("string_delims")) is not None:
            _check_delims(delims)
        if (value := args.get("value_parser")) is not None:
            _check_value_parser(value)


def parse(kind: str, text: str, args: Args) -> Any:
    """Return the value of a text. Raises `ContentError`, and nothing else, if it is not of its kind."""
    try:
        return CONTENTS[kind].parse(text, args)
    except ContentError:
        raise
    except (ValueError, RecursionError) as error:
        raise ContentError(f"it is no {kind}: {error}") from None


def tag_pattern(args: Args) -> Pattern:
    """Return the expression for one tag. Raises `ContentError` unless it has the groups "key" and "value"."""
    try:
        pattern = Pattern(args.get("tag_pattern") or "")
    except (PatternError, TypeError) as error:
        raise ContentError(f"tag_pattern: {error}") from None
    if not {"key", "value"} <= set(pattern.groups) or pattern.first is None:
        raise ContentError('tag_pattern must be an expression with the named groups "key" and "value"')
    return pattern


class TagReader:
    """Reads tags from text that comes in pieces."""

    def __init__(self, pattern: Pattern) -> None:
        self._delimiters = DelimiterSet([pattern])
        self._scanner = Scanner(self._delimiters, longest=None)  # a value is as long as the model makes it

    def feed(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield each tag's key and value as soon as the tag is complete."""
        scanner = self._scanner
        scanner.text += text
        while (found := scanner.find()) is not None:
            scanner.take(found.end)
            scanner.look_for(self._delimiters)
            yield found.groups.get("key", ""), found.groups.get("value", "")
        scanner.take(scanner.num_free)

    def end_text(self) -> Iterator[tuple[str, str]]:
        """Yield the tag that is complete only because the text has ended."""
        found = self._scanner.end_text()
        if found is not None:
            yield found.groups.get("key", ""), found.groups.get("value", "")


def value_of(text: str, args: Args) -> Any:
    """Return the value of a tag or of a line, by the parser that the arguments name. Raises `ContentError`."""
    parser = args.get("value_parser")
    return text if parser is None else parse(parser.get("name", "text"), text, parser.get("args", {}))


def coerced(value: Any, schema: Any) -> Any:
    """Return an argument as its schema types it: text that was written without quotes may be a number. Text of no type
    in the schema stays unchanged.
    """
    types = _types(schema, 0)
    if isinstance(value, str):
        return _coerced_text(value, types)
    if isinstance(value, list) and "array" not in types:  # the values of a key that came several times
        return [_coerced_text(item, types) if isinstance(item, str) else item for item in value]
    return value


def _text(text: str, args: Args) -> str:
    return text.strip() if args.get("strip", True) else text


def _bool(text: str, args: Args) -> bool:
    return _text(text, args).lower() in ("true", "1")


def _json(text: str, args: Args) -> Any:
    plain, strings = _without_strings(text, args.get("string_delims") or [])
    if args.get("unquoted_keys"):
        plain = _UNQUOTED_KEY.sub(r'"\1":', plain)
    try:
        return json.loads(_with_strings(plain, strings))
    except (ValueError, RecursionError):
        if args.get("allow_non_json"):
            return _text(text, args)
        raise


_MARK = "\x01"


def _without_strings(text: str, delims: list[list[str]]) -> tuple[str, list[str]]:
    """Return the text with a mark for each string that has delimiters of its own, and those strings."""
    strings: list[str] = []
    if delims and _MARK in text:
        raise ContentError("it holds a control character that marks strings")
    for opening, closing in delims:
        parts, at = [], 0
        while (start := text.find(opening, at)) >= 0:
            end = text.find(closing, start + len(opening))
            if end < 0:
                break
            parts += [text[at:start], f"{_MARK}{len(strings)}{_MARK}"]
            strings.append(text[start + len(opening) : end])
            at = end + len(closing)
        text = "".join([*parts, text[at:]])
    return text, strings


def _with_strings(text: str, strings: list[str]) -> str:
    if not strings:
        return text
    pieces = text.split(_MARK)
    return "".join(json.dumps(strings[int(piece)]) if odd % 2 else piece for odd, piece in enumerate(pieces))


def _tags(text: str, args: Args) -> dict[str, Any]:
    reader, values = TagReader(tag_pattern(args)), dict[str, Any]()
    for key, raw in (*reader.feed(text), *reader.end_text()):
        value = value_of(raw, args)
        if key in values and args.get("merge_duplicates"):
            value = [*(values[key] if isinstance(values[key], list) else [values[key]]), value]
        values[key] = value
    return values


def _lines(text: str, args: Args) -> dict[str, Any]:
    separator, values = args.get("kv_sep", ":"), {}
    for line in text.split(args.get("line_sep", "\n")):
        key, found, value = _text(line, args).partition(separator)
        if found:
            values[_text(key, args)] = value_of(_text(value, args), args)
    return values


CONTENTS: Mapping[str, ContentKind] = {
    "text": ContentKind(frozenset({"strip"}), _text),
    "int": ContentKind(frozenset(), lambda text, _: int(text)),
    "float": ContentKind(frozenset(), lambda text, _: float(text)),
    "bool": ContentKind(frozenset(), _bool),
    "json": ContentKind(frozenset({"unquoted_keys", "string_delims", "allow_non_json", "strip"}), _json),
    "xml-inline": ContentKind(frozenset({"tag_pattern", "value_parser", "merge_duplicates"}), _tags),
    "kv-lines": ContentKind(frozenset({"line_sep", "kv_sep", "value_parser", "strip"}), _lines),
}


def _check_delims(delims: Any) -> None:
    is_list = isinstance(delims, list) and len(delims) <= _MAX_DELIMS
    if not is_list or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(one, str) and one for one in pair)
        for pair in delims
    ):
        raise ContentError(f"string_delims must be at most {_MAX_DELIMS} pairs of strings")


def _check_value_parser(parser: Any, depth: int = 0) -> None:
    if not isinstance(parser, dict) or parser.get("name", "text") not in CONTENTS or depth > 1:
        raise ContentError(f"value_parser must name one of {', '.join(CONTENTS)}, and args")
    CONTENTS[parser.get("name", "text")].check(parser.get("args", {}))


def _types(schema: Any, depth: int) -> tuple[str, ...]:
    """Return the types that a schema names, in order. Only the first levels of its alternatives are examined."""
    if not isinstance(schema, dict) or depth > 3:
        return ()
    declared = schema.get("type")
    types = [one for one in (declared if isinstance(declared, list) else [declared]) if isinstance(one, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices[:32] if isinstance(choices, list) else ():
            types += _types(choice, depth + 1)
    return (*types, "null") if schema.get("nullable") and "null" not in types else tuple(types)


def _coerced_text(text: str, types: tuple[str, ...]) -> Any:
    for name in types:
        try:
            return _COERCIONS[name](text)
        except (KeyError, ValueError, OverflowError, RecursionError):
            continue
    return text


def _as_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _as_number(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(text)
    return int(number) if number.is_integer() and "." not in text else number


def _as_boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]


def _as_null(text: str) -> None:
    if text.strip() not in ("null", "None"):
        raise ValueError(text)


def _as_container(kind: type) -> Callable[[str], Any]:
    def decode(text: str) -> Any:
        value = json.loads(text)
        if not isinstance(value, kind):
            raise ValueError(text)
        return value

    return decode


_COERCIONS: Mapping[str, Callable[[str], Any]] = {
    "integer": _as_integer,
    "number": _as_number,
    "boolean": _as_boolean,
    "null": _as_null,
    "object": _as_container(dict),
    "array": _as_container(list),
}
