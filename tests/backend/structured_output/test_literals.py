"""Literals of a grammar come back letter by letter, also where the tokenizer would merge them elsewhere."""

import ctypes
import json
import re
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from backend.grammar import GrammarKind
from backend.structured_output.compile import compile_grammar, make_tokenizer
from backend.structured_output.matching import SlotMatcher
from backend.text.response_templates.call_grammar import Tool, call_grammar
from backend.text.response_templates.lark import Vocabulary
from backend.text.response_templates.tag_grammar import UnsupportedSchema
from backend.text.response_templates.template import ResponseTemplate
from tests.backend import tiny_tokenizers as tiny
from tests.backend.structured_output.grammars import CONFIG, TOKENIZER_JSON, drawn
from tests.backend.structured_output.grammars import END as EMBEDDED_END
from tests.backend.text.response_templates.families import FAMILIES, parsed
from tests.examples import examples

VOCABULARIES: dict[str, Callable[[], tuple[str, int, int]]] = {  # of each: tokenizer.json, logits, the end token
    "embedded": lambda: (TOKENIZER_JSON, CONFIG.vocab_size, EMBEDDED_END),
    "Qwen's kind": lambda: (tiny.normalising_bpe().to_str(), 512, tiny.normalising_bpe().token_to_id("</s>")),
    "Llama 2's kind": lambda: (tiny.byte_fallback_bpe().to_str(), 320, tiny.byte_fallback_bpe().token_to_id("</s>")),
}
NAMES = ["<|end|>", "</s>", "<s>", "<tool>", "<tool_call>", "<|im_end|>", "plain added", "Ünïcode", "<unk>", "<0x41>"]
PIECES = [*NAMES, *'<|>ae ▁"\\/\n', "e\u0301", "\u00e9", "\u212b", "ﬁ", "\u1100\u1161", "日本", "😀", "end|>", " the"]
literals = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join)
vocabularies = st.sampled_from(sorted(VOCABULARIES))


@cache
def vocabulary(name: str) -> LLTokenizer:
    text, size, end = VOCABULARIES[name]()
    return make_tokenizer(text, size, [end])


def written(name: str, kind: GrammarKind, source: str, seed: int = 0) -> str:
    """The text of an answer, as its client is told it."""
    tokens = drawn(vocabulary(name), kind, source, Random(seed))
    assert tokens is not None
    return vocabulary(name).decode_bytes([token for token in tokens if token not in skipped(name)]).decode()


@cache
def skipped(name: str) -> frozenset[int]:
    """The tokens that no client is told of."""
    return frozenset(token["id"] for token in added_tokens(name) if token["special"])


def added_tokens(name: str) -> list[dict[str, Any]]:
    added: list[dict[str, Any]] = json.loads(VOCABULARIES[name]()[0])["added_tokens"]
    return added


def regex_of(text: str) -> str:
    return "".join(re.escape(char) if char.isascii() and not char.isalnum() else char for char in text)


@settings(max_examples=examples(20))
@given(vocabularies, literals, literals, st.integers(0, 9))
@example("embedded", "a<|end|>b", "x", 0)
@example("embedded", "a\x7fb", "\x7f", 0)
@example("Qwen's kind", "cafe\u0301", "</s>", 0)
def test_choices_patterns_and_lark_texts_are_whole(name: str, text: str, other: str, seed: int) -> None:
    assert written(name, GrammarKind.CHOICE, json.dumps([text, other]), seed) in (text, other)
    assert written(name, GrammarKind.REGEX, f"(?:{regex_of(text)}|x{regex_of(other)})!", seed) in (
        f"{text}!", f"x{other}!",
    )  # fmt: skip
    assert written(name, GrammarKind.LARK, f"start: {json.dumps(text)} ({json.dumps(other)})?", seed) in (
        text, text + other,
    )  # fmt: skip


@settings(max_examples=examples(20))
@given(vocabularies, literals, literals, st.sampled_from([GrammarKind.JSON_SCHEMA, GrammarKind.JSON_LINE]))
@example("embedded", "<|end|>", "a<|end|>", GrammarKind.JSON_SCHEMA)
def test_names_constants_and_enums_of_a_schema_are_whole(name: str, text: str, other: str, kind: GrammarKind) -> None:
    schema = {
        "type": "object",
        "properties": {text: {"const": {"a": [text, 1, None]}}, f"{other}!": {"enum": [text, other]}},
        "required": [text, f"{other}!"],
        "additionalProperties": False,
    }
    answer = json.loads(written(name, kind, json.dumps(schema)))
    assert answer[text] == {"a": [text, 1, None]}
    assert answer[f"{other}!"] in (text, other)


@settings(max_examples=examples(20))
@given(vocabularies, st.sampled_from(["hermes", "mistral-args", "gpt-oss", "qwen3-coder"]), literals)
@example("embedded", "hermes", "<|end|>")
@example("embedded", "qwen3-coder", "<|end|>")
@example("Qwen's kind", "qwen3-coder", "<s>")
@example("Qwen's kind", "qwen3-coder", "a</parameter>")
@example("Qwen's kind", "qwen3-coder", "\n</function></tool_call>")
def test_required_calls_have_the_arguments_that_are_left(name: str, family: str, text: str) -> None:
    template = ResponseTemplate(FAMILIES[family].source)
    properties = {"at": {"type": "string", "enum": [text]}, "all": {"type": "array", "const": [text]}}
    insert = {"type": "object", "properties": properties, "required": ["at", "all"], "additionalProperties": False}
    asked = {"is_required": True, "is_single": True, "is_reasoning": False}
    try:
        lark = call_grammar(template, [Tool("insert", insert)], special_tokens(name), **asked)
    except UnsupportedSchema:  # it would end its tag, or the space around it is the tag's
        assert family == "qwen3-coder" and ("</" in text or text != text.strip())
        return
    message = parsed(template, [written(name, GrammarKind.LARK, lark)], tools={"insert": properties})
    ((called, arguments),) = message.calls
    assert (called, json.loads(arguments)) == ("insert", {"at": text, "all": [text]})


def special_tokens(name: str) -> Vocabulary:
    added, (end,) = added_tokens(name), vocabulary(name).eos_tokens
    special = {token["content"]: token["id"] for token in added if vocabulary(name).is_special_token(token["id"])}
    ends = frozenset(text for text, token in special.items() if token == end)
    return Vocabulary({text: token for text, token in special.items() if text not in ends}, ends, (end,))


class Liar:
    """A matcher that forces the end token (7) within a text, and allows it where it matches nothing."""

    def __init__(self, forced: list[int], num_valid: int, accepts: bool = False) -> None:
        self._forced, self._num_valid, self._accepts = forced, num_valid, accepts
        self.consumed: list[int] = []

    def deep_copy(self) -> "Liar":
        return Liar(self._forced, self._num_valid, self._accepts)

    def is_error(self) -> bool:
        return False

    def is_accepting(self) -> bool:
        return self._accepts

    def stop_reason(self) -> str:
        return "NotStopped"

    def consume_token(self, sampled_token: int) -> bool:
        self.consumed.append(sampled_token)
        return True

    def compute_ff_tokens(self) -> list[int]:
        return list(self._forced)

    def validate_tokens(self, tokens: list[int]) -> int:
        return min(self._num_valid, len(tokens))

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        ctypes.memset(trg_pointer, 0, trg_byte_size)
        ctypes.memset(trg_pointer, 1 << 7, 1)


@pytest.mark.parametrize(
    ("forced", "valid", "kept"), [([3, 7, 4], 3, [3]), ([3, 4], 1, [3]), ([7], 1, []), ([], 0, [])]
)
def test_tokens_that_the_library_forces_are_checked(forced: list[int], valid: int, kept: list[int]) -> None:
    mask = ctypes.create_string_buffer(4)
    matcher = SlotMatcher(Liar(forced, valid), [7])
    matcher.fill(ctypes.addressof(mask), 4)
    assert matcher.forced == kept
    assert not matcher.may_end_with(7) and SlotMatcher(Liar([], 0, accepts=True), [7]).may_end_with(7)


@pytest.mark.parametrize(
    ("lark", "text", "may_end"),
    [
        ('start: "a" <[1]> "b"', "a", False), ('start: "a" <[1]>', "a", True), ('start: "a" <[1]>? "b"', "ab", True),
        ('start: "a" <[1]>? "b"', "a", False), ('start: "a"', "a", True), ('start: "a"', "", False),
    ],
)  # fmt: skip
def test_an_answer_may_end_where_it_matches_with_its_end_token_or_without(lark: str, text: str, may_end: bool) -> None:
    matcher = SlotMatcher(compile_grammar(vocabulary("embedded"), GrammarKind.LARK, lark), [EMBEDDED_END])
    matcher.output_is(0, vocabulary("embedded").tokenize_str(text))
    assert matcher.may_end_with(EMBEDDED_END) == may_end
