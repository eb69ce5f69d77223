"""Replaces look-arounds at the ends of a JSON schema's patterns: the compiler supports none."""

import re
from contextlib import suppress

from backend.text.response_templates.complement import StepAllowance, complement, is_within
from backend.text.response_templates.pattern_syntax import PatternError

MAX_LOOK_AROUNDS = 8  # in a pattern
MAX_COMPLEMENT_STEPS = 1_000  # of complements, in a schema
_TOKEN = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]?|\(\?<?[=!]|[()|$^]", re.DOTALL)
_LITERAL = re.compile(r"(?:\w|[-/:@ ]|\\\W)*")  # of a length that is known
_UNREADABLE = re.compile(r"\\(?:[bBkZ]|[1-9])")  # a word's boundary, or what a group has matched


class LookArounds:
    """The look-arounds of one schema."""

    def __init__(self) -> None:
        self._complements: dict[str, str | None] = {}
        self._said: dict[tuple[str, str], bool] = {}
        self._steps = StepAllowance(MAX_COMPLEMENT_STEPS)

    def apart(self, pattern: str) -> list[str] | None:
        """Patterns whose conjunction matches the same texts, itself without a look-around; None if it cannot be split
        or read.
        """
        looks, has_choice, is_readable = _looks(pattern)
        if not is_readable:
            return None
        if not looks:
            return [pattern]
        if has_choice or len(looks) > MAX_LOOK_AROUNDS or not pattern.startswith("^"):
            return None
        parts, rest, at = list[str](), "", 0
        for begin, after, kind in looks:
            rest += pattern[at:begin]
            at, inside = after, pattern[begin + len(kind) : after - 1]
            if "<" not in kind and _LITERAL.fullmatch(rest, 1):
                looked_for = f"{rest}(?:{inside.removeprefix('^') if rest == '^' else inside})"
            elif "<" in kind and pattern[after:] == "$":
                looked_for = f"(?:{inside})$"
            elif kind == "(?=" and self._is_said(_branch(pattern, after), inside):
                continue
            else:
                return None
            found = self._complement(looked_for) if kind.endswith("!") else looked_for
            if found is None:
                return None
            parts.append(found)
        return [rest + pattern[at:], *parts]

    def _is_said(self, branch: str, looked_for: str) -> bool:
        """True if each text of the branch matches the look-ahead too: both must match to the end of the text."""
        known = self._said
        if (branch, looked_for) not in known:
            known[branch, looked_for] = False
            with suppress(PatternError):
                known[branch, looked_for] = (
                    branch.endswith("$")
                    and looked_for.endswith("$")
                    and is_within(f"^(?:{branch[:-1]})$", f"^(?:{looked_for[:-1]})$", self._steps)
                )
        return known[branch, looked_for]

    def _complement(self, pattern: str) -> str | None:
        known = self._complements
        if pattern not in known:
            try:
                known[pattern] = complement(pattern, self._steps)
            except PatternError:
                known[pattern] = None
        return known[pattern]


def _branch(pattern: str, at: int) -> str:
    """The pattern from `at` to the end of the group or alternative."""
    depth = 0
    for token in _TOKEN.finditer(pattern, at):
        depth += token[0].startswith("(") - (token[0] == ")")
        if depth < 0 or (not depth and token[0] == "|"):
            return pattern[at : token.start()]
    return pattern[at:]


def _looks(pattern: str) -> tuple[list[tuple[int, int, str]], bool, bool]:
    """Return where the outermost look-arounds begin and end, and how; whether there is a choice outside of all groups;
    and whether the rest can be read: nothing looks around within a look-around, and the end of a text is that of a way
    through the pattern.
    """
    looks, open_groups, has_choice, is_readable = list[tuple[int, int, str]](), list[tuple[int, str]](), False, True
    end_of_text = -1  # position behind which the text ends
    is_looking = False
    for token in _TOKEN.finditer(pattern):
        text, next_char = token[0], pattern[token.end() : token.end() + 1]
        if text.startswith("("):
            is_readable &= text == "(" or not is_looking
            is_looking |= text != "("
            open_groups.append((token.start(), text))
        elif text == ")" and open_groups:
            begin, kind = open_groups.pop()
            if kind != "(":
                looks.append((begin, token.end(), kind))
                is_looking = False
            elif begin < end_of_text and not is_looking:
                is_readable &= next_char in ("", ")", "|")
        elif text == "|":
            has_choice |= not open_groups
        elif text == "$" and not is_looking:
            is_readable, end_of_text = is_readable and next_char in ("", ")", "|"), token.end()
        elif text == "^" and not is_looking:
            is_readable &= token.start() == 0 or pattern[token.start() - 1] in "(|:"
        elif _UNREADABLE.fullmatch(text):
            is_readable = False
    return looks, has_choice, is_readable
