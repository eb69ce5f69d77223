"""The share of others' JSON schemas that is accepted, and the validity of their answers: `python -m
labs.benchmarks.json_schemas FOLDER`.

FOLDER holds the files of JSONSchemaBench's mask tests (github.com/guidance-ai/jsonschemabench, maskbench/data), each
with a schema and instances that are valid or not. A random part of them takes the way of a client's request: refused
with a reason, or compiled. Then an instance must be accepted by the masks, token by token, exactly if it is valid.
Last, the embedded model writes instances at temperature 1, 32 at a time, which jsonschema judges: every instance that
reaches its end must be valid. An instance that takes more work to follow than a row may ends with a typed error, and
none should.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from time import process_time
from typing import Any

from jsonschema.validators import Draft202012Validator, validator_for
from llguidance import LLMatcher
from tokenizers import Tokenizer

from backend.config import EngineOptions
from backend.grammar import Grammar
from backend.llm import LLM
from backend.model.hub import resolve_model
from backend.sampling_params import SamplingParams
from backend.structured_output.compile import CompileError, compile_grammar, make_tokenizer
from gateway.errors import ApiError
from gateway.openai.structured import read_grammar
from labs.benchmarks.report import Report, quantile, scenario_parser

SEED = 7
ROWS = 32
MAX_TOKENS = 700
BIAS = {'"': 4.0, "}": 4.0, "]": 4.0}  # of what ends a part, or a small model seldom comes to an end
COMPILE_SECONDS = 0.25  # of a processor, as a server allows


@dataclass(slots=True)
class Found:
    """The results of the schemas."""

    asked: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    taken: list[tuple[str, Any, Grammar]] = field(default_factory=list)  # file, schema, and grammar
    seconds: list[float] = field(default_factory=list)  # that compiling took
    valid: int = 0  # instances
    valid_blocked: list[str] = field(default_factory=list)  # the files of them
    invalid: int = 0
    invalid_accepted: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=1)
    parser.add_argument("folder", type=Path, help="of the files with schemas and instances")
    parser.add_argument("--schemas", type=int, default=1500, help="to be tried (default: %(default)s)")
    parser.add_argument("--answers", type=int, default=1024, help="to be generated (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the choice and of the answers")
    options = parser.parse_args(arguments)
    if options.quick:
        options.schemas, options.answers = 40, ROWS
    report = Report("json_schemas", options.quick)
    found = try_schemas(options.folder, options.schemas, options.seed)
    times = sorted(found.seconds)
    report.add_table("refused", [{"reason": why, "schemas": count} for why, count in found.refused.most_common()])
    rows = [
        {"what": "schemas tried", "count": found.asked},
        {"what": "taken", "count": len(found.taken)},
        {"what": "valid instances", "count": found.valid},
        {"what": "of them blocked", "count": len(found.valid_blocked)},
        {"what": "invalid instances", "count": found.invalid},
        {"what": "of them accepted", "count": len(found.invalid_accepted)},
        {"what": "compiling, median ms", "count": 1e3 * quantile(times, 0.5)},
        {"what": "compiling, p99 ms", "count": 1e3 * quantile(times, 0.99)},
    ]
    ended, cut, wrong = generate(found, options.answers, options.seed)
    rows += [
        {"what": f"answers of at most {MAX_TOKENS} tokens", "count": options.answers},
        {"what": "that reached their end", "count": ended},
        {"what": "of them invalid", "count": len(wrong)},
        {"what": "that ended with a typed error: too much work to follow", "count": cut},
    ]
    report.add_table("schemas", rows)
    report.at_least("share of valid instances accepted", 1 - len(found.valid_blocked) / max(1, found.valid), 0.99)
    report.at_least("share of invalid ones blocked", 1 - len(found.invalid_accepted) / max(1, found.invalid), 0.999)
    report.at_most("invalid answers", len(wrong), 0)
    report.at_most("answers that ended with a typed error", cut, 0)
    for name in found.invalid_accepted + wrong:
        print("not kept:", name)
    return report.finish(options.results)


def try_schemas(folder: Path, count: int, seed: int) -> Found:
    path = resolve_model("embedded") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    end = tokenizer.token_to_id("<|end|>")
    vocabulary = make_tokenizer(path.read_text(), tokenizer.get_vocab_size(), [end])
    files = sorted(folder.glob("*.json"))
    random.Random(seed).shuffle(files)
    found = Found()
    for file in files[:count]:
        case = json.loads(file.read_text())
        found.asked += 1
        structured = {"type": "json_schema", "json_schema": {"name": "case", "schema": case["schema"], "strict": True}}
        try:
            asked = read_grammar(structured, None)  # type: ignore[arg-type]
            assert asked is not None
            began = process_time()
            matcher = compile_grammar(vocabulary, asked[0].kind, asked[0].source)
            took = process_time() - began
        except ApiError as error:
            found.refused[_reason(error.message)] += 1
            continue
        except CompileError as error:
            found.refused[" ".join(str(error).split()[:6])] += 1
            continue
        if took > COMPILE_SECONDS:
            found.refused["takes too long to compile"] += 1
            continue
        found.seconds.append(took)
        found.taken.append((file.name, json.loads(file.read_text())["schema"], asked[0]))
        _judge(found, file.name, case["tests"], matcher, tokenizer)
    return found


def _judge(found: Found, name: str, tests: list[dict[str, Any]], matcher: LLMatcher, tokenizer: Tokenizer) -> None:
    for test in tests:
        text = json.dumps(test["data"], ensure_ascii=False)
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        one = matcher.deep_copy()
        accepted = one.try_consume_tokens(token_ids) == len(token_ids) and one.is_accepting()
        if test["valid"]:
            found.valid += 1
            found.valid_blocked += [] if accepted else [name]
        else:
            found.invalid += 1
            found.invalid_accepted += [name] if accepted else []


def _reason(message: str) -> str:
    """The kind of a refusal, without its field and place."""
    words = message.split()
    return " ".join(words[2:4]) if "has" in words[:2] else " ".join(words[1:6])


def generate(found: Found, count: int, seed: int) -> tuple[int, int, list[str]]:
    """The numbers of complete answers and of answers ended by the grammar, and the files of invalid ones."""
    llm = LLM("embedded", EngineOptions(max_num_seqs=ROWS))
    ended, cut, wrong = 0, 0, list[str]()
    encode = llm.model.tokenizer.encode_text
    bias = tuple(sorted([(encode(text, False)[0], value) for text, value in BIAS.items()]))
    cases = list(islice(_cases(found), count))
    for batch in [cases[begin : begin + ROWS] for begin in range(0, count, ROWS)]:
        sampling = [
            SamplingParams(temperature=1, max_tokens=MAX_TOKENS, seed=seed + index, grammar=grammar, logit_bias=bias)
            for index, (_, _, grammar) in enumerate(batch)
        ]
        prompts = [[{"role": "user", "content": "Say something."}]] * len(batch)
        for (name, schema, _), answer in zip(batch, llm.generate(prompts, sampling, progress=False), strict=True):
            if answer.finish_reason == "stop":
                ended += 1
                if not _is_valid(schema, answer.text):
                    wrong.append(name)
            elif answer.finish_reason == "grammar":
                cut += 1
    return ended, cut, wrong


def _cases(found: Found) -> Iterator[tuple[str, Any, Grammar]]:
    """The accepted schemas, in a cycle."""
    return cycle(found.taken)


def _is_valid(schema: Any, text: str) -> bool:
    try:
        document = json.loads(text)
    except ValueError:
        return False
    kind = validator_for(schema, default=Draft202012Validator)
    return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(document))


if __name__ == "__main__":
    raise SystemExit(main())
