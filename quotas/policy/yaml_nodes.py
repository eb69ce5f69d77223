"""Composes YAML into a tree of text at its places. No scalar is given a type: `no`, 010 and 1:30 stay as written.

The tree is made from parser events without recursion. Aliases, anchors, tags, merge keys and duplicate keys are
refused, and size, depth and the number of nodes are bounded, so that no file is dear to refuse.
"""

import re
import unicodedata
from dataclasses import dataclass
from typing import NamedTuple

import yaml

from quotas.policy.problems import Mark, Problem, Problems, quoted

MAX_BYTES = 4 * 1024**2
MAX_DEPTH = 12
MAX_NODES = 400_000

_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\uffff]"
)


@dataclass(slots=True)
class Scalar:
    mark: Mark
    text: str
    is_plain: bool  # not quoted

    @property
    def is_absent(self) -> bool:
        """True without a value, as after `tenants:` with nothing behind it."""
        return self.is_plain and not self.text


class Items(NamedTuple):
    mark: Mark
    nodes: tuple["Node", ...]


class Fields(NamedTuple):
    mark: Mark
    entries: dict[str, tuple[Mark, "Node"]]  # the key's place, and the value


class UnsupportedYaml(NamedTuple):
    """Stands for a value with a problem already noted."""

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
    return Composer(file, problems).run(content)


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


class _Open:
    """A mapping or a sequence that is still open."""

    __slots__ = ("entries", "folded", "is_mapping", "key", "mark", "nodes")

    def __init__(self, mark: Mark, is_mapping: bool) -> None:
        self.mark = mark
        self.is_mapping = is_mapping
        self.key: Scalar | UnsupportedYaml | None = None
        self.nodes: list[Node] = []
        self.entries: dict[str, tuple[Mark, Node]] = {}
        self.folded: dict[str, Mark] = {}  # keys up to Unicode compatibility, NFKC

    def node(self) -> Node:
        return Fields(self.mark, self.entries) if self.is_mapping else Items(self.mark, tuple(self.nodes))


class Composer:
    """Composes one file, or a part that begins `lines_before` lines below its top.

    `sizes` has the number of nodes up to the end of each entry of the mappings within the outermost one.
    """

    def __init__(self, file: str, problems: Problems, lines_before: int = 0) -> None:
        self.num_nodes = 0
        self.sizes: list[int] = []
        self._file = file
        self._problems = problems
        self._first_line = lines_before + 1
        self._open: list[_Open] = []
        self._num_documents = 0
        self._root: Node | None = None

    def run(self, content: bytes) -> Node | None:
        """Return the tree, or None if there is nothing in it. Raises `Unreadable`."""
        text = _decoded(self._file, content)
        try:
            return self._run(text)
        except yaml.MarkedYAMLError as error:
            raise Unreadable(_syntax(self._file, text, error)) from None
        except yaml.YAMLError as error:
            raise Unreadable(Problem(Mark(self._file), "", f"is not YAML: {error}")) from None

    def _run(self, text: str) -> Node | None:
        loader = _LOADER(text)
        try:
            while event := loader.get_event():
                self._take(event)
        finally:
            loader.dispose()
        return None if isinstance(self._root, Scalar) and self._root.is_absent else self._root

    def _take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.ScalarEvent):
            mark = self._begin(event)
            if event.anchor is None and event.tag is None:
                self._add(Scalar(mark, event.value, not event.style))
            else:
                self._refuse_decorated(event, mark)
                self._add(UnsupportedYaml(mark))
        elif isinstance(event, yaml.CollectionEndEvent):
            self._add(self._open.pop().node())
        elif isinstance(event, yaml.CollectionStartEvent):
            mark = self._begin(event)
            if event.anchor is not None or event.tag is not None:
                self._refuse_decorated(event, mark)
            if len(self._open) == MAX_DEPTH:
                raise Unreadable(Problem(mark, "", f"is nested deeper than {MAX_DEPTH} levels"))
            self._open.append(_Open(mark, isinstance(event, yaml.MappingStartEvent)))
        elif isinstance(event, yaml.AliasEvent):
            mark = self._begin(event)
            self._refuse(mark, f"{quoted(f'*{event.anchor}')} is an alias: write the value out")
            self._add(UnsupportedYaml(mark))
        elif isinstance(event, yaml.DocumentStartEvent):
            self._num_documents += 1
            if self._num_documents > 1:
                raise Unreadable(Problem(self._mark(event), "", "has a second document: write one to a file"))

    def _begin(self, event: yaml.Event) -> Mark:
        """Count a node, and return its place."""
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise Unreadable(Problem(self._mark(event), "", f"has more than {MAX_NODES} values"))
        return self._mark(event)

    def _refuse_decorated(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, mark: Mark) -> None:
        if event.anchor is not None:
            self._refuse(mark, f"{quoted(f'&{event.anchor}')} is an anchor: write the value out where it is used")
        else:
            self._refuse(mark, f"{quoted(str(event.tag))} is a tag: leave it out")

    def _add(self, node: Node) -> None:
        if not self._open:
            self._root = node
            return
        parent = self._open[-1]
        if not parent.is_mapping:
            parent.nodes.append(node)
        elif parent.key is None:
            parent.key = self._as_key(node)
        else:
            self._add_entry(parent, node)
            if len(self._open) == 2:
                self.sizes.append(self.num_nodes)

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
        folded = key.text if key.text.isascii() else unicodedata.normalize("NFKC", key.text)
        if first := mapping.folded.get(folded):
            self._refuse(key.mark, f"{quoted(key.text)} is a second time here, after line {first.line}")
            return
        mapping.folded[folded] = key.mark
        mapping.entries[key.text] = (key.mark, value)

    def _refuse(self, mark: Mark, message: str) -> None:
        self._problems.add(mark, "", message)

    def _mark(self, event: yaml.Event) -> Mark:
        place = event.start_mark
        assert place is not None
        return Mark(self._file, place.line + self._first_line, place.column + 1)
