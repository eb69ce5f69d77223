"""Composes YAML into a tree of text at its places. No scalar is given a type: `no`, 010 and 1:30 stay as written.

The tree is made from parser events without recursion. Aliases, anchors, tags, merge keys and duplicate keys are
refused, and size, depth and the number of nodes are bounded, so that no file is dear to refuse.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from quotas.policy.problems import Mark, Problem, Problems, quoted

MAX_BYTES = 4 * 1024**2
MAX_DEPTH = 12
MAX_NODES = 400_000

_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\uffff]"
)


@dataclass(frozen=True, slots=True)
class Scalar:
    mark: Mark
    text: str
    is_plain: bool  # not quoted

    @property
    def is_absent(self) -> bool:
        """Return whether there is no value, as after `tenants:` with nothing behind it."""
        return self.is_plain and not self.text


@dataclass(frozen=True, slots=True)
class Items:
    mark: Mark
    nodes: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Fields:
    mark: Mark
    entries: dict[str, tuple[Mark, "Node"]]  # the key's place, and the value


@dataclass(frozen=True, slots=True)
class UnsupportedYaml:
    """Stands for a value whose problem is already noted."""

    mark: Mark


Node = Scalar | Items | Fields | UnsupportedYaml


class Unreadable(Exception):
    """The file cannot be made into a tree."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def compose(file: str, content: bytes, problems: Problems) -> Node | None:
    """Return the tree of the file's one document, or None if it holds nothing. Aliases and the like, which can be left
    out of a tree, are added to `problems`.

    Raises `Unreadable`.
    """
    text = _decoded(file, content)
    try:
        return _Composer(file, problems).run(text)
    except yaml.MarkedYAMLError as error:
        raise Unreadable(_syntax(file, text, error)) from None
    except yaml.YAMLError as error:
        raise Unreadable(Problem(Mark(file), "", f"is not YAML: {error}")) from None


def _decoded(file: str, content: bytes) -> str:
    if len(content) > MAX_BYTES:
        raise Unreadable(Problem(Mark(file), "", f"is larger than {MAX_BYTES >> 20} MiB"))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        mark = _mark_at(file, content[: error.start].decode("utf-8", "replace"))
        raise Unreadable(Problem(mark, "", "is not UTF-8 from here on: save it as UTF-8")) from None
    if found := _UNPRINTABLE.search(text):
        name = f"U+{ord(found[0]):04X}"
        raise Unreadable(Problem(_mark_at(file, text[: found.start()]), "", f"has a control character, {name}"))
    return text


def _mark_at(file: str, before: str) -> Mark:
    lines = before.split("\n")
    return Mark(file, len(lines), len(lines[-1]) + 1)


def _syntax(file: str, text: str, error: yaml.MarkedYAMLError) -> Problem:
    place = error.problem_mark or error.context_mark
    if place is None:
        return Problem(Mark(file), "", f"is not YAML: {error.problem}")
    line = ([*text.splitlines(), ""])[place.line : place.line + 1] or [""]
    if "\t" in line[0][: len(line[0]) - len(line[0].lstrip())]:
        return Problem(Mark(file, place.line + 1, line[0].index("\t") + 1), "", "is indented with a tab: use spaces")
    said = ", ".join(part for part in (error.context, error.problem) if part)
    return Problem(Mark(file, place.line + 1, place.column + 1), "", f"is not YAML: {said}")


@dataclass(slots=True)
class _Open:
    """A mapping or a sequence whose end has not come yet."""

    mark: Mark
    is_mapping: bool
    key: Scalar | UnsupportedYaml | None
    nodes: list[Node]
    entries: dict[str, tuple[Mark, Node]]
    folded: dict[str, Mark]  # keys up to Unicode compatibility, NFKC

    def node(self) -> Node:
        return Fields(self.mark, self.entries) if self.is_mapping else Items(self.mark, tuple(self.nodes))


class _Composer:
    def __init__(self, file: str, problems: Problems) -> None:
        self._file = file
        self._problems = problems
        self._open: list[_Open] = []
        self._root: Node | None = None

    def run(self, text: str) -> Node | None:
        num_nodes = num_documents = 0
        for event in _events(text):
            num_nodes += isinstance(event, yaml.NodeEvent)
            num_documents += isinstance(event, yaml.DocumentStartEvent)
            if num_nodes > MAX_NODES:
                raise Unreadable(Problem(self._mark(event), "", f"has more than {MAX_NODES} values"))
            if num_documents > 1:
                raise Unreadable(Problem(self._mark(event), "", "has a second document: write one to a file"))
            self._take(event)
        return None if isinstance(self._root, Scalar) and self._root.is_absent else self._root

    def _take(self, event: yaml.Event) -> None:
        mark = self._mark(event)
        if isinstance(event, yaml.CollectionStartEvent):
            self._plainly(event, mark)
            if len(self._open) == MAX_DEPTH:
                raise Unreadable(Problem(mark, "", f"is nested deeper than {MAX_DEPTH} levels"))
            self._open.append(_Open(mark, isinstance(event, yaml.MappingStartEvent), None, [], {}, {}))
        elif isinstance(event, yaml.CollectionEndEvent):
            self._add(self._open.pop().node())
        elif isinstance(event, yaml.ScalarEvent):
            readable = self._plainly(event, mark)
            self._add(Scalar(mark, event.value, not event.style) if readable else UnsupportedYaml(mark))
        elif isinstance(event, yaml.AliasEvent):
            self._refuse(mark, f"{quoted(f'*{event.anchor}')} is an alias: write the value out")
            self._add(UnsupportedYaml(mark))

    def _plainly(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, mark: Mark) -> bool:
        if event.anchor is not None:
            self._refuse(mark, f"{quoted(f'&{event.anchor}')} is an anchor: write the value out where it is used")
        elif event.tag is not None:
            self._refuse(mark, f"{quoted(event.tag)} is a tag: leave it out")
        return event.anchor is None and event.tag is None

    def _add(self, node: Node) -> None:
        if not self._open:
            self._root = node
        elif not self._open[-1].is_mapping:
            self._open[-1].nodes.append(node)
        elif self._open[-1].key is None:
            self._open[-1].key = self._as_key(node)
        else:
            self._add_entry(self._open[-1], node)

    def _as_key(self, node: Node) -> Scalar | UnsupportedYaml:
        if isinstance(node, Scalar) and (node.text != "<<" or not node.is_plain):
            return node
        if not isinstance(node, UnsupportedYaml):
            self._refuse(
                node.mark, "<< merges: write the fields out" if isinstance(node, Scalar) else "a key is one word"
            )
        return UnsupportedYaml(node.mark)

    def _add_entry(self, mapping: _Open, value: Node) -> None:
        key, mapping.key = mapping.key, None
        if not isinstance(key, Scalar):
            return
        folded = unicodedata.normalize("NFKC", key.text)
        if first := mapping.folded.get(folded):
            self._refuse(key.mark, f"{quoted(key.text)} is a second time here, after line {first.line}")
            return
        mapping.folded[folded] = key.mark
        mapping.entries[key.text] = (key.mark, value)

    def _refuse(self, mark: Mark, message: str) -> None:
        self._problems.add(mark, "", message)

    def _mark(self, event: yaml.Event) -> Mark:
        assert event.start_mark is not None
        return Mark(self._file, event.start_mark.line + 1, event.start_mark.column + 1)


def _events(text: str) -> Iterator[yaml.Event]:
    yield from yaml.parse(text, Loader=_LOADER)
