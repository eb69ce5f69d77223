"""Compiling takes a grammar to what llguidance matches tokens with. Runs in grammar processes alone."""

import json

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from backend.grammar import GrammarKind

WHITESPACE = r"\x20|\r?\n[\x20\t]{0,32}"
"""Between the parts of a JSON text is none, one space, or a new line with its indentation: a model might go on with
more of it for ever.
"""

JSON_OPTIONS = {
    GrammarKind.JSON_SCHEMA: json.dumps({"whitespace_pattern": WHITESPACE}),
    GrammarKind.JSON_LINE: json.dumps({"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}),
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
"""Counted, and so the same on any machine and under any load; the times are those of an idle one."""


_TOO_MUCH = ("too large", "too many", "too complex", "too big", "limit", "exceed", "fuel")


class CompileError(Exception):
    """The grammar cannot be compiled; the message, of one line, says why."""

    @property
    def is_too_complex(self) -> bool:
        """True if it goes beyond a limit, and is a grammar otherwise."""
        return any(words in str(self).lower() for words in _TOO_MUCH)


def make_tokenizer(tokenizer_json: str, vocab_size: int, end_tokens: list[int]) -> LLTokenizer:
    """Return the vocabulary as llguidance has it, with as many tokens as the model has logits. Raises `ValueError`."""
    return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=end_tokens)


def compile_grammar(tokenizer: LLTokenizer, kind: GrammarKind, source: str) -> LLMatcher:
    """Return a matcher that has seen no token yet. Raises `CompileError`."""
    matcher = LLMatcher(tokenizer, _translated(kind, source), log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise CompileError(_one_line(matcher.get_error()))
    return matcher


def _translated(kind: GrammarKind, source: str) -> str:
    """Return the grammar as llguidance reads it. A schema is not parsed here: that would hold the interpreter."""
    match kind:
        case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_LINE:
            return f'{{"grammars":[{{"json_schema":{_with_options(source.strip(), JSON_OPTIONS[kind])}}}]}}'
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(source)
        case GrammarKind.CHOICE:
            choices = " | ".join([json.dumps(text, ensure_ascii=False) for text in json.loads(source)])
            return f"start: CHOICE\nCHOICE: {choices}\n"
        case GrammarKind.LARK:
            return source


def _with_options(schema: str, options: str) -> str:
    if not schema.startswith("{"):
        return schema
    rest = schema[1:].lstrip()
    return f'{{"x-guidance":{options}{"" if rest.startswith("}") else ","}{rest}'


def _one_line(message: str) -> str:
    return " ".join(message.replace("<non-verbose/>", "").split())[:500]
