"""Problems of policy files: each has its place, its field and a message."""

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from string import ascii_lowercase, digits
from typing import NamedTuple

MAX_VALUE_CHARS = 60  # characters of a value that an error repeats
MAX_PROBLEMS = 100
MAX_COMPARED_WORDS = 500  # words compared letter by letter
_TYPED = f"{ascii_lowercase}{digits}-_."


class Mark(NamedTuple):
    """A place in a file, counted from 1; line 0 is the file as a whole."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """A mistake. `path` is the field by its names from the top, such as tenants.acme.weight; empty if it concerns none
    in particular.
    """

    mark: Mark
    path: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (str(self.mark), self.path, self.message) if part)


class TooManyProblems(Exception):
    """A file has more problems than anyone will read."""


class Problems:
    """The problems found so far. `add` raises `TooManyProblems` beyond `MAX_PROBLEMS`."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, mark: Mark, path: str, message: str) -> None:
        if len(self.found) == MAX_PROBLEMS:
            raise TooManyProblems
        self.found.append(Problem(mark, path, message))


def quoted(text: str) -> str:
    """A value for an error message: short, and without control characters."""
    shown = text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."
    return json.dumps(shown, ensure_ascii=not shown.isprintable())


def did_you_mean(text: str, known: Collection[str]) -> str:
    """The end of a sentence about an unknown word; empty without a similar known word."""
    if len(known) > MAX_COMPARED_WORDS:
        near = next((slip for slip in _slips(text[:MAX_VALUE_CHARS]) if slip in known), None)
    else:
        words = {word.lower(): word for word in known}
        found = get_close_matches(text[:MAX_VALUE_CHARS].lower(), list(words), n=1, cutoff=0.6)
        near = words[found[0]] if found else None
    return f"; did you mean {quoted(near)}?" if near else ""


def _slips(text: str) -> Iterator[str]:
    """Yield the words one typing error away from this one."""
    halves = [(text[:at], text[at:]) for at in range(len(text) + 1)]
    yield from (text.lower(), text.replace("_", "-"), text.replace("-", "_"))
    yield from (before + after[1:] for before, after in halves if after)
    yield from (before + after[1] + after[0] + after[2:] for before, after in halves if len(after) > 1)
    yield from (before + one + after[1:] for before, after in halves if after for one in _TYPED)
    yield from (before + one + after for before, after in halves for one in _TYPED)


def listed(words: Iterable[str]) -> str:
    """Join words to a list such as "a, b or c"."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last
