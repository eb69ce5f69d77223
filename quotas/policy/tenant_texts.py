"""Cuts policy files into the text of each tenant and the rest, so that an edit of one tenant reads one tenant.

A file is cut where the lines of `tenants` are indented as block style is, each tenant beginning a line. What a text
means follows then from itself and from what tenants inherit. A file that is written otherwise, and one with a mistake
that no tenant alone has, is read as a whole.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from quotas.policy.problems import Mark, Problems, TooManyProblems
from quotas.policy.schema import TENANT_NAME
from quotas.policy.yaml_nodes import Composer, Fields, Items, Node, Scalar, Unreadable

_HEADING = re.compile(rb"^tenants:(?:[ \t]+#.*|[ \t]*)\r?$", re.MULTILINE)
_FIRST = re.compile(rb"\n([ \t]*)[^\s#]")
_NAMED = re.compile(b" +(%s):(?=[ \n])" % TENANT_NAME.encode())
_WORD = re.compile(r"(?<=[ \[])([A-Za-z0-9][A-Za-z0-9_./-]*)(?=[],}\r\n])")
_PLACE = Scalar(Mark(""), "", is_plain=True)  # of a word
RUN = 500  # tenants that are composed at once
_TREE = b"tenants:\n"  # of which the texts are entries, as they are in their file


def name_and_body(text: bytes) -> tuple[str, bytes] | None:
    """Return a tenant's name and its text without it; None where the name is not plainly written."""
    named = _NAMED.match(text)
    return (named[1].decode(), text[: named.start(1)] + text[named.end(1) :]) if named else None


class Form(NamedTuple):
    """The tree of tenants whose texts differ in words alone. Its marks are of none of them."""

    node: Node
    num_nodes: int

    def of(self, words: Iterable[str]) -> Node:
        """Return the tree with these words in their order."""
        coming = iter(words)
        return _mapped(self.node, lambda leaf: Scalar(leaf.mark, next(coming), True) if leaf is _PLACE else leaf)


def _mapped(node: Node, change: Callable[[Scalar], Scalar]) -> Node:
    if isinstance(node, Scalar):
        return change(node)
    if isinstance(node, Fields):
        entries = {name: (mark, _mapped(value, change)) for name, (mark, value) in node.entries.items()}
        return Fields(node.mark, entries)
    return Items(node.mark, tuple(_mapped(item, change) for item in node.nodes)) if isinstance(node, Items) else node


def words_of(body: bytes) -> tuple[tuple[str, ...], list[str]]:
    """Return what stands around the words of a tenant's text, and these."""
    parts = _WORD.split(body.decode("utf-8", "surrogateescape"))
    return tuple(parts[::2]), parts[1::2]


def form_of(around: tuple[str, ...]) -> Form | None:
    """Return the form of texts that differ in words alone, if each of these is a value, whatever it is."""
    words, found = [f"word-{number}" for number in range(1, len(around))], list[str]()
    text = "".join(part + word for part, word in zip(around, [*words, ""], strict=True)).replace(":", "_:", 1)
    composer = Composer("", problems := Problems())
    try:
        tree = composer.run(_TREE + text.encode("utf-8", "surrogateescape"))
    except (Unreadable, TooManyProblems):
        return None
    tenants = tree.entries["tenants"][1] if isinstance(tree, Fields) and [*tree.entries] == ["tenants"] else None
    if problems.found or not isinstance(tenants, Fields) or [*tenants.entries] != ["_"]:
        return None

    def emptied(leaf: Scalar) -> Scalar:
        if not leaf.is_plain or leaf.text not in words:
            return leaf
        found.append(leaf.text)
        return _PLACE

    node = _mapped(tenants.entries["_"][1], emptied)
    has_keys = isinstance(node, Fields) and "keys" in node.entries  # whose ids are of one tenant
    return None if has_keys or found != words else Form(node, composer.num_nodes - 3)


def _num_lines(texts: list[bytes]) -> int:
    return b"".join(texts).count(b"\n")


class Indivisible(Exception):
    """A file has to be read as a whole."""


class TenantTree(NamedTuple):
    """A tenant as it is written: the place of its name, its fields, and how many values they are."""

    name: str
    mark: Mark
    node: Node
    num_nodes: int


@dataclass(frozen=True, slots=True, eq=False)
class TenantTexts:
    """The texts of the tenants of a file in their order; each ends where the next one begins."""

    file: str
    heading: int  # the line of `tenants`
    first_line: int
    column: int  # at which each begins
    texts: list[bytes]

    def are_tenants_of(self, tree: Fields) -> bool:
        """Return whether `tree`, the rest of the file, is a mapping in block style that lacks them where they stood."""
        if "tenants" not in tree.entries:
            return False
        (first, _), (mark, node) = next(iter(tree.entries.values())), tree.entries["tenants"]
        is_absent = isinstance(node, Scalar) and node.is_absent
        return is_absent and first == tree.mark and (mark.line, mark.column) == (self.heading, 1)

    def trees(self, is_known: Callable[[bytes], bool]) -> Iterator[tuple[list[bytes], Iterator[TenantTree] | None]]:
        """Yield the texts in their order, some at a time, with their trees, or None for those that are known. Raises
        `Indivisible`.
        """
        line = self.first_line
        for known, group in groupby(self.texts, is_known):
            texts = list(group)
            for start in range(0, len(texts), len(texts) if known else RUN):
                some = texts[start : start + RUN] if not known else texts
                yield some, None if known else self._composed(some, line)
                line += _num_lines(some)

    def _composed(self, texts: list[bytes], line: int) -> Iterator[TenantTree]:
        problems = Problems()
        composer = Composer(self.file, problems, line - 1 - _TREE.count(b"\n"))
        try:
            tree = composer.run(_TREE + b"".join(texts))
        except (Unreadable, TooManyProblems):
            raise Indivisible from None
        tenants = tree.entries["tenants"][1] if isinstance(tree, Fields) and [*tree.entries] == ["tenants"] else None
        if problems.found or not isinstance(tenants, Fields) or len(tenants.entries) != len(texts):
            raise Indivisible
        before = 3  # nodes: the file, the heading and what it holds
        for text, (name, (mark, node)), size in zip(texts, tenants.entries.items(), composer.sizes, strict=True):
            if mark.line != line or mark.column != self.column:
                raise Indivisible
            yield TenantTree(name, mark, node, size - before)
            line, before = line + text.count(b"\n"), size


def cut(file: str, content: bytes) -> tuple[bytes, TenantTexts] | None:
    """Return the content with blank lines in place of the tenants, and these; None if it cannot be cut."""
    if content.count(b"\r") != content.count(b"\r\n"):  # a return alone ends a line of YAML, and none of ours
        return None
    heading = _HEADING.search(content)
    first = _FIRST.search(content, heading.end()) if heading else None
    if heading is None or first is None or not first[1] or first[1].strip(b" "):
        return None
    start = at = first.start() + 1
    texts: list[bytes] = []
    for line in re.compile(rb"\n(?:%s)?(?=[^\s#])" % first[1]).finditer(content, first.end()):
        begin = line.start() + 1
        texts.append(content[at:begin])
        at = begin
        if line.end() == begin:  # not indented: the tenants end here
            break
    else:
        texts.append(content[at:])
        at = len(content)
    rest = content[:start] + b"\n" * content.count(b"\n", start, at) + content[at:]
    first_line, heading_line = (content.count(b"\n", 0, place) + 1 for place in (start, heading.start()))
    return rest, TenantTexts(file, heading_line, first_line, len(first[1]) + 1, texts)
