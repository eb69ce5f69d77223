"""A response template divides the text of an answer into a message's reasoning, calls and content.

The format is that of `response_template` in a checkpoint's tokenizer_config.json, which transformers reads since 5.13:
fields with literal or regular delimiters, the kind of content between them, and a transform that makes a call of it. A
field without an opening delimiter takes the text of no other field.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.text.response_templates.contents import CONTENTS, ContentError
from backend.text.response_templates.pattern import Pattern
from backend.text.response_templates.pattern_syntax import PatternError, literal_runs
from backend.text.response_templates.scanner import DelimiterSet, Scanner

CONTENT = ("content",)
REASONING = ("reasoning_content", "reasoning", "thinking")
CALLS = ("tool_calls",)
MAX_FIELDS = 32
MAX_LITERALS = 32  # of one delimiter
_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each",
}  # fmt: skip
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class ResponseTemplateError(ValueError):
    """The template is malformed. The message says where, and what is expected."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """The places of a call's parts in the transform of a field, as paths of keys."""

    name: tuple[str, ...]  # ("name",), a group of the delimiter, or ("content", "name"), a key of the body
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResponseField:
    """One kind of region of an answer."""

    name: str
    open: Pattern | None  # None: it takes the text of no other field
    close: Pattern | None  # None: it continues to the end
    content: str  # the kind of its text; see `contents`
    args: Mapping[str, Any]
    join: str | None
    transform: Any
    is_each: bool  # the content is a list, and each item is transformed
    shape: CallShape | None  # of a field of calls

    @property
    def strips(self) -> bool:
        return bool(self.args.get("strip", True))


class ResponseTemplate:
    """A checked template. Raises `ResponseTemplateError`."""

    def __init__(self, source: Mapping[str, Any]) -> None:
        _check_keys("response_template", source, _TEMPLATE_KEYS)
        if source.get("version", 1) != 1:
            raise ResponseTemplateError(f"response_template.version is {source['version']!r}; 1 is supported")
        fields = source.get("fields")
        if not isinstance(fields, dict) or not 1 <= len(fields) <= MAX_FIELDS:
            raise ResponseTemplateError(f"response_template.fields must be an object of 1 to {MAX_FIELDS} fields")
        self.fields = tuple(_field(name, field) for name, field in fields.items())
        implicit = [field for field in self.fields if field.open is None]
        if len(implicit) > 1:
            names = ", ".join(field.name for field in implicit)
            raise ResponseTemplateError(
                f"response_template.fields: only one may lack open and open_pattern, not {names}"
            )
        self.implicit = implicit[0] if implicit else None
        anchor = _delimiter("response_template", source, "start_anchor", "start_anchor_pattern")
        if anchor is None:
            raise ResponseTemplateError("response_template must have start_anchor or start_anchor_pattern")
        self._anchor, self.anchor_literals = anchor, _literals("response_template", source, "start_anchor")
        self._outside_sets = {with_calls: self._outside(with_calls) for with_calls in (False, True)}
        self._closes = {
            field.name: DelimiterSet([field.close]) if field.close else DelimiterSet([]) for field in self.fields
        }

    def field(self, names: tuple[str, ...]) -> ResponseField | None:
        """Return the first field that has one of these names."""
        for field in self.fields:
            if field.name in names:
                return field
        return None

    def outside(self, with_calls: bool) -> tuple[DelimiterSet, tuple[ResponseField | None, ...]]:
        """Return the delimiters outside of all explicit regions, and the field that each opens; None: it closes the
        region without an opening delimiter.
        """
        return self._outside_sets[with_calls]

    def inside(self, field: ResponseField) -> DelimiterSet:
        """Return the delimiters within an explicit region."""
        return self._closes[field.name]

    def begun(self, prompt: str) -> str:
        """Return the part of the answer that a prompt holds: all after the last anchor, "" if there is none."""
        if self.anchor_literals:
            ends = [at + len(one) for one in self.anchor_literals if (at := prompt.rfind(one)) >= 0]
            return prompt[max(ends, default=len(prompt)) :]
        return _after_last(self._anchor, prompt[-_ANCHOR_TAIL_CHARS:])

    def needs(self, text: str) -> bool:
        """Return True if a special token's text may be part of a delimiter."""
        delimiters = [one for field in self.fields for one in (field.open, field.close) if one]
        return any(text in run for one in delimiters for run in literal_runs(one.node))

    def _outside(self, with_calls: bool) -> tuple[DelimiterSet, tuple[ResponseField | None, ...]]:
        opened: list[ResponseField | None] = []
        patterns = []
        for field in sorted(self.fields, key=lambda field: field.name):
            if field.open is not None and (with_calls or field.name not in CALLS):
                opened.append(field)
                patterns.append(field.open)
        if self.implicit is not None and self.implicit.close is not None:
            opened.append(None)
            patterns.append(self.implicit.close)
        return DelimiterSet(patterns), tuple(opened)


_ANCHOR_TAIL_CHARS = 4096  # of the end of a prompt in which an anchor's expression is searched for


def _after_last(anchor: Pattern, text: str) -> str:
    scanner, after = Scanner(DelimiterSet([anchor])), ""
    scanner.text = text
    while (found := scanner.find() or scanner.end_text()) is not None:
        scanner.take(max(found.end, 1))
        scanner.look_for(DelimiterSet([anchor]))
        after = scanner.text
    return after


def _field(name: Any, source: Any) -> ResponseField:
    where = f"response_template.fields.{name}"
    _check_keys(where, source, _FIELD_KEYS)
    content, args = source.get("content", "text"), source.get("content_args", {})
    if content not in CONTENTS:
        raise ResponseTemplateError(f"{where}.content is {content!r}; one of {', '.join(CONTENTS)} is expected")
    try:
        CONTENTS[content].check(args)
    except ContentError as error:
        raise ResponseTemplateError(f"{where}.content_args: {error}") from None
    join, transform = source.get("join"), source.get("transform")
    if join is not None and not (isinstance(join, str) and source.get("repeats")):
        raise ResponseTemplateError(f"{where}.join must be a string, of a field that repeats")
    is_each = source.get("transform_each", False)
    if is_each not in (True, False) or (is_each and transform is None):
        raise ResponseTemplateError(f"{where}.transform_each must be true or false, and needs a transform")
    field = ResponseField(
        name=name,
        open=_delimiter(where, source, "open", "open_pattern"),
        close=_delimiter(where, source, "close", "close_pattern"),
        content=content,
        args=args,
        join=join,
        transform=transform,
        is_each=is_each,
        shape=_shape(where, transform) if name in CALLS else None,
    )
    _check_transform(where, transform)
    return field


def _shape(where: str, transform: Any) -> CallShape:
    """Return where a call's name and arguments come from. Raises `ResponseTemplateError` if the transform does not show
    it.
    """
    function = "{content.function}" if transform is None else transform
    if isinstance(function, dict):
        function = function.get("function", function)
    if isinstance(function, str):
        path = _path(function)
        name, arguments = (path and (*path, "name")), (path and (*path, "arguments"))
    elif isinstance(function, dict):
        name, arguments = _path(function.get("name")), _path(function.get("arguments"))
    else:
        name = arguments = None
    if name is None or arguments is None:
        raise ResponseTemplateError(
            f"{where}.transform must say with placeholders what a call's name and arguments are"
        )
    return CallShape(name, arguments)


def _path(text: Any) -> tuple[str, ...] | None:
    found = _PLACEHOLDER.fullmatch(text) if isinstance(text, str) else None
    return tuple(found[1].split(".")) if found else None


def _check_transform(where: str, transform: Any) -> None:
    """Raise `ResponseTemplateError` for a string that holds a placeholder beside other text."""
    match transform:
        case dict():
            for value in transform.values():
                _check_transform(where, value)
        case list():
            for value in transform:
                _check_transform(where, value)
        case str() if _PLACEHOLDER.search(transform) and not _PLACEHOLDER.fullmatch(transform):
            raise ResponseTemplateError(f"{where}.transform: {transform!r} mixes a placeholder with other text")


def _check_keys(where: str, source: Any, keys: set[str]) -> None:
    if not isinstance(source, dict):
        raise ResponseTemplateError(f"{where} must be an object")
    if unknown := sorted(set(map(str, source)) - keys):
        raise ResponseTemplateError(f"{where} has keys that are not known: {', '.join(unknown)}")


def _delimiter(where: str, source: Mapping[str, Any], literal: str, expression: str) -> Pattern | None:
    if literal in source and expression in source:
        raise ResponseTemplateError(f"{where} must have {literal} or {expression}, not both")
    try:
        if expression in source:
            if not isinstance(source[expression], str):
                raise ResponseTemplateError(f"{where}.{expression} must be a string")
            return Pattern(source[expression])
        literals = _literals(where, source, literal)
        if not literals:
            return None
        longest_first = sorted(literals, key=len, reverse=True)
        return Pattern("|".join(map(re.escape, longest_first))) if len(literals) > 1 else Pattern.literal(literals[0])
    except PatternError as error:
        raise ResponseTemplateError(f"{where}.{expression if expression in source else literal}: {error}") from None


def _literals(where: str, source: Mapping[str, Any], key: str) -> list[str]:
    value = source.get(key)
    if value is None:
        return []
    literals = [value] if isinstance(value, str) else value
    if (
        not isinstance(literals, list)
        or not 1 <= len(literals) <= MAX_LITERALS
        or not all(isinstance(one, str) and one for one in literals)
    ):
        raise ResponseTemplateError(
            f"{where}.{key} must be a string, or a list of 1 to {MAX_LITERALS}, none of them empty"
        )
    return list(dict.fromkeys(literals))
