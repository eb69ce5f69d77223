"""Finds the next of several delimiters in text that comes in pieces, independent of where the pieces are cut."""

import re
from dataclasses import dataclass

from backend.text.response_templates.pattern import AHEAD_SLOT, Pattern, Saves

MAX_DELIMITER_CHARS = 1024  # of one delimiter; a longer beginning of a delimiter is text


@dataclass(frozen=True, slots=True)
class Found:
    """A delimiter: its index among the patterns, where it begins and ends in the scanner's text, and its groups."""

    index: int
    start: int
    end: int
    groups: dict[str, str]


class DelimiterSet:
    """Patterns that are searched for together. Of several matches the one counts that begins first, then the longest,
    then the one whose pattern stands first.
    """

    def __init__(self, patterns: list[Pattern]) -> None:
        self.patterns = patterns
        firsts = [pattern.first for pattern in patterns]
        self.first = re.compile("|".join(one or "" for one in firsts) or "(?!)", re.DOTALL).search
        self.firsts = [re.compile(first or "", re.DOTALL).match for first in firsts]


class _PatternSearch:
    """The search for one pattern: its threads in order of preference, and the match that no thread has overtaken."""

    __slots__ = ("_fresh", "_positions", "match", "pattern", "threads")

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.threads: tuple[int, ...] = ()
        self._positions: list[tuple[int, ...]] = []  # the saved positions of each thread, -1 for nothing
        self._fresh = (-1,) * (pattern.num_slots - 1)
        self.match: tuple[int, ...] | None = None  # its saved positions, the end in place of AHEAD_SLOT

    @property
    def pending_from(self) -> int | None:
        """The start of the match that may still come; None if none may."""
        return self._positions[0][0] if self.threads else None

    @property
    def held_from(self) -> int | None:
        """The start of the match that has come or may still come; None if there is none."""
        if self.threads:
            return self._positions[0][0]  # threads that may still overtake a match begin no later
        return None if self.match is None else self.match[0]

    def step(self, char: str, at: int, longest: int | None) -> None:
        """Read the character at place `at` of the text."""
        if self.match is not None and not self.threads:
            return
        begins = self.match is None
        if longest is not None and self.threads and at - self._positions[0][0] >= longest:
            self._drop_before(at - longest + 1)
        self.threads, sources, match = self.pattern.step(self.threads, char, begins, not at)
        if match is None and not sources:
            self._positions = []
            return
        old = [*self._positions, (at, *self._fresh)]  # the new thread's last, for its index of -1
        if match is not None:
            source, offset, saves = match
            self._keep(_saved(old[source], saves, at), at + offset)
        self._positions = [_saved(old[source], saves, at) if saves else old[source] for source, saves in sources]

    def end_text(self, at: int) -> None:
        """End the text after `at` characters."""
        found = self.pattern.at_end(self.threads)
        if found is not None:
            index, saves = found
            self._keep(_saved(self._positions[index], saves, at), at)
        self.threads, self._positions = (), []

    def _keep(self, positions: tuple[int, ...], end: int) -> None:
        ahead = positions[AHEAD_SLOT]
        self.match = (positions[0], end if ahead < 0 else ahead, *positions[2:])

    def _drop_before(self, start: int) -> None:
        kept = [index for index, positions in enumerate(self._positions) if positions[0] >= start]
        self.threads = tuple([self.threads[index] for index in kept])
        self._positions = [self._positions[index] for index in kept]


def _saved(positions: tuple[int, ...], saves: Saves, at: int) -> tuple[int, ...]:
    changed = list(positions)
    for slot, offset in saves:
        changed[slot] = at + offset
    return tuple(changed)


class Scanner:
    """Searches for the delimiters of a set. `text` is the pushed text that was not taken yet.

    `find` returns the first delimiter as soon as it is certain that it is the first; if there is none, `num_free`
    characters of the text can no longer belong to one. Both depend on the text alone, not on how it was pushed.
    """

    __slots__ = ("_at", "_base", "_delimiters", "_is_idle", "_longest", "_pairs", "_searches", "text")

    def __init__(self, delimiters: DelimiterSet, longest: int | None = MAX_DELIMITER_CHARS) -> None:
        self.text = ""
        self._base = 0  # characters that were taken; positions count them too
        self._longest = longest
        self.look_for(delimiters)

    def look_for(self, delimiters: DelimiterSet) -> None:
        """Search for these delimiters, from the beginning of the text that is left."""
        self._delimiters = delimiters
        self._searches = [_PatternSearch(pattern) for pattern in delimiters.patterns]
        self._pairs = list(zip(self._searches, delimiters.firsts, strict=True))
        self._is_idle = True
        self._at = self._base

    def find(self) -> Found | None:
        text, base, end = self.text, self._base, self._base + len(self.text)
        while self._at < end:
            if self._is_idle and self._at:
                candidate = self._delimiters.first(text, self._at - base)
                if candidate is None:
                    self._at = end
                    break
                self._at = base + candidate.start()
            if self._step(text[self._at - base]) and (found := self._decided()) is not None:
                return found
        return None

    def end_text(self) -> Found | None:
        """Return the first delimiter if no more text comes, after `find` returned None."""
        for search in self._searches:
            search.end_text(self._at)
        return self._decided()

    @property
    def num_free(self) -> int:
        held = [start for search in self._searches if (start := search.held_from) is not None]
        return min(held, default=self._at) - self._base

    def take(self, count: int) -> str:
        """Remove and return the first `count` characters of the text."""
        taken, self.text = self.text[:count], self.text[count:]
        self._base += len(taken)
        return taken

    def _step(self, char: str) -> bool:
        """Read a character. Returns True if there is a match."""
        at, is_idle, has_match = self._at, True, False
        for search, first in self._pairs:
            if search.threads or search.match is not None or not at or first(char):
                search.step(char, at, self._longest)
                has_match = has_match or search.match is not None
                is_idle = is_idle and not search.threads
        self._at, self._is_idle = at + 1, is_idle and not has_match
        return has_match

    def _decided(self) -> Found | None:
        """Return the first match, unless a match that begins no later may still come."""
        best: tuple[int, int, int] | None = None
        for index, search in enumerate(self._searches):
            if search.match is not None and search.pending_from is None:
                start, end = search.match[:2]
                best = min(best or (start, start - end, index), (start, start - end, index))
        if best is None:
            return None
        start, negative_length, index = best
        if any(search.pending_from is not None and search.pending_from <= start for search in self._searches):
            return None
        base, search = self._base, self._searches[index]
        return Found(index, start - base, start - negative_length - base, self._groups(search))

    def _groups(self, search: _PatternSearch) -> dict[str, str]:
        assert search.match is not None
        base, spans = self._base, zip(search.match[2::2], search.match[3::2], strict=True)
        return {
            name: self.text[start - base : end - base]
            for name, (start, end) in zip(search.pattern.groups, spans, strict=True)
            if 0 <= start <= end
        }
