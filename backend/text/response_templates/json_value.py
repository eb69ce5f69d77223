"""Finds where a JSON value ends in text that comes in pieces, without validating the value."""

import re

_IN_STRING = re.compile(r'[^"\\]*')
_IN_CONTAINER = re.compile(r'[^"{}\[\]]*')
_IN_SCALAR = re.compile(r"[^\s,\]}]*")


class JsonValue:
    """One value, from its first character on. `is_done`: its last character has come."""

    __slots__ = ("_depth", "_escapes", "_in_string", "_is_broken", "_is_scalar", "is_done")

    def __init__(self, first: str) -> None:
        """`first` is the value's first character, which is not pushed."""
        self._depth = int(first in "{[")
        self._in_string = first == '"'
        self._is_scalar = not self._depth and not self._in_string
        self._escapes = False
        self._is_broken = False
        self.is_done = False

    @property
    def is_in_string(self) -> bool:
        """True if the next text belongs to a string; a string with a line break in it is malformed, and does not
        count.
        """
        return self._in_string and not self._is_broken

    def advance(self, text: str, at: int) -> int:
        """Return where the value ends in a text that continues it from `at`: the text's length if it does not end
        there.
        """
        while at < len(text) and not self.is_done:
            if self._escapes:
                self._escapes = False
                at += 1
            elif self._in_string:
                at = self._push_string(text, at)
            elif self._is_scalar:
                at = _end(_IN_SCALAR, text, at)
                self.is_done = at < len(text)
            else:
                at = self._push_container(text, at)
        return at

    def _push_string(self, text: str, at: int) -> int:
        start, at = at, _end(_IN_STRING, text, at)
        self._is_broken = self._is_broken or "\n" in text[start:at]
        if at < len(text):
            self._escapes = text[at] == "\\"
            self._in_string = self._escapes
            self.is_done = not self._in_string and not self._depth
            at += 1
        return at

    def _push_container(self, text: str, at: int) -> int:
        at = _end(_IN_CONTAINER, text, at)
        if at < len(text):
            char = text[at]
            self._in_string, self._is_broken = char == '"', False
            self._depth += (char in "{[") - (char in "}]")
            self.is_done = not self._depth
            at += 1
        return at


def _end(characters: re.Pattern[str], text: str, at: int) -> int:
    """Return where a run of these characters ends; the run may be empty."""
    found = characters.match(text, at)
    return found.end() if found else at
