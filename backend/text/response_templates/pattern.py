"""Regular expressions of checkpoints, matched in linear time over text that comes in pieces.

The delimiters of a response template may be regular expressions from a checkpoint. A backtracking engine would let one
of them hold the event loop for minutes, and would start again with each token. Here an expression is parsed into a
small syntax tree and compiled to a program, which is simulated (Thompson 1968, Pike's captures) with all threads at
once, one character at a time. The work for a character is bounded by the size of the program, no work is done twice,
and the place from which the text may still become a match is always known. Steps are cached, so that most characters
cost one look-up.

A match is the match that Python's `re` would find: the leftmost, and among several there the one that its quantifiers
prefer. Back-references, look-behind, and look-ahead anywhere but at the end are not supported.

No library does it: RE2 is linear too, and has neither look-ahead, with which Llama's and Mistral's calls begin and end,
nor partial matches, so that each token would search the held text again (180 us for 100,000 characters); and the tree
is needed anyway, for grammars.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from backend.text.response_templates.pattern_syntax import (
    Alternation,
    Character,
    CharClass,
    Concat,
    End,
    Group,
    LookAhead,
    Node,
    PatternError,
    Repeat,
    Start,
    predicate,
    read,
)

MAX_INSTRUCTIONS = 1000
_MAX_CACHED_STEPS = 4096  # steps of one pattern


# Instructions: a program is a list of them, and a thread stands at one by its index.
@dataclass(slots=True)
class _Char:
    accepts: Callable[[str], object]
    source: str  # of a set, or a character as `re` would spell it
    then: int


@dataclass(slots=True)
class _Split:
    options: list[int]  # the first is preferred


@dataclass(slots=True)
class _Save:
    slot: int
    then: int


@dataclass(slots=True)
class _Anchor:
    is_end: bool  # the end of the text; otherwise its start
    then: int


@dataclass(slots=True)
class _Match:
    pass


_Instruction = _Char | _Split | _Save | _Anchor | _Match
_MATCH = 0  # the index of `_Match` in a program
AHEAD_SLOT = 1  # the saved position of a match's end if look-ahead reads beyond it; slot 0 is its start


class _Compiler:
    """Writes a program back to front: the instructions of a node continue at an existing instruction."""

    def __init__(self, groups: list[str]) -> None:
        self.program: list[_Instruction] = [_Match()]
        self._slots = {name: 2 + 2 * index for index, name in enumerate(groups)}

    def compile(self, node: Node, then: int) -> int:
        """Return the index of the node's first instruction."""
        match node:
            case Character(char):
                then = self._add(_Char(char.__eq__, re.escape(char), then))
            case CharClass(source):
                then = self._add(_Char(predicate(source), source, then))
            case Concat(parts):
                for part in reversed(parts):
                    then = self.compile(part, then)
            case Alternation(options):
                then = self._add(_Split([self.compile(option, then) for option in options]))
            case Group(name, part):
                slot = self._slots[name]
                then = self._add(_Save(slot, self.compile(part, self._add(_Save(slot + 1, then)))))
            case LookAhead(part):
                then = self._ahead(part, then)
            case Start() | End():
                then = self._add(_Anchor(isinstance(node, End), then))
            case Repeat():
                then = self._repeat(node, then)
        return then

    def _ahead(self, part: Node, then: int) -> int:
        if then != _MATCH:
            raise PatternError("look-ahead and $ are supported at the end of an expression alone")
        return self._add(_Save(AHEAD_SLOT, self.compile(part, then)))

    def _repeat(self, node: Repeat, then: int) -> int:
        if node.most is None:
            loop = self._add(_Split([]))
            body = self.compile(node.part, loop)
            options = [body, then] if node.is_greedy else [then, body]
            self.program[loop] = _Split(options)
            then = loop
        else:
            end = then
            for _ in range(node.most - node.least):
                body = self.compile(node.part, then)
                then = self._add(_Split([body, end] if node.is_greedy else [end, body]))
        for _ in range(node.least):
            then = self.compile(node.part, then)
        return then

    def _add(self, instruction: _Instruction) -> int:
        if len(self.program) >= MAX_INSTRUCTIONS:
            raise PatternError(f"it compiles to more than {MAX_INSTRUCTIONS:,} instructions")
        self.program.append(instruction)
        return len(self.program) - 1


Saves = tuple[tuple[int, int], ...]  # each slot, and its position in characters after the start of the current one
Thread = tuple[int, int, Saves]  # its instruction, the thread it comes from (-1: a new one), its saves
Step = tuple[tuple[int, ...], tuple[tuple[int, Saves], ...], tuple[int, int, Saves] | None]


class Pattern:
    """A compiled expression. Raises `PatternError`. `_PatternSearch` of the scanner matches it by `step`."""

    def __init__(self, source: str) -> None:
        self.node, self.groups = read(source)
        compiler = _Compiler(list(self.groups))
        self._start = compiler.compile(self.node, _MATCH)
        self._program = compiler.program
        self.num_slots = 2 + 2 * len(self.groups)
        self._steps: dict[tuple[tuple[int, ...], str, bool, bool], Step] = {}
        self.first = self._first()

    @classmethod
    def literal(cls, text: str) -> "Pattern":
        """Return the expression that matches this text alone."""
        return cls(re.escape(text))

    def step(self, threads: tuple[int, ...], char: str, begins: bool, is_start: bool) -> Step:
        """Return the threads after a character, in order of preference, each with the thread that it comes from, and
        the match that ends their competition, if any: its thread, its end in characters after the start of this
        character, and its saves. `begins`: a new thread starts at this character; `is_start`: no text precedes it.
        """
        key = (threads, char, begins, is_start)
        found = self._steps.get(key)
        if found is None:
            if len(self._steps) >= _MAX_CACHED_STEPS:
                self._steps.clear()
            found = self._steps[key] = self._make_step(threads, char, begins, is_start)
        return found

    @property
    def matches_empty(self) -> bool:
        """True if the expression matches in an empty text."""
        return any(at == _MATCH for at, _ in self._closure(self._start, 0, is_start=True, is_end=True))

    def at_end(self, threads: tuple[int, ...]) -> tuple[int, Saves] | None:
        """Return the first thread that matches where the text ends, and its saves."""
        for index, at in enumerate(threads):
            instruction = self._program[at]
            if isinstance(instruction, _Anchor):
                for then, saves in self._closure(instruction.then, 0, False, is_end=True):
                    if then == _MATCH:
                        return index, saves
        return None

    def _first(self) -> str | None:
        """Return an expression for the characters that a match may begin with, except at the start of the text; None if
        a match may be empty.
        """
        instructions = [self._program[at] for at, _ in self._closure(self._start, 0, is_start=False)]
        if any(isinstance(instruction, _Match) for instruction in instructions):
            return None
        sources = {instruction.source for instruction in instructions if isinstance(instruction, _Char)}
        return "|".join(sorted(sources)) or "(?!)"

    def _make_step(self, threads: tuple[int, ...], char: str, begins: bool, is_start: bool) -> Step:
        sources: list[Thread] = [(at, index, ()) for index, at in enumerate(threads)]
        if begins:
            sources += [(at, -1, saves) for at, saves in self._closure(self._start, 0, is_start)]
        after: dict[int, tuple[int, Saves]] = {}
        match = None
        for at, source, saves in sources:
            instruction = self._program[at]
            if isinstance(instruction, _Match):  # before the character
                match = (source, 0, saves)
                break
            if not isinstance(instruction, _Char) or not instruction.accepts(char):
                continue
            for then, more in self._closure(instruction.then, 1, False):
                if then == _MATCH:
                    match = (source, 1, saves + more)
                    break
                after.setdefault(then, (source, saves + more))
            if match is not None:
                break
        return tuple(after), tuple(after.values()), match

    def _closure(self, at: int, offset: int, is_start: bool, is_end: bool = False) -> list[tuple[int, Saves]]:
        """Return the places that a thread reaches without a character, in order of preference, each with its saves."""
        found: list[tuple[int, Saves]] = []
        seen: set[int] = set()
        stack: list[tuple[int, Saves]] = [(at, ())]
        while stack:
            at, saves = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            match self._program[at]:
                case _Split(options):
                    stack += [(option, saves) for option in reversed(options)]
                case _Save(slot, then):
                    stack.append((then, (*saves, (slot, offset))))
                case _Anchor(wants_end, then) if is_end if wants_end else is_start:
                    stack.append((then, saves))
                case _Anchor(False, _):
                    pass
                case _:
                    found.append((at, saves))
        return found
