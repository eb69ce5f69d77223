"""Writes text, expressions and schemas in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from backend.grammar import ONE_LINE, json_options, lark_text
from backend.text.response_templates.pattern_syntax import (
    Alternation,
    Character,
    CharClass,
    Concat,
    End,
    Group,
    Node,
    Repeat,
    Start,
    predicate,
)

MAX_SPACE_CHARS = 2  # where an expression allows any number
MAX_OTHER_CHARS = 32
_IN_SLASHES = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
SPACE = f"(/[ \\n]/){{0,{MAX_SPACE_CHARS}}}"
TEXT = "TEXT"  # the terminal for any text without special tokens


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The special tokens of a model, by their text, and the ones among them that end an answer. No text holds the bytes
    of a special token, so a grammar has to name it.
    """

    special: Mapping[str, int]
    ends: frozenset[str]
    end_ids: tuple[int, ...] = ()  # the ids of `ends`


@dataclass(slots=True)
class Lark:
    """Collects the rules of one grammar."""

    vocabulary: Vocabulary
    rules: list[str] = field(default_factory=list)

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Add a rule, and return its name, which is unique."""
        name = f"{name}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def text(self, text: str) -> str:
        """Return the rule of a text of the template, with special tokens by their numbers."""
        return " ".join(self._pieces(text))

    def until(self, text: str, free: str = TEXT) -> str:
        """Return the rule of any text that ends with `text`, and has it nowhere else. `free` is a terminal for the part
        before it.
        """
        first, *rest = self._pieces(text)
        if first.startswith("<["):
            return " ".join([f"{free}?", first, *rest])
        return " ".join([self.rule("until", f"{free}? {first}", "[lazy]"), *rest])

    def until_token(self, text: str, most: int) -> str | None:
        """Return the rule of any text of at most `most` tokens that ends with `text`; None unless `text` begins with a
        token of its own, which can be forced.
        """
        first, *rest = self._pieces(text)
        if not first.startswith("<["):
            return None
        free = [self.rule("bounded", TEXT, f"[max_tokens={most}]")] if most else []
        return " ".join([*free, first, *rest])

    def token(self, text: str) -> int | None:
        return self.vocabulary.special.get(text)

    def without(self, text: str) -> str:
        """Return a terminal for any text that does not hold `text`."""
        name = f"WITHOUT_{len(self.rules)}"
        self.rules.append(f"{name}: /(.|\\n)*/ & ~/(?s:.*){re.escape(text).replace('/', chr(92) + '/')}(?s:.*)/")
        return name if text else TEXT

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return the rule of a JSON document of a schema."""
        options = json_options(json.dumps(schema), ONE_LINE)
        return self.rule("json", f"%json {json.dumps({'x-guidance': options, **schema})}")

    def choice(self, texts: Sequence[str]) -> str:
        """Return the rule of one of several texts."""
        return self.rule("choice", " | ".join(map(lark_text, texts)))

    def regex(self, source: str) -> str:
        """Return the rule of a match of a client's expression."""
        name = f"REGEX_{len(self.rules)}"
        escaped = re.sub(r"\\.|[/\n]", lambda found: _IN_SLASHES.get(found[0], found[0]), source, flags=re.DOTALL)
        self.rules.append(f"{name}: /{escaped}/")
        return name

    def is_end(self, text: str) -> bool:
        return text in self.vocabulary.ends

    def node(self, node: Node, groups: Mapping[str, str], at_start: bool = False) -> str | None:
        """Return the rule of the simplest text that an expression matches; None if that is empty. `groups` are the
        texts of named groups; `at_start`: no text precedes it.
        """
        written: str | None = ""
        match node:
            case Concat(parts):
                written = self._concat(parts, groups, at_start)
            case Alternation(options):
                possible = [one for option in options if (one := self.node(option, groups, at_start)) is not None]
                written = f"({' | '.join(map(_or_nothing, possible))})" if possible else None
            case Repeat():
                written = self._repeat(node, groups)
            case Group(name, part):
                written = lark_text(groups[name]) if name in groups else self.node(part, groups)
            case CharClass(source):
                written = _character(source)
            case Character(char):
                written = self.text(char)
            case Start() if not at_start:
                written = None
        return written

    def _concat(self, parts: tuple[Node, ...], groups: Mapping[str, str], at_start: bool) -> str | None:
        written: list[str] = []
        run = ""
        for part in (*parts, End()):
            if isinstance(part, Character):
                run += part.char
                continue
            if run:
                written.append(self.text(run))
            run, one = "", self.node(part, groups, at_start and not written)
            if one is None:
                return None
            written.append(one)
        return " ".join(filter(None, written))

    def _repeat(self, node: Repeat, groups: Mapping[str, str]) -> str | None:
        most = node.most if node.is_greedy else node.least
        if most is None:
            most = max(node.least, MAX_SPACE_CHARS if node.part == CharClass("\\s") else MAX_OTHER_CHARS)
        part = self.node(node.part, groups) if most != 0 else ""
        if not part:
            return None if node.least and part is None else ""
        return f"({part}){{{node.least},{most}}}"

    def _pieces(self, text: str) -> list[str]:
        special = self.vocabulary.special
        if not special:
            return [lark_text(text)] if text else []
        split = re.split("|".join(f"({re.escape(one)})" for one in sorted(special, key=len, reverse=True)), text)
        return [f"<[{special[one]}]>" if one in special else lark_text(one) for one in split if one]

    def __str__(self) -> str:
        return "\n".join([*self.rules, f"{TEXT}: /(.|\\n)*/", ""])


def ways_to_begin(node: Node) -> Iterator[tuple[Node, ...]]:
    """Yield the ways in which an expression may begin, each as a sequence: alternatives and optional parts at the
    beginning are taken apart.
    """
    match node:
        case Concat(()):
            yield ()
        case Concat((first, *rest)):
            for option in ways_to_begin(first):
                if option:
                    yield (*option, *rest)
                else:
                    yield from ways_to_begin(Concat(tuple(rest)))
        case Repeat(optional, 0, 1):
            yield from ways_to_begin(optional)
            yield ()
        case Alternation(options):
            for choice in options:
                yield from ways_to_begin(choice)
        case _:
            yield (node,)


def literal_start(way: Sequence[Node]) -> str:
    """Return the literal text with which a sequence begins."""
    return "".join([node.char for node in takewhile(_is_literal, way) if isinstance(node, Character)])


def _is_literal(node: Node) -> bool:
    return isinstance(node, Character)


def _character(source: str) -> str:
    """Return a class of the set's printable ASCII characters, on which all regex engines agree, and line breaks."""
    accepts = predicate(source)
    codes = [code for code in (0x0A, *range(0x20, 0x7F)) if accepts(chr(code))]
    return f"/[{''.join([f'{chr(92)}x{code:02x}' for code in codes])}]/"


def _or_nothing(written: str) -> str:
    return written or '""'
