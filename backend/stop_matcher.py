"""Stop strings found in text that arrives in pieces."""

from typing import Self


class StopMatcher:
    """Passes text through until a stop string is complete, holding back only what could still become one.

    The stop that is complete first ends the text; of two complete at the same character, the longer. This does not
    depend on how the text is cut into pieces. Work is amortised O(1) for each character, however many stops there are,
    and at most the longest stop less one character is held back.

    The search is that of Aho and Corasick (1975). Its automaton is made only where the text goes, so that neither a
    request with long stops nor one with many pays for what never matches.
    """

    __slots__ = ("_held", "_include_stop", "_node", "stopped")

    def __init__(self, stops: tuple[str, ...], include_stop: bool = False) -> None:
        self.stopped: str | None = None
        self._node = _Node.root(stops)
        self._held = ""
        self._include_stop = include_stop

    def push(self, text: str) -> str:
        """The text that is now safe to send; nothing more once `stopped` is set."""
        if self.stopped is not None:
            return ""
        node = self._node
        for position, char in enumerate(text):
            node = node.after(char)
            if node.stop is not None:
                return self._stop(self._held + text[: position + 1], node.stop)
        self._node = node
        text = self._held + text
        safe = len(text) - node.depth
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """The text held back, when the end comes before a stop."""
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str, stop: str) -> str:
        self.stopped, self._held = stop, ""
        return text if self._include_stop else text[: len(text) - len(stop)]


class _Node:
    """The text so far ends with the first `depth` characters of `_stops`, and with no longer beginning of any stop."""

    __slots__ = ("_children", "_root", "_shorter", "_stops", "depth", "stop")

    def __init__(self, stops: list[str], depth: int, shorter: Self | None, root: Self | None) -> None:
        """`shorter` is the node of the longest proper suffix that begins a stop; the root has none."""
        self.depth = depth
        self.stop: str | None = next((stop for stop in stops if len(stop) == depth), shorter.stop if shorter else None)
        self._stops = stops
        self._shorter = shorter
        self._root = root or self
        self._children: dict[str, Self | None] = {}  # by the next character, as far as they were asked for

    @classmethod
    def root(cls, stops: tuple[str, ...]) -> Self:
        return cls(list(stops), 0, None, None)

    def after(self, char: str) -> Self:
        """The node one character on."""
        node: Self | None = self
        while node is not None:
            if (child := node._child(char)) is not None:
                return child
            node = node._shorter
        return self._root

    def _child(self, char: str) -> Self | None:
        """The node of these stops' beginning and `char`; None where no stop goes on so."""
        try:
            return self._children[char]
        except KeyError:
            child = self._children[char] = self._make_child(char)
            return child

    def _make_child(self, char: str) -> Self | None:
        depth = self.depth
        stops = [stop for stop in self._stops if len(stop) > depth and stop[depth] == char]
        if not stops:
            return None
        shorter = self._shorter.after(char) if self._shorter else None
        return type(self)(stops, depth + 1, shorter or self._root, self._root)
