"""The matcher of a slot: its masks and forced tokens depend on the output alone, however it was told of it."""

import ctypes
import json

from hypothesis import given
from hypothesis import strategies as st

from backend.grammar import GrammarKind
from backend.scheduler.batch import NO_TOKEN_ALLOWED
from backend.structured_output.compile import compile_grammar, make_tokenizer
from backend.structured_output.frames import RowStatus
from backend.structured_output.matching import SlotMatcher
from tests.backend.structured_output.grammars import CONFIG, END, PERSON, TOKENIZER_JSON

TOKENIZER = make_tokenizer(TOKENIZER_JSON, CONFIG.vocab_size, [END])
SOURCES = [
    PERSON.source,
    '{"type":"array","items":{"type":"string","maxLength":5},"maxItems":3}',
    '{"const":{"a":["hello world",12345],"b":null}}',
]
COMPILED = [compile_grammar(TOKENIZER, GrammarKind.JSON_SCHEMA, source) for source in SOURCES]


class Asked:
    """A matcher, and its masks as sets of tokens."""

    def __init__(self, grammar: int) -> None:
        self.matcher = SlotMatcher(COMPILED[grammar])
        self._mask = ctypes.create_string_buffer(CONFIG.vocab_size // 8)

    def allowed(self) -> tuple[frozenset[int], tuple[int, ...]]:
        """Returns the tokens that may follow, and those that are forced."""
        assert self.matcher.fill(ctypes.addressof(self._mask), len(self._mask)) is RowStatus.MASKED
        if self.matcher.forced:
            return frozenset(self.matcher.forced[:1]), tuple(self.matcher.forced)
        bits = int.from_bytes(self._mask.raw[: CONFIG.vocab_size // 8], "little")
        return frozenset(token for token in range(CONFIG.vocab_size) if bits >> token & 1), ()


def drawn(grammar: int, choices: list[int]) -> list[int]:
    """Returns an output of a grammar: each token is chosen among those allowed."""
    asked, tokens = Asked(grammar), list[int]()
    for choice in choices:
        allowed, _ = asked.allowed()
        token = sorted(allowed)[choice % len(allowed)]
        asked.matcher.output_is(len(tokens), [token])
        tokens.append(token)
        if token == END:
            break
    return tokens


grammars = st.integers(0, len(SOURCES) - 1)
outputs = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


@given(grammars, outputs, st.data())
def test_masks_depend_on_the_output_and_not_on_how_it_was_told(
    grammar: int, choices: list[int], data: st.DataObject
) -> None:
    tokens = drawn(grammar, choices)
    together, by_one = Asked(grammar), Asked(grammar)
    together.matcher.output_is(0, tokens)
    for place, token in enumerate(tokens):
        by_one.matcher.output_is(place, [token])
        if data.draw(st.booleans()):
            by_one.allowed()
    assert together.allowed() == by_one.allowed()
    kept = data.draw(st.integers(0, len(tokens)))
    by_one.matcher.output_is(kept, [END])  # what was sampled before a step was lost
    by_one.matcher.output_is(kept, tokens[kept:])
    by_one.matcher.output_is(0, tokens[:1])
    by_one.matcher.output_is(1, tokens[1:])
    assert by_one.matcher.tokens == tokens
    assert by_one.allowed() == together.allowed()


@given(grammars, outputs)
def test_nothing_follows_what_is_no_token_until_it_is_taken_back(grammar: int, choices: list[int]) -> None:
    tokens, asked = drawn(grammar, choices), Asked(grammar)
    asked.matcher.output_is(0, tokens)
    before = asked.allowed()
    asked.matcher.output_is(len(tokens), [NO_TOKEN_ALLOWED])
    asked.matcher.output_is(len(tokens) + 1, [NO_TOKEN_ALLOWED])  # the step that was in flight meanwhile
    assert asked.matcher.fill(0, 0) is RowStatus.NOTHING and not asked.matcher.forced
    asked.matcher.output_is(len(tokens), [])
    assert asked.allowed() == before


@given(grammars, outputs)
def test_forced_tokens_are_allowed_one_after_the_other(grammar: int, choices: list[int]) -> None:
    tokens, asked = drawn(grammar, choices), Asked(grammar)
    asked.matcher.output_is(0, tokens)
    _, forced = asked.allowed()
    for count, token in enumerate(forced):
        allowed, rest = asked.allowed()
        assert allowed == {token}
        assert rest == forced[count:]
        asked.matcher.output_is(len(asked.matcher.tokens), [token])


@given(grammars, st.lists(st.integers(0, 1000), min_size=400, max_size=400))
def test_an_answer_drawn_to_its_end_matches_its_grammar(grammar: int, choices: list[int]) -> None:
    tokens = drawn(grammar, choices)
    if tokens[-1] == END:
        json.loads(TOKENIZER.decode_str(tokens[:-1]))
