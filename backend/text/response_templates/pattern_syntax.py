"""The syntax of checkpoints' regular expressions: a small tree, parsed from the notation of Python's `re`.

Back-references, look-behind, possessive quantifiers and flags are refused by name, except "(?s)", which always applies:
a dot is any character. "^" is the very beginning of a text and "$" its end.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from sys import maxunicode

MAX_PATTERN_CHARS = 1000
MAX_REPEATS = 200  # of a counted repetition
_CLASSES = frozenset("dDwWsS")
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_HEX = {"x": 2, "u": 4, "U": 8}
_DIGITS = re.compile("[0-9a-fA-F]+").fullmatch


class PatternError(ValueError):
    """The expression is malformed, too large, or not supported. The message says which."""


@dataclass(frozen=True, slots=True)
class Character:
    """One character, which matches itself."""

    char: str


@dataclass(frozen=True, slots=True)
class CharClass:
    """One character of a set, as `re` spells it: ".", "\\s" or "[^>]"."""

    source: str


@dataclass(frozen=True, slots=True)
class Concat:
    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    options: tuple["Node", ...]  # the first is preferred


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` repetitions (None: any number), as many as possible if it is greedy."""

    part: "Node"
    least: int
    most: int | None
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    part: "Node"


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Text that has to follow, and does not belong to the match."""

    part: "Node"


@dataclass(frozen=True, slots=True)
class Start:
    """The very beginning of the text."""


@dataclass(frozen=True, slots=True)
class End:
    """The very end of the text."""


Node = Character | CharClass | Concat | Alternation | Repeat | Group | LookAhead | Start | End


def read(source: str) -> tuple[Node, tuple[str, ...]]:
    """Return the tree of an expression and the names of its groups. Raises `PatternError`."""
    if len(source) > MAX_PATTERN_CHARS:
        raise PatternError(f"it has {len(source):,} characters, at most {MAX_PATTERN_CHARS:,} are read")
    reader = _Reader(source)
    return reader.read(), tuple(reader.groups)


class _Reader:
    """Parses the source of an expression by recursive descent."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self.groups: list[str] = []

    def read(self) -> Node:
        if self._source.startswith("(?s)"):  # which always applies
            self._at = 4
        node = self._choice()
        if self._at < len(self._source):
            raise self._error("an unmatched parenthesis")
        return node

    def _choice(self) -> Node:
        options = [self._concat()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._concat())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _concat(self) -> Node:
        parts = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._quantified(self._atom()))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def _quantified(self, node: Node) -> Node:
        char = self._peek()
        bounds = self._bounds(char) if char and char in "*+?{" else None
        if bounds is None:  # a brace that counts nothing stands for itself
            return node
        if isinstance(node, (LookAhead, Start, End)):
            raise self._error("a quantifier of nothing that can be repeated")
        is_greedy = not self._take("?")
        if (follows := self._peek()) and follows in "*+?":
            raise self._error("a possessive quantifier, or one of another")
        return Repeat(node, *bounds, is_greedy)

    def _bounds(self, char: str) -> tuple[int, int | None] | None:
        if char != "{":
            self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        found = _COUNT.match(self._source, self._at)
        if found is None:
            return None
        self._at = found.end()
        least = int(found[1] or 0)
        most = least if found[2] is None else int(found[3]) if found[3] else None
        if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
            raise self._error(f"a repetition that is not between 0 and {MAX_REPEATS}")
        return least, most

    def _atom(self) -> Node:
        char = self._source[self._at]
        self._at += 1
        match char:
            case "(":
                return self._group()
            case "[":
                return self._set()
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise self._error("a quantifier of nothing")
        return _ATOMS.get(char) or Character(char)

    def _group(self) -> Node:
        name = None
        if self._take("?:"):
            pass
        elif self._take("?P<"):
            end = self._source.find(">", self._at)
            name = self._source[self._at : max(end, self._at)]
            if not name.isidentifier():
                raise self._error("a group without a name")
            if name not in self.groups:  # alternatives may share a name
                self.groups.append(name)
            self._at = end + 1
        elif self._take("?="):
            return LookAhead(self._closed())
        elif self._peek() == "?":
            raise self._error("an extension group (look-around, flags or a back-reference)")
        part = self._closed()
        return part if name is None else Group(name, part)

    def _closed(self) -> Node:
        node = self._choice()
        if self._peek() != ")":
            raise self._error("a parenthesis that is not closed")
        self._at += 1
        return node

    def _set(self) -> Node:
        start = self._at - 1
        at = self._at + (self._peek() == "^")
        at += self._source[at : at + 1] == "]"
        while at < len(self._source) and self._source[at] != "]":
            at += 2 if self._source[at] == "\\" else 1
        self._at = at + 1
        source = self._source[start : self._at]
        predicate(source)
        return CharClass(source)

    def _escape(self) -> Node:
        char = self._peek()
        self._at += 1
        if char in _CLASSES and char:
            return CharClass(f"\\{char}")
        if char in _CONTROLS:
            return Character(_CONTROLS[char])
        if char in _HEX:
            digits = self._source[self._at : self._at + _HEX[char]]
            self._at += _HEX[char]
            if len(digits) < _HEX[char] or not _DIGITS(digits) or (code := int(digits, 16)) > maxunicode:
                raise self._error("an escape without its digits")
            return Character(chr(code))
        if char == "A":
            return Start()
        if char == "Z":
            return LookAhead(End())
        if not char or char.isalnum():
            raise self._error(f"the escape \\{char}")
        return Character(char)

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        found = self._source.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _error(self, what: str) -> PatternError:
        return PatternError(f"{self._source!r} has {what} near character {self._at}, which is not supported")


_ATOMS: Mapping[str, Node] = {
    ".": CharClass("."),
    "^": Start(),
    "$": LookAhead(Concat((Repeat(Character("\n"), 0, 1, True), End()))),
}
_COUNT = re.compile(r"\{(\d{0,6})(,(\d{0,6}))?\}(?<!\{\})(?<!\{,\})")


@lru_cache(maxsize=256)
def predicate(source: str) -> Callable[[str], object]:
    """Return a predicate for the characters of a set. A single character needs no backtracking."""
    try:
        return re.compile(source, re.DOTALL).fullmatch
    except re.error as error:
        raise PatternError(f"{source!r} is no set of characters: {error}") from None


def literal_runs(node: Node) -> Iterator[str]:
    """Yield the longest literal texts of an expression."""
    match node:
        case Character(char):
            yield char
        case Concat(parts):
            run = ""
            for part in parts:
                if isinstance(part, Character):
                    run += part.char
                    continue
                yield run
                run = ""
                yield from literal_runs(part)
            yield run
        case Alternation(options):
            for option in options:
                yield from literal_runs(option)
        case Repeat(part) | Group(_, part) | LookAhead(part):
            yield from literal_runs(part)
