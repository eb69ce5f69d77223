"""Grammar processes over the embedded model's vocabulary, and what tests ask of them."""

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from llguidance import LLTokenizer

from backend.grammar import Grammar, GrammarKind
from backend.model.hub import resolve_model
from backend.model.model_config import read_model_config
from backend.structured_output.compile import compile_grammar
from backend.structured_output.frames import RowStatus
from backend.structured_output.matching import SlotMatcher
from backend.structured_output.process_setup import ProcessSetup, StructuredOutputOptions
from backend.structured_output.processes import GrammarProcesses

MODEL = resolve_model("embedded")
CONFIG = read_model_config(MODEL)
TOKENIZER_JSON = (MODEL / "tokenizer.json").read_text(encoding="utf-8")
END = CONFIG.eos_token_ids[0]


def schema(value: Any, owner: str = "") -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value), owner)


def regex(source: str, owner: str = "") -> Grammar:
    return Grammar(GrammarKind.REGEX, source, owner)


PERSON = schema(
    {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "is_here": {"type": "boolean"}},
        "required": ["name", "is_here"],
        "additionalProperties": False,
    }
)


def branching(depth: int, path: str = "k") -> dict[str, Any]:
    """Return a schema of 2 ** depth leaves, which takes ever longer to compile."""
    if not depth:
        return {"type": "string"}
    below = {f"{path}{i}": branching(depth - 1, f"{path}{i}") for i in (0, 1)}
    each = [
        {"type": "object", "properties": {key: value}, "required": [key], "additionalProperties": False}
        for key, value in below.items()
    ]
    return {"anyOf": each}


def crossing(count: int) -> dict[str, Any]:
    """Returns a short schema with as many ways to match as 2 to the count."""
    return {
        "allOf": [
            {"anyOf": [{"properties": {f"k{n}": {"const": choice}}, "required": [f"k{n}"]} for choice in (1, 2)]}
            for n in range(count)
        ]
    }


def optional(count: int) -> dict[str, Any]:
    """Return a schema of optional fields: a second to compile for 3,000."""
    return {"type": "object", "properties": {f"f{n}": {"type": "string"} for n in range(count)}}


def drawn(tokenizer: LLTokenizer, kind: GrammarKind, source: str, random: Random, most: int = 400) -> list[int] | None:
    """Returns an answer's tokens, drawn at random among those allowed, those that bring it to an end more often; None
    where it has no end within `most`.
    """
    matcher, output = SlotMatcher(compile_grammar(tokenizer, kind, source), tokenizer.eos_tokens), list[int]()
    mask = ctypes.create_string_buffer(4 * -(-tokenizer.vocab_size // 32))
    while len(output) < most:
        assert matcher.fill(ctypes.addressof(mask), len(mask)) is RowStatus.MASKED
        bits = int.from_bytes(mask.raw, "little")
        allowed = matcher.forced[:1] or [token for token in range(tokenizer.vocab_size) if bits >> token & 1]
        closing = [token for token in allowed if tokenizer.decode_bytes([token]) in _CLOSING]
        ends = [token for token in allowed if token in tokenizer.eos_tokens] or closing
        output.append(random.choice(ends if ends and random.random() < 0.3 else allowed))
        matcher.output_is(len(output) - 1, output[-1:])
        if output[-1] in tokenizer.eos_tokens:
            return output
    return None


_CLOSING = frozenset((b'"', b"}", b"]", b'"}', b"}}", b'"]'))


@contextmanager
def running_processes(num_seqs: int = 8, **options: Any) -> Iterator[GrammarProcesses]:
    chosen = StructuredOutputOptions(**options)
    setup = ProcessSetup(str(MODEL / "tokenizer.json"), CONFIG.vocab_size, [END], num_seqs, CONFIG.max_position, chosen)
    processes = GrammarProcesses(setup)
    try:
        yield processes
    finally:
        processes.end_all()
