"""Cuts policy files into the text of each tenant and the rest, so that an edit of one tenant rereads one tenant.

A file is cut at the lines of `tenants` if they are in block style, each tenant beginning a line. The meaning of a text
then follows from itself and the inherited defaults. Any other file, or a file with a mistake that spans tenants, is
read as a whole.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby, zip_longest
from typing import NamedTuple

from quotas.policy.problems import Mark, Problems, TooManyProblems
from quotas.policy.schema import TENANT_NAME
from quotas.policy.yaml_nodes import Composer, Fields, Items, Node, Scalar, Unreadable

_HEADING = re.compile(rb"^tenants:(?:[ \t]+#.*|[ \t]*)\r?$", re.MULTILINE)
_FIRST = re.compile(rb"\n([ \t]*)[^\s#]")
_NAMED = re.compile(b" +(%s):(?=[ \n])" % TENANT_NAME.encode())
_WORD = re.compile(r"([ [])([A-Za-z0-9][A-Za-z0-9_./-]*)(?=[],}\r\n])")
TENANTS_PER_RUN = 500  # tenants composed at once
_TREE = b"tenants:\n"  # the mapping of which the texts are entries


def name_and_body(text: bytes) -> tuple[str, bytes] | None:
    """A tenant's name and its text without it; None if the name is not plain."""
    named = _NAMED.match(text)
    return (named[1].decode(), text[: named.start(1)] + text[named.end(1) :]) if named else None


class Form(NamedTuple):
    """The tree of tenants whose texts differ in words alone; its marks are no tenant's."""

    node: Node
    words: list[Scalar]
    num_nodes: int

    def of(self, words: Iterable[str]) -> Node:
        """The tree with these words, valid until the next call."""
        for place, word in zip(self.words, words, strict=True):
            place.text = word
        return self.node


def words_of(body: bytes) -> tuple[tuple[str, ...], list[str]]:
    """The text around the words of a tenant, and the words."""
    parts = _WORD.split(body.decode("utf-8", "surrogateescape"))
    words = parts[2::3]
    del parts[2::3]
    return tuple(parts), words


def form_of(around: tuple[str, ...]) -> Form | None:
    """The form of texts that differ in words alone, if any value may replace each word."""
    *before, end = ["".join(some) for some in zip_longest(around[::2], around[1::2], fillvalue="")]
    words = [f"word-{number}" for number in range(len(before))]
    text = "".join([*chain.from_iterable(zip(before, words, strict=True)), end]).replace(":", "_:", 1)
    composer = Composer("", problems := Problems())
    tenants = _tenants(composer, problems, text.encode("utf-8", "surrogateescape"))
    if tenants is None or [*tenants.entries] != ["_"]:
        return None
    node = tenants.entries["_"][1]
    places = [leaf for leaf in _leaves(node) if leaf.is_plain and leaf.text in words]
    has_keys = isinstance(node, Fields) and "keys" in node.entries  # key ids belong to one tenant
    if has_keys or [place.text for place in places] != words:
        return None
    return Form(node, places, composer.num_nodes - 3)


def _tenants(composer: Composer, problems: Problems, texts: bytes) -> Fields | None:
    """Compose the texts of tenants; None if they hold a mistake, or more than tenants."""
    try:
        tree = composer.run(_TREE + texts)
    except (Unreadable, TooManyProblems):
        return None
    tenants = tree.entries["tenants"][1] if isinstance(tree, Fields) and [*tree.entries] == ["tenants"] else None
    return tenants if isinstance(tenants, Fields) and not problems.found else None


def _leaves(node: Node) -> Iterator[Scalar]:
    if isinstance(node, Scalar):
        yield node
    elif isinstance(node, Fields | Items):
        inner = node.nodes if isinstance(node, Items) else [value for _, value in node.entries.values()]
        yield from chain.from_iterable(map(_leaves, inner))


def _num_lines(texts: list[bytes]) -> int:
    return b"".join(texts).count(b"\n")


class Indivisible(Exception):
    """The file has to be read as a whole."""


class TenantTree(NamedTuple):
    """A tenant's tree: the place of its name, its fields, and the number of its values."""

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
        """True if `tree`, the rest of the file, is a block-style mapping without the tenants at their place."""
        if "tenants" not in tree.entries:
            return False
        (first, _), (mark, node) = next(iter(tree.entries.values())), tree.entries["tenants"]
        is_absent = isinstance(node, Scalar) and node.is_absent
        return is_absent and first == tree.mark and (mark.line, mark.column) == (self.heading, 1)

    def trees(self, is_known: Callable[[bytes], bool]) -> Iterator[tuple[list[bytes], Iterator[TenantTree] | None]]:
        """Yield the texts in order, in runs, with their trees, None for known ones. Raises `Indivisible`."""
        line = self.first_line
        for known, group in groupby(self.texts, is_known):
            texts = list(group)
            for start in range(0, len(texts), len(texts) if known else TENANTS_PER_RUN):
                some = texts[start : start + TENANTS_PER_RUN] if not known else texts
                yield some, None if known else self._composed(some, line)
                line += _num_lines(some)

    def _composed(self, texts: list[bytes], line: int) -> Iterator[TenantTree]:
        problems = Problems()
        composer = Composer(self.file, problems, line - 1 - _TREE.count(b"\n"))
        tenants = _tenants(composer, problems, b"".join(texts))
        if tenants is None or len(tenants.entries) != len(texts):
            raise Indivisible
        before = 3  # nodes: the file, the heading and what it holds
        for text, (name, (mark, node)), size in zip(texts, tenants.entries.items(), composer.sizes, strict=True):
            if mark.line != line or mark.column != self.column:
                raise Indivisible
            yield TenantTree(name, mark, node, size - before)
            line, before = line + text.count(b"\n"), size


def cut(file: str, content: bytes) -> tuple[bytes, TenantTexts] | None:
    """The content with blank lines in place of the tenants, and the tenants' texts; None if it cannot be cut."""
    if content.count(b"\r") != content.count(b"\r\n"):  # a lone return ends a line in YAML, but not here
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
