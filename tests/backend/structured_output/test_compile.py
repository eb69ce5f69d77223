"""Grammars of every kind are compiled, and what they match is what they say."""

import ctypes
import json

import pytest

from backend.grammar import GrammarKind
from backend.structured_output.compile import CompileError, compile_grammar, make_tokenizer
from backend.structured_output.frames import RowStatus
from backend.structured_output.matching import SlotMatcher
from tests.backend.structured_output.grammars import CONFIG, END, TOKENIZER_JSON

TOKENIZER = make_tokenizer(TOKENIZER_JSON, CONFIG.vocab_size, [END])
NUM_BYTES = CONFIG.vocab_size // 8


def accepts(kind: GrammarKind, source: str, text: str) -> bool:
    """Returns whether the whole text is one that the grammar allows, token by token, with the end token behind it."""
    matcher = compile_grammar(TOKENIZER, kind, source)
    return all(matcher.consume_token(token) for token in [*TOKENIZER.tokenize_str(text), END])


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("json_schema", '{"type":"integer","minimum":3}', ["3", "12345"], ["2", "3.5", '"3"', " 3"]),
        ("json_schema", "{}", ['{"a": [1, null]}', "true"], ["{a:1}", "["]),
        ("json_schema", "true", ['"x"'], ["x"]),
        ("regex", r"[a-z]+-\d{2}", ["abc-12"], ["-12", "abc-123", "abc-1"]),
        ("choice", json.dumps(["yes", 'no "maybe"', "été\n"]), ["yes", 'no "maybe"', "été\n"], ["y", "no", ""]),
        ("lark", 'start: "x" NUMBER\nNUMBER: /[0-9]+/', ["x1", "x123"], ["x", "1"]),
    ],
)
def test_a_grammar_allows_what_it_says(kind: str, source: str, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(GrammarKind(kind), source, text), text
    for text in bad:
        assert not accepts(GrammarKind(kind), source, text), text


def test_whitespace_inside_json_is_that_of_common_writers_and_bounded() -> None:
    value = {"a": [1, {"b": "c"}], "d": None}
    for text in (json.dumps(value), json.dumps(value, separators=(",", ":")), json.dumps(value, indent=4)):
        assert accepts(GrammarKind.JSON_SCHEMA, '{"type":"object"}', text)
    assert not accepts(GrammarKind.JSON_SCHEMA, '{"type":"object"}', '{"a":  1}')
    assert accepts(GrammarKind.JSON_LINE, '{"type":"object"}', json.dumps(value))
    for text in (json.dumps(value, separators=(",", ":")), json.dumps(value, indent=4)):
        assert not accepts(GrammarKind.JSON_LINE, '{"type":"object"}', text)


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
        ("lark", "start: missing", "missing"),
        ("lark", "", ""),
    ],
)
def test_a_compile_error_says_why_in_one_line(kind: str, source: str, message: str) -> None:
    with pytest.raises(CompileError) as refused:
        compile_grammar(TOKENIZER, GrammarKind(kind), source)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "pattern", ["(a", "[a", "a{2,1}", "*a", r"\p{Nonsense}", "(?=a)b", r"(a)\1", "(?P<n>a)(?P<n>b)"]
)
def test_a_regular_expression_is_refused_without_the_grammar_made_of_it(pattern: str) -> None:
    sources = {GrammarKind.REGEX: pattern, GrammarKind.JSON_SCHEMA: json.dumps({"type": "string", "pattern": pattern})}
    for kind, source in sources.items():
        with pytest.raises(CompileError, match=r"^invalid regex: [^|\n]*$") as refused:
            compile_grammar(TOKENIZER, kind, source)
        assert "start:" not in str(refused.value)


def test_a_mask_that_takes_too_much_work_is_told_apart_from_one_that_allows_nothing() -> None:
    mask = ctypes.create_string_buffer(NUM_BYTES)
    stuck = SlotMatcher(compile_grammar(TOKENIZER, GrammarKind.REGEX, "ab"))
    stuck.output_is(0, TOKENIZER.tokenize_str("zz"))
    assert stuck.fill(ctypes.addressof(mask), NUM_BYTES) is RowStatus.NOTHING
