"""A complement matches exactly the texts in which an expression is not found, or is refused in bounded time."""

import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.text.response_templates.complement import StepAllowance, complement, is_within
from backend.text.response_templates.pattern_syntax import PatternError
from tests.examples import examples

SOURCES = [
    r"^\.", r"^.*\.\.", r"^[-+.]*$", r"^(?:ab|abc|b)$", "-$", r"^.*foo", r"^\s", r"^\d+$", r"^a{2,3}$", r"^(?:a|b-)*$",
    r"\.lo$", r"^é[à-ü]+", r"^.*(?:fo|ba)", r"^[^a-f]", r"^x?$", r"^(?P<n>a)b", r"^a+?b", r"^\w-",
]  # fmt: skip
TEXTS = st.text("ab.-+0fox é\n日😀", max_size=8) | st.sampled_from(["abc", "x.lo", "b-b-", "aaa", "foo"])


def as_python_has_it(source: str) -> re.Pattern[str]:
    source = re.sub(r"\$$", r"\\Z", source)  # where `$` is before a last line feed, too
    return re.compile(re.sub(r"\\x\{([0-9a-f]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", source))


@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=examples(30))
@given(text=TEXTS)
def test_a_text_matches_either_the_expression_or_its_complement(source: str, text: str) -> None:
    other = as_python_has_it(complement(source, StepAllowance(1000)))
    assert (other.search(text) is None) == (re.search(source, text, re.DOTALL | re.ASCII) is not None)


@pytest.mark.parametrize(
    "source",
    [
        "^(a|b)*a(a|b){20}",
        "^(a{200}){5}$",
        "^.*(a|b).{180}",
        "^",
        "^[\\s\\S]*$",
        "x?$",
        "^(",
        r"^\p{L}",
        "^[\\u00e9]",
        "^a\\b",
    ],
)
def test_a_complement_is_refused_when_it_is_too_large_or_empty(source: str) -> None:
    steps = StepAllowance(1000)
    with pytest.raises(PatternError):
        complement(source, steps)


def test_steps_are_those_of_all_complements_together() -> None:
    steps = StepAllowance(1000)
    for char in "abcdefghij":
        complement(f"^{char}", steps)
    assert 0 < steps.left < 500


def test_an_expression_is_within_another_that_matches_all_its_texts() -> None:
    sources = [
        "a?", "a*", "[a0]{0,2}", "0*", r"a?\.0{0,2}0*", "[0.]{1,3}0*", "a|0a", "(?:a0|a)(?:0a)?",
        r"\w*\.?\w*", r"[^\W.]+",
    ]  # fmt: skip
    texts = ["".join(one) for size in range(6) for one in product("a0.", repeat=size)]
    matched = {source: {text for text in texts if re.fullmatch(source, text)} for source in sources}
    for inner, outer in product(sources, repeat=2):
        found = is_within(f"^(?:{inner})$", f"^(?:{outer})$", StepAllowance(500))
        assert found == (matched[inner] <= matched[outer]), (inner, outer)
    with pytest.raises(PatternError):
        is_within("^(?:(a|b)*a(a|b){20})$", "^(?:(a|b)*b(a|b){20})$", StepAllowance(500))
