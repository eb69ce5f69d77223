"""Control tokens in a prompt come from the chat template alone: all content of a request is text.

During rendering, the control tokens in the template's own texts are written in lone surrogates, their twins. No text of
a request has one, because JSON strings are Unicode. A twin stands for one character, so that the template's text
operations are unchanged. Each character of the rendered prompt then shows its author, and a control token from a
request is cut in two before it is encoded.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, cast

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

_TWINS = [twin for twin in range(0xD800, 0xE000) if twin & 0x80]  # Python finds these fast where most text is ASCII
_TWIN = re.compile("[\ud800-\udfff]+")
_ROLES = ("system", "developer", "user", "assistant", "tool")  # of messages, from which templates compose tokens


class PartedText(str):
    """A prompt in which the request spells control tokens: they stay text if each part is encoded by itself."""

    __slots__ = ("_cuts",)

    _cuts: Callable[[], Iterator[int]]

    @classmethod
    def of(cls, text: str, cuts: Callable[[], Iterator[int]]) -> "PartedText":
        parted = cls(text)
        parted._cuts = cuts
        return parted

    def parts(self) -> Iterator[str]:
        start = 0
        for cut in self._cuts():
            yield self[start:cut]
            start = cut
        yield self[start:]


class ControlTokens:
    """The control tokens of one tokenizer, at least one, each of two or more characters; they tell the author of each
    in a prompt.
    """

    def __init__(self, texts: Iterable[str], normalize: Callable[[str], str] | None = None) -> None:
        """`normalize` is the tokenizer's normalization of a text before it searches for some of the tokens."""
        self._texts = texts = sorted(set(texts))
        delimiters = sorted({char for text in texts for char in (re.findall(r"\W", text) or text)})
        self._normalize = normalize
        self._twins = {ord(char): chr(twin) for char, twin in zip(sorted(set("".join(texts))), _TWINS, strict=False)}
        self._chars = {ord(twin): chr(char) for char, twin in self._twins.items()}
        self._token = re.compile(_any_of(texts))
        self._delimiter = re.compile(_any_of(delimiters))
        self._written: dict[str, str] = {}  # by text that the template has written with twins: the text it stands for
        # control tokens as they stand in a prompt if the template wrote them
        self._owned = frozenset(text.translate(self._twins) for text in texts)
        self.allow(_ROLES)

    def allow(self, words: Collection[str]) -> None:
        """Allow the template control tokens made of its delimiters around one of these words."""
        composed = [text for text in self._texts if self._delimiter.sub("", text) in words]
        delimited = [self._delimiter.sub(lambda found: found[0].translate(self._twins), text) for text in composed]
        self._owned = self._owned.union(delimited)

    def marked(self, text: str) -> str:
        """Return a text of the template with twins: all of its control tokens, and the delimiters of others."""
        for pattern in (self._token, self._delimiter):
            text = pattern.sub(self._twin, text)
        self._written = dict(sorted(self._written.items(), key=lambda one: -len(one[0])))
        return text

    def plain(self, text: str) -> str:
        """Return a text without twins."""
        for twins, chars in self._written.items():
            text = text.replace(twins, chars)
        if self.has_twins(text):  # the template has cut its own text
            return _TWIN.sub(lambda found: found[0].translate(self._chars), text)
        return text

    @staticmethod
    def has_twins(text: str) -> bool:
        try:
            text.encode()  # a tenth of what looking for twins takes
        except UnicodeEncodeError:
            return True
        return False

    def searched(self, text: str, method: str, *args: Any, **options: Any) -> Any:
        """Return what a method that searches a text finds in it without twins, with the twins of the parts found.

        A template looks for its own tokens also in a text that it has put together of them and of a request's.
        """
        plain = self.plain(text)
        found = getattr(plain, method)(*args, **options)
        if isinstance(found, list | tuple):
            gap = len(args[0] if args else options.get("sep") or "") if isinstance(found, list) else 0
            return type(found)(_cut(text, plain, found, gap))
        if not isinstance(found, str):
            return found
        match method:
            case "replace":
                pieces = self.searched(text, "split", args[0], *args[2:]) if args[0] else []
                return cast(str, args[1]).join(pieces) if pieces else text.replace(*args)
            case "strip":
                return self.searched(self.searched(text, "lstrip", *args), "rstrip", *args)
            case "rstrip" | "removesuffix":
                return text[: len(found)]
        return text[len(text) - len(found) :]

    def prompt(self, marked: str) -> str:
        """Return a rendered prompt without twins: a `PartedText` if the request spells a control token in it.

        Raises `ValueError` if the request's text becomes a control token only by the tokenizer's normalizer.
        """
        text, owned = self.plain(marked), self._owned
        if self._normalize is not None and self.count(self._normalize(text)) > self.count(text):
            raise ValueError("a text in them is a control token once the tokenizer has normalized it: leave it out")
        for found in self._token.finditer(text):
            if marked[found.start() : found.end()] not in owned:
                return PartedText.of(text, lambda: self._foreign(text, marked))
        return text

    def count(self, text: str) -> int:
        return sum(1 for _ in self._token.finditer(text))

    def neutral(self, value: Any) -> Any:
        """Return a value of a request of the same length, without the delimiters of control tokens."""
        match value:
            case str():
                return self._delimiter.sub("x", value)
            case list() | tuple():
                return [self.neutral(item) for item in value]
            case dict():
                return {name: self.neutral(item) for name, item in value.items()}
        return value

    def _twin(self, found: re.Match[str]) -> str:
        twins = found[0].translate(self._twins)
        self._written[twins] = found[0]
        return twins

    def _foreign(self, text: str, marked: str) -> Iterator[int]:
        """Yield the position behind the first character of each control token that the template did not write."""
        at = 0
        while (found := self._token.search(text, at)) is not None:
            at, end = found.span()
            if marked[at:end] in self._owned:
                at = end
            else:
                at += 1
                yield at


def _cut(text: str, plain: str, pieces: Iterable[str], gap: int) -> Iterator[str]:
    """Yield the parts of a text that are these pieces of its plain one, with `gap` characters between; 0: blanks."""
    at = 0
    for piece in pieces:
        at = at if gap else plain.index(piece, at)
        yield text[at : at + len(piece)]
        at += len(piece) + gap


def _any_of(texts: Iterable[str]) -> str:
    """Return an expression for any of these texts, which matches the longest and reads each character once."""
    behind: dict[str, list[str]] = {}
    for text in texts:
        behind.setdefault(text[:1], []).append(text[1:])
    ends = behind.pop("", None) is not None
    ways = [re.escape(char) + _any_of(rest) for char, rest in behind.items()] + [""] * ends
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"


_READING = frozenset(  # methods whose arguments are searched for in other texts
    (
        "count", "endswith", "find", "get", "index", "lstrip", "partition", "pop", "removeprefix", "removesuffix",
        "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "startswith", "strip",
    )
)  # fmt: skip
SEARCHING = _READING - {"get", "pop"}  # those of texts
_WRITING = frozenset(("d", "default", "join", "replace"))  # filters whose arguments become part of a text
_VARIABLE = nodes.BinExpr | nodes.Call | nodes.Concat | nodes.CondExpr | nodes.Filter | nodes.Getattr | nodes.Getitem
PLAIN = "guard.plain"


class Marking(NodeTransformer):
    """Puts twins into the texts that a template writes. Texts that it compares, looks up and searches for have none;
    the filter `PLAIN` takes twins out of values that may hold some.
    """

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self._reads = False
        self._words: set[str] = set()

    def visit_Template(self, node: nodes.Template) -> nodes.Template:  # noqa: N802 - jinja's name
        self.generic_visit(node)
        self._control.allow(self._words)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.TemplateData:  # noqa: N802
        node.data = self._control.marked(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Const:  # noqa: N802
        if isinstance(node.value, str) and not self._reads:
            if node.value.isidentifier():
                self._words.add(node.value)
            node.value = self._control.marked(node.value)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        operands = [operand.expr for operand in node.ops]
        if all(operand.op in ("eq", "ne") for operand in node.ops):
            operands.append(node.expr)
        needs_plain = not any(map(self._has_no_twin, operands))  # with a plain operand no twin could change the result
        node.expr = self._read(node.expr, needs_plain)
        for operand in node.ops:
            operand.expr = self._read(operand.expr, needs_plain)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Test:  # noqa: N802
        node.node = self._read(node.node, False)
        node.args = [self._read(arg) for arg in node.args]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        node.node, node.arg = self.visit(node.node), self._read(node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        node.key, node.value = self._read(node.key), self.visit(node.value)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Call:  # noqa: N802
        called = node.node
        if isinstance(called, nodes.Getattr) and called.attr in _READING:
            node.args = self._read_args(called.attr, node.args)
        elif isinstance(called, nodes.Name) and called.name in ("raise_exception", "strftime_now"):
            node.args = [self._read(arg) for arg in node.args]
        else:
            return cast(nodes.Call, self.generic_visit(node))
        node.node = self.visit(called)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:  # noqa: N802
        if node.node is not None:
            node.node = self.visit(node.node)
        if node.name in _WRITING:
            node.args = self._read_args(node.name, node.args)
            node.kwargs = [self.visit(one) for one in node.kwargs]
        else:
            node.args = [self._read(arg) for arg in node.args]
        return node

    def _read_args(self, name: str, args: list[nodes.Expr]) -> list[nodes.Expr]:
        """Return the arguments of a call as they are read; replacements, separators and defaults are written
        instead.
        """
        num_read = 1 if name == "replace" else len(args) if name in _READING else 0
        return [self._read(arg) if index < num_read else self.visit(arg) for index, arg in enumerate(args)]

    def _read(self, node: nodes.Expr, needs_plain: bool = True) -> nodes.Expr:
        before, self._reads = self._reads, True
        node = self.visit(node)
        self._reads = before
        if needs_plain and isinstance(node, _VARIABLE | nodes.Name):
            return nodes.Filter(node, PLAIN, [], [], None, None, lineno=node.lineno)
        return node

    def _has_no_twin(self, node: nodes.Expr) -> bool:
        if isinstance(node, nodes.List | nodes.Tuple):
            return all(map(self._has_no_twin, node.items))
        return isinstance(node, nodes.Const) and self._control.marked(str(node.value)) == str(node.value)
