"""Grammar processes over the embedded model's vocabulary, and what tests ask of them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from backend.grammar import Grammar, GrammarKind
from backend.model.hub import resolve_model
from backend.model.model_config import read_model_config
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
    """Returns a schema of so many leaves as 2 to the depth, which takes ever longer to compile."""
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
    """Returns a schema of so many fields, any of which may be left out: a second to compile for 3,000."""
    return {"type": "object", "properties": {f"f{n}": {"type": "string"} for n in range(count)}}


@contextmanager
def running_processes(num_seqs: int = 8, **options: Any) -> Iterator[GrammarProcesses]:
    chosen = StructuredOutputOptions(**options)
    setup = ProcessSetup(str(MODEL / "tokenizer.json"), CONFIG.vocab_size, [END], num_seqs, CONFIG.max_position, chosen)
    processes = GrammarProcesses(setup)
    try:
        yield processes
    finally:
        processes.stop()
