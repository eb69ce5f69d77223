"""Stop strings found in text that arrives in pieces."""


class StopMatcher:
    """Passes text through until a stop string is complete, holding back only what could still become one.

    The stop that is complete first ends the text; of two complete at the same character, the longer. This does not
    depend on how the text is cut into pieces. Work is amortised O(stops) for each character, and at most the longest
    stop less one character is held back.
    """

    __slots__ = ("_held", "_include_stop", "_patterns", "stopped")

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        self.stopped: str | None = None
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""
        self._include_stop = include_stop

    def push(self, text: str) -> str:
        """The text that is now safe to send; nothing more once `stopped` is set."""
        if self.stopped is not None:
            return ""
        ends = [pattern.feed(text) for pattern in self._patterns]
        text, already_held = self._held + text, len(self._held)
        end, stop = min(
            ((end, pattern.stop) for end, pattern in zip(ends, self._patterns, strict=True) if end >= 0),
            key=lambda match: (match[0], -len(match[1])),
            default=(-1, ""),
        )
        if end >= 0:
            return self._stop(text, already_held + end, stop)
        safe = len(text) - max(pattern.matched for pattern in self._patterns)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """The text held back, when the end comes before a stop."""
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str, end: int, stop: str) -> str:
        self.stopped, self._held = stop, ""
        return text[: end if self._include_stop else end - len(stop)]


class _Pattern:
    """The search of Knuth, Morris and Pratt (1977) for one stop; its table grows only as deep as text has matched."""

    __slots__ = ("_failure", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters of the stop that the text so far ends with
        self._failure = [0]  # [i]: the longest border of stop[: i + 1]

    def feed(self, text: str) -> int:
        """The index in `text` just after the stop's first occurrence, or -1."""
        position = 0
        while position < len(text):
            if not self.matched:
                position = text.find(self.stop[0], position)
                if position < 0:
                    return -1
            self.matched = self._advance(self.matched, text[position])
            position += 1
            if self.matched == len(self.stop):
                return position
            if self.matched > len(self._failure):
                self._failure.append(self._advance(self._failure[-1], self.stop[self.matched - 1]))
        return -1

    def _advance(self, matched: int, char: str) -> int:
        """The length matched after one more character."""
        while matched and self.stop[matched] != char:
            matched = self._failure[matched - 1]
        return matched + (self.stop[matched] == char)
