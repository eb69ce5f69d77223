"""Readers turn the text of a region of calls into calls: names as soon as they are known, and arguments as they come.

Text becomes a call once its name and the first character of its arguments have come. Later text is delivered as it was
written, even if it is malformed or cut short: nothing is repaired. Text that does not get that far is no call, and
stays content.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from backend.text.response_templates.contents import ContentError, TagReader, coerced, parse, tag_pattern, value_of
from backend.text.response_templates.held_space import HeldSpace
from backend.text.response_templates.json_value import JsonValue
from backend.text.response_templates.template import ResponseField

_SPACE = " \t\r\n"
_DIALECT = ("unquoted_keys", "string_delims", "allow_non_json")


@dataclass(frozen=True, slots=True)
class CallStart:
    """The next call of the message begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the last call's arguments, which are JSON when the call has ended."""

    text: str


CallEvent = CallStart | CallArguments
Properties = Mapping[str, Mapping[str, Any]]  # the schemas of arguments, by tool


class CallReader(Protocol):
    """Reads one region. `unread` is the text that was part of no call, when the region has ended."""

    @property
    def unread(self) -> str: ...

    @property
    def is_in_string(self) -> bool:
        """True if the next text belongs to a string, in which no delimiter ends the region."""
        ...

    def feed(self, text: str) -> list[CallEvent]: ...

    def close(self, is_cut: bool) -> list[CallEvent]:
        """End the region. `is_cut`: its text is not whole, because the answer has reached its limit in it."""
        ...


def call_reader(field: ResponseField, groups: Mapping[str, str], tools: Properties) -> CallReader:
    """Return the reader for a region of calls whose opening delimiter had these groups."""
    shape = field.shape
    assert shape is not None, "a field of calls has a shape"
    name = groups.get(shape.name[0]) if len(shape.name) == 1 else None
    is_plain = takes_plain_json(field)
    if name and shape.arguments == ("content",) and not field.is_each:
        if is_plain:
            return _ArgumentsReader(name)
        if field.content == "xml-inline" and not field.args.get("merge_duplicates"):
            return _TagCallReader(name, field, tools.get(name, {}))
    keys = object_keys(field)
    if is_plain and keys is not None:
        return _ObjectReader(*keys, is_list=field.is_each)
    return _WholeReader(field, groups, tools)


def takes_plain_json(field: ResponseField) -> bool:
    """Return True if the text of a region is standard JSON."""
    return field.content == "json" and not any(field.args.get(key) for key in _DIALECT)


def object_keys(field: ResponseField) -> tuple[str, str] | None:
    """Return the keys of a body's object for the name and the arguments, if both are in the body."""
    shape = field.shape
    assert shape is not None
    match field.is_each, shape.name, shape.arguments:
        case (False, ("content", name), ("content", arguments)) | (True, (name,), (arguments,)):
            return name, arguments
    return None


class _Unread:
    """Keeps text that was read and is part of no call. A piece costs by its own length, however much is kept."""

    def __init__(self) -> None:
        self._unread: list[str] = []

    @property
    def unread(self) -> str:
        return "".join(self._unread)


class _ArgumentsReader(_Unread):
    """The name is known, and the whole body is the arguments."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._has_begun = self._is_other = False  # the arguments have begun; other text has
        self._held = HeldSpace()
        self._value = JsonValue("{")

    @property
    def is_in_string(self) -> bool:
        return self._value.is_in_string

    def feed(self, text: str) -> list[CallEvent]:
        if not self._has_begun:
            self._unread.append(text)
            text = text.lstrip(_SPACE)
            self._is_other |= text != "" and not text.startswith("{")
            if not text or self._is_other:
                return []
            self._unread.clear()
            self._value.advance(text, 1)
        else:
            self._value.advance(text, 0)
        stripped = self._held.push(text, text.rstrip(_SPACE))
        events: list[CallEvent] = [] if self._has_begun else [CallStart(self._name)]
        self._has_begun = True
        return [*events, CallArguments(stripped)] if stripped else events

    def close(self, is_cut: bool) -> list[CallEvent]:
        return []


class _ReadState(Enum):
    LIST = auto()
    OBJECT = auto()  # before an object
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA = auto()  # after a value
    NEXT = auto()  # after an object
    DONE = auto()
    FAILED = auto()


_NEXT_STATE = {
    (_ReadState.LIST, "["): _ReadState.OBJECT,
    (_ReadState.COLON, ":"): _ReadState.VALUE,
    (_ReadState.COMMA, ","): _ReadState.KEY,
    (_ReadState.NEXT, ","): _ReadState.OBJECT,
}


class _ObjectReader(_Unread):
    """The body is an object with the name and the arguments under keys of its own, or a list of objects of this
    form.
    """

    def __init__(self, name_key: str, arguments_key: str, is_list: bool) -> None:
        super().__init__()
        self._name_key, self._arguments_key = name_key, arguments_key
        self._is_list = is_list
        self._at = _ReadState.LIST if is_list else _ReadState.OBJECT
        self._begin()

    def _begin(self) -> None:
        self._key = ""
        self._raw = ""  # the key or the value that is being read
        self._value = JsonValue("0")
        self._name: str | None = None
        self._early = ""  # arguments that came before the name
        self._has_arguments = False
        self._has_begun = False

    def feed(self, text: str) -> list[CallEvent]:
        events: list[CallEvent] = []
        at = start = 0
        while at < len(text) and not self._has_failed:
            if self._at in (_ReadState.IN_KEY, _ReadState.IN_VALUE):
                end = self._value.advance(text, at)
                self._take(text[at:end], events)
                at = end
            elif text[at] in _SPACE:
                at += 1
            else:
                self._step(text[at], events)
                at += not self._has_failed
            if self._has_begun and not self._has_failed:
                self._unread.clear()
                start = at
        self._unread.append(text[start:])
        return events

    def close(self, is_cut: bool) -> list[CallEvent]:
        if self._has_begun and not self._has_failed:
            self._unread.clear()
        return []

    @property
    def is_in_string(self) -> bool:
        return self._at in (_ReadState.IN_KEY, _ReadState.IN_VALUE) and self._value.is_in_string

    @property
    def _has_failed(self) -> bool:
        return self._at is _ReadState.FAILED

    def _step(self, char: str, events: list[CallEvent]) -> None:
        """Read one character between keys and values."""
        if (self._at, char) in _NEXT_STATE:
            self._at = _NEXT_STATE[self._at, char]
            return
        match self._at, char:
            case (_ReadState.OBJECT, "{"):
                self._begin()
                self._at = _ReadState.KEY
            case (_ReadState.KEY, '"'):
                self._at, self._value, self._raw = _ReadState.IN_KEY, JsonValue(char), char
            case (_ReadState.VALUE, _) if char not in ",:]}":
                self._at, self._value, self._raw = _ReadState.IN_VALUE, JsonValue(char), char
                if self._is_arguments and char != '"':
                    self._emit(char, events)
            case (_ReadState.COMMA, "}") | (_ReadState.KEY, "}") if self._has_begun:
                self._at = _ReadState.NEXT if self._is_list else _ReadState.DONE
            case (_ReadState.NEXT, "]") | (_ReadState.OBJECT, "]") if self._is_list:
                self._at = _ReadState.DONE
            case _:
                self._at = _ReadState.FAILED

    @property
    def _is_arguments(self) -> bool:
        return self._key == self._arguments_key and not self._has_arguments

    def _take(self, text: str, events: list[CallEvent]) -> None:
        """Read text of a key or of a value, and note where that ends."""
        is_done, is_key = self._value.is_done, self._at is _ReadState.IN_KEY
        if self._is_arguments and not is_key and self._raw[0] != '"':
            self._emit(text, events)
        else:
            self._raw += text
        if not is_done:
            return
        if is_key:
            self._key, self._at = _string(self._raw) or "", _ReadState.COLON
            return
        self._at = _ReadState.COMMA
        if self._is_arguments:
            self._has_arguments = True
            if self._raw[0] == '"':  # JSON in a string, as some models write it
                self._emit(_string(self._raw) or self._raw, events)
        elif self._key == self._name_key and self._name is None:
            self._name = _string(self._raw)
            if not self._name:
                self._at = _ReadState.FAILED
            elif self._early:
                self._emit("", events)

    def _emit(self, text: str, events: list[CallEvent]) -> None:
        if self._name is None:
            self._early += text
            return
        if not self._has_begun:
            self._has_begun = True
            events.append(CallStart(self._name))
            text = self._early + text
        if text:
            events.append(CallArguments(text))


def _string(raw: str) -> str | None:
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class _TagCallReader(_Unread):
    """The name is known, and each argument is a tag, which becomes JSON once it is complete."""

    def __init__(self, name: str, field: ResponseField, properties: Mapping[str, Any]) -> None:
        super().__init__()
        self._name = name
        self._args = field.args
        self._properties = properties
        self._tags = TagReader(tag_pattern(field.args))
        self._separator = "{"
        self._has_begun = False
        self.is_in_string = False

    def feed(self, text: str) -> list[CallEvent]:
        return [*self._start(), *self._written(self._tags.feed(text))]

    def close(self, is_cut: bool) -> list[CallEvent]:
        events = [*self._start(), *self._written(self._tags.end_text())]
        if not is_cut:
            events.append(CallArguments("{}" if self._separator == "{" else "}"))
        return events

    def _start(self) -> list[CallEvent]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [CallStart(self._name)]

    def _written(self, tags: Iterator[tuple[str, str]]) -> Iterator[CallEvent]:
        for key, raw in tags:
            try:
                value = value_of(raw, self._args)
            except ContentError:
                value = raw
            value = coerced(value, self._properties.get(key))
            yield CallArguments(f"{self._separator}{_dumps(key)}: {_dumps(value)}")
            self._separator = ", "


class _WholeReader(_Unread):
    """The body is read once it is whole."""

    def __init__(self, field: ResponseField, groups: Mapping[str, str], tools: Properties) -> None:
        super().__init__()
        self._field = field
        self._groups = groups
        self._tools = tools
        self.is_in_string = False

    def feed(self, text: str) -> list[CallEvent]:
        self._unread.append(text)
        return []

    def close(self, is_cut: bool) -> list[CallEvent]:
        try:
            value = parse(self._field.content, self.unread, self._field.args)
            items = value if self._field.is_each else [value]
            calls = [self._call(item) for item in items]
        except (ContentError, LookupError, TypeError):
            return []
        self._unread.clear()
        return [event for call in calls for event in call]

    def _call(self, item: Any) -> list[CallEvent]:
        """Return the events of one call. Raises `LookupError` or `TypeError` if a part is missing."""
        shape = self._field.shape
        assert shape is not None
        scope = {**self._groups, **item} if self._field.is_each else {**self._groups, "content": item}
        name, arguments = _at_path(scope, shape.name), _at_path(scope, shape.arguments)
        if not isinstance(name, str) or not name:
            raise TypeError(name)
        if isinstance(arguments, dict) and self._field.content != "json":
            properties = self._tools.get(name, {})
            arguments = {key: coerced(value, properties.get(key)) for key, value in arguments.items()}
        return [CallStart(name), CallArguments(arguments if isinstance(arguments, str) else _dumps(arguments))]


def _at_path(scope: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = scope
    for key in path:
        value = value[key]
    return value


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
