"""The parser turns an answer's text into a message as it comes: deltas of content, of reasoning and of calls."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from backend.text.response_templates.calls import (
    CallArguments,
    CallEvent,
    CallReader,
    Properties,
    call_reader,
)
from backend.text.response_templates.held_space import HeldSpace
from backend.text.response_templates.scanner import DelimiterSet, Found, Scanner
from backend.text.response_templates.template import CALLS, CONTENT, REASONING, ResponseField, ResponseTemplate

_EMPTY_IN_A_ROW = 4  # delimiters that match no character, at one place


class Part(Enum):
    """The part of a message that a text belongs to."""

    CONTENT = "content"
    REASONING = "reasoning"


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the content or of the reasoning."""

    part: Part
    text: str


Event = TextDelta | CallEvent


class ResponseParser:
    """Parses one answer. Any split of its text gives the same message, and each token costs a few microseconds.

    A region of JSON ends where transformers ends it, except that a delimiter inside a string ends nothing.

    Regions of calls are recognised if the request offers tools; otherwise their text is content. Regions of fields that
    a message does not have are dropped, as is text between regions that no field takes: it belongs to the format. If a
    field of text comes several times, its texts follow one another.
    """

    def __init__(
        self, template: ResponseTemplate, begun: str = "", tools: Properties | None = None, with_calls: bool = False
    ) -> None:
        """`begun` is the part of the message that the prompt has already, as `ResponseTemplate.begun` returns it: a
        prefill, or an open block of reasoning. It is not part of the deltas. `tools` are the schemas of arguments, by
        tool.
        """
        self._template = template
        self._tools = tools or {}
        self._with_calls = with_calls
        self._texts = {part: _PartText(part) for part in Part}
        self._num_empty = 0
        self._field: ResponseField | None = None  # of the open explicit region
        self._region = self._outside()
        delimiters, self._opened = template.outside(with_calls)
        self._scanner = Scanner(delimiters)
        self.feed(begun)

    @property
    def is_in_call(self) -> bool:
        """True if a region of calls is open."""
        return self._field is not None and self._field.name in CALLS

    @property
    def may_reason(self) -> bool:
        """True if the message may have reasoning."""
        return self._template.field(REASONING) is not None

    @property
    def is_reasoning(self) -> bool:
        """True if the next text is reasoning, unless a delimiter comes first."""
        field = self._field or self._template.implicit
        return field is not None and field.name in REASONING

    def feed(self, text: str) -> list[Event]:
        """Return the message's deltas from the next piece of text."""
        self._scanner.text += text
        return self._merged(self._advance())

    def end_text(self, is_cut: bool = False) -> list[Event]:
        """End the text, and return the last deltas. `is_cut`: the answer has reached its limit of length."""
        events = self._advance()
        while (found := self._scanner.end_text()) is not None and found.end:
            events += self._pass(found)
            events += self._advance()
        events += self._region.add_text(self._scanner.take(len(self._scanner.text)))
        events += self._region.close("", is_cut)
        return self._merged(events)

    def _advance(self) -> list[Event]:
        """Read all delimiters that are certain, and the text that belongs to none."""
        events: list[Event] = []
        while (found := self._scanner.find()) is not None:
            events += self._pass(found)
        if count := self._scanner.num_free:
            events += self._region.add_text(self._scanner.take(count))
        return events

    def _pass(self, found: Found) -> list[Event]:
        """Read the text before a delimiter and the delimiter."""
        scanner = self._scanner
        self._num_empty = 0 if found.end else self._num_empty + 1
        if self._num_empty > _EMPTY_IN_A_ROW:
            self._num_empty = 0
            events = self._region.add_text(scanner.take(1))
            scanner.look_for(self._delimiters())
            return events
        events = self._region.add_text(scanner.take(found.start))
        delimiter = scanner.take(found.end - found.start)
        if self._region.is_in_string:
            scanner.look_for(self._delimiters())
            return [*events, *self._region.add_text(delimiter)]
        events += self._region.close(delimiter, is_cut=False)
        self._field = None if self._field else self._opened[found.index]
        self._region = self._inside(self._field, delimiter, found) if self._field else self._outside()
        scanner.look_for(self._delimiters())
        return events

    def _delimiters(self) -> DelimiterSet:
        return self._template.inside(self._field) if self._field else self._template.outside(self._with_calls)[0]

    def _outside(self) -> "_Region":
        implicit = self._template.implicit
        return _TextRegion(self._text(implicit), implicit, is_explicit=False)

    def _inside(self, field: ResponseField, delimiter: str, found: Found) -> "_Region":
        if field.name in CALLS:
            reader = call_reader(field, found.groups, self._tools)
            return _CallRegion(reader, delimiter, self._texts[Part.CONTENT])
        return _TextRegion(self._text(field), field, is_explicit=True)

    def _text(self, field: ResponseField | None) -> "_PartText | None":
        part = _part(field)
        return None if part is None else self._texts[part]

    def _merged(self, events: list[Event]) -> list[Event]:
        merged: list[Event] = []
        for event in events:
            last = merged[-1] if merged else None
            match last, event:
                case TextDelta(), TextDelta() if last.part is event.part:
                    merged[-1] = TextDelta(event.part, last.text + event.text)
                case CallArguments(), CallArguments():
                    merged[-1] = CallArguments(last.text + event.text)
                case _:
                    merged.append(event)
        return merged


def _part(field: ResponseField | None) -> Part | None:
    name = field.name if field else None
    return Part.CONTENT if name in CONTENT else Part.REASONING if name in REASONING else None


class _PartText:
    """The text of one part of a message. Space around it is dropped unless its field says otherwise."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._strips = True
        self._is_inside = False  # text has come, before which space was dropped
        self._joint = ""  # precedes the next text
        self._held = HeldSpace()

    def begin_region(self, field: ResponseField, is_explicit: bool) -> None:
        """Begin a region of the part. An explicit region is a text of its own; another continues the text that was
        interrupted.
        """
        self._strips = field.strips
        if is_explicit and self._is_inside:
            self._joint = "\n" if field.join is None else field.join
            self._is_inside, self._held = False, HeldSpace()

    def add_text(self, text: str) -> list[Event]:
        if self._strips and not self._is_inside:
            text = text.lstrip()
        if not text:
            return []
        kept = self._held.push(text, text.rstrip() if self._strips else text)
        if not kept:
            return []
        kept, self._joint, self._is_inside = self._joint + kept, "", True
        return [TextDelta(self._part, kept)]


class _Region(Protocol):
    @property
    def is_in_string(self) -> bool: ...

    def add_text(self, text: str) -> list[Event]: ...

    def close(self, delimiter: str, is_cut: bool) -> list[Event]: ...


class _TextRegion:
    """A region whose text belongs to one part of the message, or to none."""

    def __init__(self, text: _PartText | None, field: ResponseField | None, is_explicit: bool) -> None:
        self._text = text
        self.is_in_string = False
        if text is not None and field is not None:
            text.begin_region(field, is_explicit)

    def add_text(self, text: str) -> list[Event]:
        return self._text.add_text(text) if self._text is not None and text else []

    def close(self, delimiter: str, is_cut: bool) -> list[Event]:
        return []


class _CallRegion:
    """A region of calls. Its text that is part of no call is content, with its delimiters if it holds no call at
    all.
    """

    def __init__(self, reader: CallReader, delimiter: str, content: _PartText) -> None:
        self._reader = reader
        self._delimiter = delimiter
        self._content = content
        self._has_begun = False

    @property
    def is_in_string(self) -> bool:
        return self._reader.is_in_string

    def add_text(self, text: str) -> list[Event]:
        return self._noted(self._reader.feed(text))

    def close(self, delimiter: str, is_cut: bool) -> list[Event]:
        events = self._noted(self._reader.close(is_cut))
        unread = self._reader.unread
        if not self._has_begun:
            return [*events, *self._content.add_text(self._delimiter + unread + delimiter)]
        return [*events, *self._content.add_text(unread)] if unread.strip() else events

    def _noted(self, events: list[CallEvent]) -> list[Event]:
        self._has_begun = self._has_begun or bool(events)
        return [*events]
