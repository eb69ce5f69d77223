"""Sections: mappings of a policy file, whose fields are read one by one, each problem noted at its place and path."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TypeVar

from quotas.policy.problems import Mark, Problems, did_you_mean, listed, quoted
from quotas.policy.yaml_nodes import Fields, Items, Node, Scalar, UnsupportedYaml

MAX_ITEMS = 256  # of a list

T = TypeVar("T")
W = TypeVar("W", bound=str)
Convert = Callable[[str], T]
"""Reads the text of a value. It raises `ValueError` with the end of a sentence that begins with the text."""

FOREIGN = {  # LiteLLM's words, and ours for the same
    "rpm": "limits: {requests: 600/min}",
    "tpm": "limits: {tokens: 100k/min}",
    "rpd": "limits: {requests: 20k/day}",
    "tpd": "limits: {tokens: 5M/day}",
    "max_parallel_requests": "limits: {concurrent_requests: 32}",
    "max_budget": "limits: {cost: 100/month}, in the currency of price, or limits: {tokens: 50M/month}",
    "budget_duration": "limits: {tokens: 50M/month}: the period stands behind the budget",
    "allowed_models": "models: [...]",
    "duration": "expires: '2031-01-31' on a key",
}

REMOVED = {"overload": "overload has one rule that nothing has to choose; delete it"}  # fields, and their replacements


class Section:
    """The mapping at `path`. Problems are added to `problems`, and the default is returned instead."""

    def __init__(self, fields: Fields, path: str, problems: Problems) -> None:
        self.mark = fields.mark
        self.path = path
        self._entries = fields.entries
        self._problems = problems

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def names(self) -> Collection[str]:
        return self._entries.keys()

    def refuse_unknown(self, known: Collection[str]) -> None:
        for name, (mark, _) in self._entries.items():
            if name not in known:
                near = _elsewhere(name) or did_you_mean(name, known) or f": the fields here are {', '.join(known)}"
                self.note(mark, self.path, f"{quoted(name)} is not a field{near}")

    def note(self, mark: Mark, path: str, message: str) -> None:
        self._problems.add(mark, path, message)

    def wrong(self, name: str, message: str) -> None:
        """Record a problem of the present field `name`."""
        self.note(self._entries[name][1].mark, self._path_of(name), message)

    def node(self, name: str) -> Node | None:
        entry = self._entries.get(name)
        return None if entry is None else entry[1]

    def value(self, name: str, convert: Convert[T], default: T) -> T:
        entry = self._entries.get(name)
        return default if entry is None else self.convert(entry[1], self._path_of(name), convert, default)

    def values(self, name: str, convert: Convert[T], default: tuple[T, ...]) -> tuple[T, ...]:
        """Return the values of a list of 1 to `MAX_ITEMS`, none of them twice."""
        if name not in self._entries:
            return default
        found: dict[T, None] = {}
        for item in self._items(name):
            value = self.convert(item, self._path_of(name), convert, None)
            if value is not None and value in found:
                self.note(item.mark, self._path_of(name), f"{_shown(item)} is a second time in the list")
            elif value is not None:
                found[value] = None
        return tuple(found) or default

    def _items(self, name: str) -> tuple[Node, ...]:
        node = self.node(name)
        if isinstance(node, Items) and 1 <= len(node.nodes) <= MAX_ITEMS:
            return node.nodes
        if isinstance(node, Items) and node.nodes:
            self.wrong(name, f"has {len(node.nodes)} items: at most {MAX_ITEMS} are allowed")
        elif node is not None:
            self._unexpected(node, self._path_of(name), "be a list such as [a, b]")
        return ()

    def convert(self, node: Node, path: str, convert: Convert[T], default: T) -> T:
        if not isinstance(node, Scalar) or node.is_absent:
            self._unexpected(node, path, "have one value")
            return default
        try:
            return convert(node.text)
        except ValueError as error:
            self.note(node.mark, path, f"{quoted(node.text)} {error}")
            return default

    def section(self, name: str) -> "Section | None":
        """Return the mapping under `name`, or None if it is not there or no mapping."""
        entry = self._entries.get(name)
        return None if entry is None else self.as_section(entry[1], self._path_of(name))

    def sections(self, convert: Convert[str]) -> "Iterator[tuple[str, Mark, Section]]":
        """Return each entry as its name, which `convert` reads, the place of the name, and its mapping."""
        for name, (mark, node) in self._entries.items():
            read = self.convert(Scalar(mark, name, is_plain=False), self.path, convert, None)
            section = None if read is None else self.as_section(node, self._path_of(read))
            if read is not None and section is not None:
                yield read, mark, section

    def lists(
        self, convert_name: Convert[str], convert: Callable[[str, str], T]
    ) -> "Iterator[tuple[str, tuple[T, ...]]]":
        """Return each entry as its name and the values of its list; `convert` reads one, given its entry's name."""
        for name, (mark, _) in self._entries.items():
            read = self.convert(Scalar(mark, name, is_plain=False), self.path, convert_name, None)
            if read is not None:
                yield read, self.values(name, partial(convert, read), ())

    def sections_of(self, name: str, most: int) -> "Iterator[Section]":
        """Return each mapping of a list of 1 to `most`; none without the field."""
        items = self._items(name) if name in self._entries else ()
        if len(items) > most:
            self.wrong(name, f"has {len(items)} items: at most {most} are allowed")
        for item in items[:most]:
            section = self.as_section(item, self._path_of(name))
            if section is not None:
                yield section

    def as_section(self, node: Node, path: str) -> "Section | None":
        if isinstance(node, Scalar) and node.is_absent:
            return Section(Fields(node.mark, {}), path, self._problems)
        if isinstance(node, Fields):
            return Section(node, path, self._problems)
        self._unexpected(node, path, "hold fields such as `name: value`")
        return None

    def _unexpected(self, node: Node, path: str, expected: str) -> None:
        if not isinstance(node, UnsupportedYaml):  # which YAML's reader has complained of
            self.note(node.mark, path, f"should {expected}, got {_shown(node)}")

    def _path_of(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def _elsewhere(name: str) -> str:
    """Return the end of a sentence about a field that another gateway or an older Sluice has, empty if none has it."""
    if name in REMOVED:
        return f" any more: {REMOVED[name]}"
    word = name.removesuffix("_limit").removeprefix("team_").removeprefix("user_")
    return f"; here it is {FOREIGN[word]}" if word in FOREIGN else ""


def one_of(words: Collection[W], kind: str) -> Convert[W]:
    """A reader of one of these words; `kind` names them in errors."""

    def convert(text: str) -> W:
        for word in words:
            if word == text:
                return word
        raise ValueError(f"is not {kind}: {listed(words)}{did_you_mean(text, words)}")

    return convert


def _shown(node: Node) -> str:
    if isinstance(node, Scalar):
        return "nothing" if node.is_absent else quoted(node.text)
    if isinstance(node, Items):
        return "a list" if node.nodes else "an empty list"
    return "fields"
