"""Expressions match as Python's `re` matches them, however the text is cut, and in time that no expression explodes."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.text.response_templates.pattern import MAX_INSTRUCTIONS, Pattern
from backend.text.response_templates.pattern_syntax import MAX_PATTERN_CHARS, PatternError, literal_runs, read
from backend.text.response_templates.scanner import MAX_DELIMITER_CHARS, DelimiterSet, Scanner
from tests.examples import examples

SOURCES = [
    r"\s*<a>",
    r"<a>\s*<f=(?P<n>[^>\n]+)>",
    r"a.*?b",
    r"a.*b",
    r"(?:^|<a>\s*)b",
    r"\n?</r>",
    r"c to=f\.(?P<n>\w+).*?<m>",
    r"\s*(?:<e>|<ee>)",
    r"a+?b*",
    r"a??b{0,2}?x",
    r"(?:ab|abc)(?=\s*\{)",
    r"a{2,3}",
    r"x(?P<k>a|ab)(?P<l>c|bcd)(?P<m>d*)",
    r"(?s)b\x61$",
    r"<p=(?P<key>\w+)>\s*(?P<value>.*?)\s*</p>",
    r"(?:(?:a*)*b|[^\S\n]|\Aaa|\u0062\t)+c",
    r"{a|a{,1}b",
]
WORDS = ["<a>", "<f=", "</r>", "<m>", "c to=f.", "</p>", "<p=", ">", "<e", *"ab<>ef=mc \n{}/rpxd\t"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)


def first(pattern: Pattern, text: str, cuts: list[int]) -> tuple[int, int, dict[str, str]] | None:
    """Return where the first match begins and ends, and its groups, of a text that comes in pieces."""
    scanner, taken = Scanner(DelimiterSet([pattern]), longest=None), 0
    for start, end in pairwise([0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]):
        scanner.text += text[start:end]
        if (found := scanner.find()) is not None:
            return taken + found.start, taken + found.end, found.groups
        taken += len(scanner.take(scanner.num_free))
    found = scanner.end_text()
    return found and (taken + found.start, taken + found.end, found.groups)


@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=examples(25))
@given(text=TEXTS, cuts=st.lists(st.integers(0, 100), max_size=5))
def test_the_first_match_is_that_of_re(source: str, text: str, cuts: list[int]) -> None:
    expected = re.search(source, text, re.DOTALL)
    if expected and expected.start() == expected.end() == len(text):
        return  # an empty match at the very end delimits nothing
    groups = {name: value for name, value in expected.groupdict().items() if value is not None} if expected else {}
    assert first(Pattern(source), text, cuts) == (expected and (expected.start(), expected.end(), groups))


@pytest.mark.parametrize("source", ["(a+)+$", "(a|a)*b", "(?:a*)*c", "(.*)(.*)(.*)x", "(?:a{0,9}){0,9}b"])
def test_a_pattern_that_explodes_elsewhere_takes_a_bounded_number_of_threads(source: str) -> None:
    scanner = Scanner(DelimiterSet([Pattern(source)]))
    scanner.text = "a" * 3000 + "!"
    assert scanner.find() is None  # by backtracking, later than the end of the universe


def test_a_beginning_that_is_too_long_for_a_delimiter_is_text() -> None:
    scanner = Scanner(DelimiterSet([Pattern("<a.*?>")]))
    scanner.text = "<a" + "b" * (2 * MAX_DELIMITER_CHARS)
    assert scanner.find() is None
    assert scanner.num_free == len(scanner.text)
    scanner.text += "<a>"
    found = scanner.find()
    assert found is not None and scanner.text[found.start : found.end] == "<a>"


def test_of_several_the_first_then_the_longest_counts_once_it_is_certain() -> None:
    scanner = Scanner(DelimiterSet([Pattern("ab"), Pattern("abc"), Pattern("x")]))
    scanner.text = "-ab"
    assert scanner.find() is None  # it may still become the longer one
    assert scanner.take(scanner.num_free) == "-"
    scanner.text += "x"
    found = scanner.find()
    assert found is not None and (found.index, found.start, found.end) == (0, 0, 2)
    scanner.text = "abc"
    scanner.look_for(DelimiterSet([Pattern("ab"), Pattern("abc")]))
    found = scanner.find()
    assert found is not None and (found.index, found.end) == (1, 3)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("(?<=a)b", "an extension group"),
        ("(?!a)b", "an extension group"),
        (r"(a)\1", r"the escape \\1"),
        ("(a", "not closed"),
        ("a)", "unmatched"),
        ("*a", "a quantifier of nothing"),
        ("(?=a)*", "a quantifier of nothing that can be repeated"),
        ("a**", "one of another"),
        ("a++", "possessive"),
        ("a{500}", "between 0 and 200"),
        ("[z-a]", "no set of characters"),
        (r"\bx", "the escape"),
        (r"\u12", "an escape without its digits"),
        ("(?P<1>a)", "a group without a name"),
        ("(?=a)b", "at the end of an expression alone"),
        ("(?:.{200}){200}", f"{MAX_INSTRUCTIONS:,} instructions"),
        ("a" * (MAX_PATTERN_CHARS + 1), f"{MAX_PATTERN_CHARS + 1:,} characters"),
    ],
)
def test_an_unsupported_expression_is_refused_by_name(source: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        Pattern(source)


def test_the_texts_that_stand_in_an_expression() -> None:
    node, _ = read(r"(?:<\|x\|>commentary|y)\s*(?P<n>\w+)<\|m\|>")
    assert {"<|x|>commentary", "y", "<|m|>"} <= set(literal_runs(node))


@settings(max_examples=examples(15))
@given(st.text(max_size=20))
def test_a_literal_matches_itself(text: str) -> None:
    scanner = Scanner(DelimiterSet([Pattern.literal(text)]))
    scanner.text = f"ab{text}cd"
    found = scanner.find()
    if text:
        assert found is not None and (found.start, found.end) == (f"ab{text}cd".index(text), found.start + len(text))
