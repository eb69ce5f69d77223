"""Answers that have to match a grammar, by the engine's own threads: two steps in flight, and forced tokens at once.

Each of 64 seats has a grammar of its own, and is taken over by another answer with another grammar while others go on;
beside them are rows without one. A judge that shares no code with the matchers checks the answers.
"""

import asyncio
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from admission.core import CoreConfig, make_core
from backend.config import EngineOptions
from backend.engine import Engine
from backend.grammar import Grammar, GrammarKind
from backend.loader import LoadedModel, load_model
from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import FinishReason, PromptRequest, Sequence
from backend.structured_output.compiler import GrammarCompiler
from labs.benchmarks.gpu_check.finding import Finding

FREE = 8  # rows without a grammar
ANSWERS_PER_SEAT = 2  # answers for each seat
LONGEST = 200  # tokens; every grammar ends before
CACHE_BYTES = 1 << 30
DEPARTMENTS = ["receiving and inspection", "assembly of large parts", "returns"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A grammar, and a predicate for texts that match it."""

    grammar: Grammar
    matches: Callable[[str], bool]


def check(device: torch.device) -> Iterator[Finding]:
    if importlib.util.find_spec("llguidance") is None:
        yield Finding("answers by grammars", "skipped: needs llguidance")
        return
    seats = 64 if device.type == "cuda" else 8
    options = EngineOptions(max_num_seqs=seats + FREE, max_num_batched_tokens=512, max_model_len=512)
    model = load_model("embedded", options, device=device.type, dtype="float32")
    model.runner.warm_up()
    asked = [_asked(number) for number in range(seats)] * ANSWERS_PER_SEAT
    texts, reasons, forced = asyncio.run(_generate(model, asked))
    ended = sum(reason is FinishReason.STOP for reason in reasons)
    valid = sum(one.matches(text) for one, text in zip(asked, texts, strict=True))
    what = f"{len(asked)} answers in {seats} seats"
    yield Finding(f"{what}: ended by themselves", ended / len(asked), bound=1, sense=">=", exact=True)
    yield Finding(f"{what}: valid", valid / len(asked), bound=1, sense=">=", exact=True)
    yield Finding(f"{what}: tokens forced, not sampled", forced, bound=1, sense=">=", exact=True)
    if wrong := [(one, text) for one, text in zip(asked, texts, strict=True) if not one.matches(text)]:
        yield Finding("the first that is not valid", f"{wrong[0][1]!r:.200} for {wrong[0][0].grammar.source:.200}")


async def _generate(model: LoadedModel, asked: list[Asked]) -> tuple[list[str], list[FinishReason | None], int]:
    """Returns each answer, why it ended, and how many tokens of all were forced."""
    masks = model.runner.masks
    assert masks is not None
    compiler = GrammarCompiler(masks.processes, CACHE_BYTES)
    core = make_core(CoreConfig(), model.engine_config)
    engine = Engine(core, model.runner, model.engine_config.steps_in_flight)
    try:
        compiled = [await compiler.acquire(one.grammar) for one in asked]
        engine.start()
        free = [SamplingParams(max_tokens=LONGEST, ignore_eos=True)] * FREE
        constrained = [SamplingParams(max_tokens=LONGEST, grammar=one.grammar) for one in asked]
        sequences = [_sequence(number, sampling, model) for number, sampling in enumerate([*free, *constrained])]
        await asyncio.gather(*(_drain(engine, sequence) for sequence in sequences))
        await engine.shut_down()
        compiler.release_all(compiled)
    finally:
        compiler.close()
    answers = sequences[FREE:]
    texts = [model.tokenizer.decode([*_without_end(one, model)]) for one in answers]
    return texts, [one.finish_reason for one in answers], core.scheduler.counters.jump_forward_tokens


def _sequence(number: int, sampling: SamplingParams, model: LoadedModel) -> Sequence:
    prompt = model.tokenizer.encode_text(f"Row {number}:", add_special_tokens=False)
    ends = frozenset[int]() if sampling.ignore_eos else model.end_tokens
    return Sequence(PromptRequest(str(number), "", prompt, sampling, LONGEST, number, ends))


async def _drain(engine: Engine, sequence: Sequence) -> None:
    stream = engine.submit(sequence)
    while stream.finish_reason is None:
        await stream.take()


def _without_end(sequence: Sequence, model: LoadedModel) -> Iterator[int]:
    return (token for token in sequence.output if token not in model.end_tokens)


def _asked(number: int) -> Asked:
    """Return a grammar of one of four kinds in turn, no two alike."""
    size = 2 + number // 4
    match number % 4:
        case 0:
            pattern = f"[a-z]{{{size},{size + 4}}}-[0-9]{{{size}}}(, either this or that)?"
            return Asked(Grammar(GrammarKind.REGEX, pattern), partial(_fully, pattern))
        case 1:
            schema = _schema(size)
            return Asked(Grammar(GrammarKind.JSON_LINE, json.dumps(schema)), partial(_is_instance, size))
        case 2:
            choices = [f"the {place} of {size} places, counted from the left" for place in ("first", "second", "last")]
            return Asked(Grammar(GrammarKind.CHOICE, json.dumps(choices)), choices.__contains__)
    lark = f'start: "row {size}: " NUMBER (" and " NUMBER){{{size}}}\nNUMBER: /[1-9][0-9]{{0,3}}/'
    return Asked(
        Grammar(GrammarKind.LARK, lark), partial(_fully, rf"row {size}: [1-9]\d{{0,3}}( and [1-9]\d{{0,3}}){{{size}}}")
    )


def _fully(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


def _schema(size: int) -> dict[str, object]:
    properties = {
        "identification_number": {"type": "integer", "minimum": 0, "maximum": 10**size},
        "department_of_origin": {"enum": DEPARTMENTS},
        "is_complete": {"type": "boolean"},
        "remarks": {"type": "string", "maxLength": size},
    }
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _is_instance(size: int, text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    if not isinstance(found, dict) or [*found] != [*_schema(size)["properties"]]:  # type: ignore[misc]
        return False
    number, department, complete, remarks = found.values()
    is_number = type(number) is int and 0 <= number <= 10**size
    is_remark = isinstance(remarks, str) and len(remarks) <= size
    return is_number and department in DEPARTMENTS and isinstance(complete, bool) and is_remark
