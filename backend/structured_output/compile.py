"""Compiling turns a grammar into an llguidance matcher. Only grammar processes run this module."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from backend.grammar import ONE_LINE, GrammarKind, json_options, lark_text

WHITESPACE = r"\x20|\r?\n[\x20\t]{0,32}"
"""Between the parts of a JSON text stands nothing, one space, or a line break with indentation: with more allowed, a
model might write white space for ever.
"""

JSON_STYLES: Mapping[GrammarKind, Mapping[str, Any]] = {
    GrammarKind.JSON_SCHEMA: {"whitespace_pattern": WHITESPACE},
    GrammarKind.JSON_LINE: ONE_LINE,
}

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=60_000,  # 4 ms
    step_max_items=25_000,  # 1 ms
    max_lexer_states=100_000,  # 1 to 2 kB each
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""The limits are counts, so that they are the same on any machine and under any load; the times are those of an idle
machine.
"""


_PATTERN_FAULT = re.compile(r"regex parse error:.*^error: ([^\n]+)", re.MULTILINE | re.DOTALL)
_TOO_MUCH = ("too large", "too many", "too complex", "too big", "limit", "exceed", "fuel")


class CompileError(Exception):
    """The grammar cannot be compiled; the message, of one line, says why."""

    @property
    def is_too_complex(self) -> bool:
        """Return True if the grammar is valid and exceeds a limit."""
        return any(words in str(self).lower() for words in _TOO_MUCH)


class _GrammarVocabulary(TokenizerWrapper):
    """The vocabulary in llguidance's format, with a tokenizer for the text that a grammar forces.

    The text of a grammar is tokenized to exactly its bytes: no added token stands for its own name in it, and nothing
    is normalised. The library's own tokenizer does both: it forces the end token where a literal contains that token's
    name, and then finds that the grammar allows no token.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, library: LLTokenizer, core: tokenizers.Tokenizer) -> None:
        ids = range(library.vocab_size)
        self.eos_token_id = library.eos_token
        self.special_token_ids = [token for token in ids if library.is_special_token(token)]
        self.tokens = [library.decode_bytes([token]) for token in ids]
        self.encode_greedily: Callable[[str], list[int]] = library.greedy_tokenize
        self._special = frozenset(self.special_token_ids)
        self._core = _without_names(core)

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        is_exact = self._special.isdisjoint(ids) and b"".join([self.tokens[one] for one in ids]) == text.encode()
        return ids if is_exact else self.encode_greedily(text)


def make_tokenizer(tokenizer_json: str, vocab_size: int, end_tokens: list[int]) -> LLTokenizer:
    """Return the vocabulary in llguidance's format, with as many tokens as the model has logits. Raises
    `ValueError`.
    """
    library = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=end_tokens, slices=[])
    literals = _GrammarVocabulary(library, tokenizers.Tokenizer.from_str(tokenizer_json))
    made = LLTokenizer(literals, eos_token=end_tokens)
    literals.encode_greedily = made.greedy_tokenize  # the memory of the library's own tokenizer is free again
    return made


def _without_names(core: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer of the same words, without added tokens, and without the steps that change or add text."""
    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    steps = {name: getattr(core, name) for name in ("normalizer", "pre_tokenizer")}
    kept = {name: _exact(json.loads(step.__getstate__())) for name, step in steps.items() if step is not None}
    plain = tokenizers.Tokenizer.from_str(json.dumps(empty | kept))
    plain.model = core.model
    return plain


def _exact(step: dict[str, Any]) -> dict[str, Any] | None:
    """Return a step of a tokenizer without its parts that change or add text; None if no part is left."""
    match step:
        case {"type": "Sequence"}:
            key = "normalizers" if "normalizers" in step else "pretokenizers"
            return {**step, key: [kept for one in step[key] if (kept := _exact(one)) is not None]}
        case {"type": "NFC" | "NFD" | "NFKC" | "NFKD" | "Prepend"}:
            return None
        case {"prepend_scheme": _}:
            return {**step, "prepend_scheme": "never"}
        case {"add_prefix_space": _}:
            return {**step, "add_prefix_space": False}
    return step


def compile_grammar(tokenizer: LLTokenizer, kind: GrammarKind, source: str) -> LLMatcher:
    """Return a matcher that has seen no token yet. Raises `CompileError`."""
    matcher = LLMatcher(tokenizer, _translated(kind, source), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise CompileError(_reason(kind, matcher.get_error()))
    return matcher


def _translated(kind: GrammarKind, source: str) -> str:
    """Return the grammar in llguidance's syntax. A schema is not parsed here: that would hold the interpreter lock."""
    match kind:
        case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_LINE:
            options = json.dumps(json_options(source, JSON_STYLES[kind]))
            return f'{{"grammars":[{{"json_schema":{_with_options(source.strip(), options)}}}]}}'
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(source)
        case GrammarKind.CHOICE:
            return f"start: CHOICE\nCHOICE: {' | '.join(map(lark_text, json.loads(source)))}\n"
        case GrammarKind.LARK:
            return source


def _with_options(schema: str, options: str) -> str:
    if not schema.startswith("{"):
        return schema
    rest = schema[1:].lstrip()
    return f'{{"x-guidance":{options}{"" if rest.startswith("}") else ","}{rest}'


def _reason(kind: GrammarKind, message: str) -> str:
    """Return an error in one line: for a pattern, without the grammar that was generated around it."""
    fault = None if kind is GrammarKind.LARK else _PATTERN_FAULT.search(message)
    if fault is not None:
        return f"invalid regex: {fault[1]}"
    return " ".join(message.replace("<non-verbose/>", "").split())[:500]
