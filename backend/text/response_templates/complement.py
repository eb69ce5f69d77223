"""The complement of an expression: an expression for the texts in which it is not found, for negative look-around.

The expression becomes an automaton of the texts that do not hold it yet, and the automaton is read back by taking out
one state after the other (Brzozowski and McCluskey 1963). Both may grow exponentially, so that few steps are allowed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from sys import maxunicode

from backend.text.response_templates.pattern import Pattern
from backend.text.response_templates.pattern_syntax import (
    Alternation,
    Character,
    CharClass,
    Concat,
    Group,
    LookAhead,
    Node,
    PatternError,
    Repeat,
)

FIXED_STEPS = 50  # reading an expression takes as long as this number of steps
MAX_CHARACTER_SETS = 16  # different characters and sets of them in an expression
MAX_COMPLEMENT_CHARS = 6_000  # of the resulting expression
_BOUNDS = [*map(ord, "\0\t\x0e !0:A[_`a{"), maxunicode + 1]  # of the sets "\d", "\w" and "\s"
_SPACES = [code for code in range(128, 0x3001) if chr(code).isspace()]
_END = -1  # the state of a whole text

_State = tuple[tuple[int, ...], bool]  # threads of the pattern; True if no character was read
_Edges = dict[int, dict[int, str]]  # by the state left and the state entered: an expression for the text between them


@dataclass(slots=True)
class StepAllowance:
    """The automaton steps that are left: some 5 us each, for a character and a thread of the expression."""

    left: int

    def spend(self, count: int) -> None:
        """Count steps. Raises `PatternError` if too few are left."""
        self.left -= count
        if self.left < 0:
            raise PatternError("its complement takes too many steps")


def complement(source: str, steps: StepAllowance) -> str:
    """Return an expression, from "^" to "$", for the texts in which `source` is found nowhere.

    Raises `PatternError` if it takes too much work, or leaves no text. A "." of `source` is any character, "\\d" and
    "\\w" are those of ASCII, and the result matches no spaces beyond ASCII.
    """
    steps.spend(FIXED_STEPS)
    pattern, is_anchored = Pattern(source), source.startswith("^")
    if pattern.matches_empty and not is_anchored:
        raise PatternError("it is found at the end of every text")
    sets = _sets(pattern.node)
    states: dict[_State, int] = {((), True): 0}
    edges: _Edges = {}
    while len(edges) < len(states):
        (threads, is_start), state = list(states.items())[len(edges)]
        steps.spend(len(sets) * (1 + len(threads)))
        ways: dict[int, str] = {}
        for char, inside in sets:
            after, _, match = pattern.step(threads, char, is_start or not is_anchored, is_start)
            if match is None:
                then = states.setdefault((tuple(sorted(after)), False), len(states))
                ways[then] = ways.get(then, "") + inside
        edges[state] = {then: f"[{inside}]" for then, inside in ways.items()}
        if not (pattern.matches_empty if is_start else pattern.at_end(threads)):
            edges[state][_END] = ""
    return f"^{_read_back(edges)}$"


def is_within(inner: str, outer: str, steps: StepAllowance) -> bool:
    """Return True if `outer` matches each text that `inner` does; both begin with "^" and end with "$".

    Raises `PatternError` if it takes too much work to find out.
    """
    steps.spend(FIXED_STEPS)
    narrow, wide = Pattern(inner), Pattern(outer)
    chars = [char for char, _ in _sets(Concat((narrow.node, wide.node)))]
    if narrow.matches_empty and not wide.matches_empty:
        return False
    waiting: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]  # threads of each
    seen = {*waiting}
    while waiting:
        before, beside = waiting.pop()
        is_start = not before
        for char in chars:
            inside = tuple(sorted(narrow.step(before, char, is_start, is_start)[0]))
            if not inside:
                continue
            outside = tuple(sorted(wide.step(beside, char, is_start, is_start)[0]))
            steps.spend(len(outside))
            if narrow.at_end(inside) and not wide.at_end(outside):
                return False
            if (inside, outside) not in seen:
                seen.add((inside, outside))
                waiting.append((inside, outside))
    return True


def _read_back(edges: _Edges) -> str:
    """Return an expression for the paths from the first state to the end."""
    while len(edges) > 1:
        state = min(list(edges)[1:], key=lambda one: len(edges[one]) * sum(one in ways for ways in edges.values()))
        leaving = edges.pop(state)
        loop = leaving.pop(state, None)
        again = "" if loop is None else f"{loop}*" if loop[0] == "[" and "]" not in loop[:-1] else f"(?:{loop})*"
        for ways in edges.values():
            if (entering := ways.pop(state, None)) is not None:
                for then, rest in leaving.items():
                    ways[then] = _either(ways.get(then), f"{entering}{again}{rest}")
    (ways,) = edges.values()
    if _END not in ways:
        raise PatternError("every text holds it")
    return ways[_END]


def _either(one: str | None, other: str) -> str:
    if one is None or one == other:
        return other
    if len(one) + len(other) > MAX_COMPLEMENT_CHARS:
        raise PatternError("its complement is too long")
    return f"(?:{one}|{other})" if one and other else f"(?:{one}{other})?"


def _sets(node: Node) -> list[tuple[str, str]]:
    """Return a character of each set that an expression tells apart from others, and the set's spelling between
    brackets.
    """
    sources = {re.escape(leaf.char) if isinstance(leaf, Character) else leaf.source for leaf in _leaves(node)}
    if len(sources) > MAX_CHARACTER_SETS or any(re.search(r"\[.*\\[xuU]", source) for source in sources):
        raise PatternError("it names too many characters, or some by their numbers in a set")
    accepts = [re.compile(source, re.DOTALL | re.ASCII).fullmatch for source in sources]
    spaces = _SPACES if any("\\s" in source.lower() for source in sources) else []
    named = {*map(ord, "".join(sources)), *spaces}
    bounds = sorted({*_BOUNDS, *named, *[code + 1 for code in named]})
    found: dict[tuple[bool, ...], tuple[str, list[tuple[int, int]]]] = {}
    for least, after in pairwise(bounds):
        if least in spaces:
            continue
        _, ranges = found.setdefault(tuple([one(chr(least)) is not None for one in accepts]), (chr(least), []))
        is_next = bool(ranges) and ranges[-1][1] == least
        ranges.append((ranges.pop()[0] if is_next else least, after))
    return [(char, "".join([_range(*one) for one in ranges])) for char, ranges in found.values()]


def _range(least: int, after: int) -> str:
    ends = [chr(code) if chr(code).isalnum() else f"\\x{{{code:x}}}" for code in (least, after - 1)]
    return ends[0] if after == least + 1 else "-".join(ends)


def _leaves(node: Node) -> Iterator[Character | CharClass]:
    match node:
        case Character() | CharClass():
            yield node
        case Concat(parts) | Alternation(parts):
            for part in parts:
                yield from _leaves(part)
        case Repeat(part) | Group(_, part) | LookAhead(part):
            yield from _leaves(part)
