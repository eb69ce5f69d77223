"""The cost and the gain of answers that match a schema: `python -m labs.benchmarks.structured FOLDER [--schemas 200]`.

FOLDER as `json_schemas` takes it. In one run, offline, on the embedded model (real), 32 rows of 32 schemas
are held against rows without a grammar, in tokens per second:

cost    each row draws what the model says, and the rows it is held against draw as many tokens; a token that a grammar
        forces is sampled like any other. Once more on a model of 32 M random parameters, whose steps are longer
gain    each answer is a valid instance of its schema, as of a model that knows it: tokens are drawn as ever, and then
        those of the instance are taken, which its mask has to allow; with tokens that are forced sampled one by one,
        and taken at once. Four answers follow each other in each row, and are compared with the same
        tokens without a grammar. JSON is written as a model pleases, or as `disable_any_whitespace` has it

Besides the tokens per second, which a busy machine changes, the tokens per CPU second of the engine's thread are told.
"""

import ctypes
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from torch import Tensor

from backend.config import EngineOptions
from backend.grammar import Grammar, GrammarKind
from backend.llm import LLM
from backend.loader import LoadedModel, constrain
from backend.model.hub import resolve_model
from backend.model.known_shapes import LLAMA_32M
from backend.model.model_config import read_model_config
from backend.model.weights import random_weights
from backend.placement import place_model
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import NewSequence
from backend.sizing import ModelDemand
from backend.structured_output.compile import compile_grammar, make_tokenizer
from backend.structured_output.frames import RowStatus
from backend.structured_output.matching import SlotMatcher
from backend.structured_output.process_setup import StructuredOutputOptions
from backend.text.tokenizer import Tokenizer
from backend.worker.model_runner import StepSampler
from backend.worker.sampler import TokenChoice
from backend.worker.staging import StagedStep
from gateway.settings.machine import spare_cores
from labs.benchmarks.json_schemas import SEED, try_schemas
from labs.benchmarks.report import Report, scenario_parser

ROWS, TOKENS, RUNS = 32, 96, 9
ANSWERS = 4  # of each schema, for the gain
SHORTEST, LONGEST = 32, 512  # instances in tokens
COST, GAIN = 0.97, 1.3
FREE, ONE_BY_ONE, AT_ONCE = "unconstrained", "sampled one by one", "forced at once"


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=RUNS)
    parser.add_argument("folder", type=Path, help="of the files with schemas and instances")
    parser.add_argument("--schemas", type=int, default=200, help="to choose from (default: %(default)s)")
    options = parser.parse_args(arguments)
    report = Report("structured", options.quick)
    taken = try_schemas(options.folder, options.schemas, SEED).taken
    Random(SEED).shuffle(taken)
    torch.set_num_threads(spare_cores())  # as the server has them: another core is left to who matches
    llm = LLM("embedded", EngineOptions(max_num_seqs=ROWS))
    runs = 1 if options.quick else options.runs
    for name, model in (("the embedded model", llm), ("32 M random parameters", _larger_llm())):
        cost = _cost(model, [grammar for _, _, grammar in taken[:ROWS]], runs if model is llm else min(runs, 3))
        report.at_least(f"tokens/s with masks, of those without: {name}", cost[ONE_BY_ONE].of_free, COST)
        report.add_table(f"{ROWS} rows, {ROWS} schemas, {TOKENS} tokens each, as the model says: {name}", _table(cost))
    for how, kind in (("any whitespace", GrammarKind.JSON_SCHEMA), ("in a line", GrammarKind.JSON_LINE)):
        gain = _gain(llm, find_scripts(options.folder, taken, kind, Vocabulary.embedded()), runs)
        report.at_least(
            f"tokens/s with forced tokens at once, of those without masks: {how}", gain[AT_ONCE].of_free, GAIN
        )
        report.add_table(f"{ROWS} rows, {ROWS} schemas, valid instances: {how}", _table(gain))
    return report.finish(options.results)


def _larger_llm() -> LLM:
    """Returns a model of random weights that says the embedded model's tokens."""
    directory = resolve_model("embedded")
    own = read_model_config(directory)
    config = replace(LLAMA_32M, vocab_size=own.vocab_size, eos_token_ids=own.eos_token_ids)
    weights, options = random_weights(config, torch.float32), EngineOptions(max_num_seqs=ROWS, max_model_len=2048)
    parameters = weights.num_parameters
    runner = place_model(ModelDemand(options, config, torch.float32), weights, torch.device("cpu"))
    constrain(runner, directory, config, StructuredOutputOptions())
    tokenizer = Tokenizer.from_dir(directory, config.vocab_size)
    model = LoadedModel(directory, config, runner.config, tokenizer, runner, torch.float32, parameters, {})
    return LLM.of(model, runner)


@dataclass(slots=True)
class Measured:
    """One kind of rows, over all runs."""

    rate: float  # tokens per second
    of_free: float  # of what rows without a grammar had in the same run
    of_free_cpu: float  # the same, per second that the thread had of a processor
    jumped: float  # share of the tokens that were taken with those before them
    per_step: float  # tokens


class Runs:
    """Runs of several kinds, in turns."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._rates: dict[str, list[float]] = {}
        self._cpu_rates: dict[str, list[float]] = {}
        self._jumped: dict[str, float] = {}
        self._per_step: dict[str, float] = {}

    def run(self, kind: str, sampling: Sequence[SamplingParams], is_counted: bool) -> list[list[int]]:
        """Returns the tokens of each row."""
        masks, counters = self._llm.model.runner.masks, self._llm.scheduler.counters
        assert masks is not None
        masks.jump_forward = kind == AT_ONCE
        jumped, steps = counters.jump_forward_tokens, self._llm.scheduler._next_step
        began, cpu = time.perf_counter(), time.thread_time()
        answers = self._llm.generate(["a"] * len(sampling), sampling, progress=False)
        seconds, cpu = time.perf_counter() - began, time.thread_time() - cpu
        made = [answer.token_ids for answer in answers]
        if is_counted:
            total = sum(map(len, made))
            self._rates.setdefault(kind, []).append(total / seconds)
            self._cpu_rates.setdefault(kind, []).append(total / cpu)
            self._jumped[kind] = (counters.jump_forward_tokens - jumped) / total
            self._per_step[kind] = total / (self._llm.scheduler._next_step - steps)
        return made

    def measured(self) -> dict[str, Measured]:
        def of_free(kind: str, rates: dict[str, list[float]]) -> float:
            return median(a / b for a, b in zip(rates[kind], rates[FREE], strict=True))

        return {
            kind: Measured(
                rate=median(rates),
                of_free=of_free(kind, self._rates),
                of_free_cpu=of_free(kind, self._cpu_rates),
                jumped=self._jumped[kind],
                per_step=self._per_step[kind],
            )
            for kind, rates in self._rates.items()
        }


def _table(measured: dict[str, Measured]) -> list[dict[str, object]]:
    return [
        {
            "tokens": kind,
            "tokens/s": one.rate,
            "of unconstrained": one.of_free,
            "by CPU": one.of_free_cpu,
            "taken with those before": one.jumped,
            "tokens a step": one.per_step,
        }
        for kind, one in measured.items()
    ]


def _cost(llm: LLM, grammars: list[Grammar], runs: int) -> dict[str, Measured]:
    several = Runs(llm)
    for n in range(runs + 1):  # the first run compiles
        constrained = [SamplingParams(seed=n, max_tokens=TOKENS, grammar=grammar) for grammar in grammars]
        made = several.run(ONE_BY_ONE, constrained, n > 0)
        free = [SamplingParams(seed=n, max_tokens=max(1, len(tokens)), ignore_eos=True) for tokens in made]
        several.run(FREE, free, n > 0)
    return several.measured()


@dataclass(frozen=True, slots=True)
class Script:
    """The script of a row: a valid instance of its grammar."""

    grammar: Grammar
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a model can say."""

    path: Path  # of its tokenizer.json
    size: int
    end_tokens: list[int]

    @classmethod
    def embedded(cls) -> "Vocabulary":
        directory = resolve_model("embedded")
        config = read_model_config(directory)
        return cls(directory / "tokenizer.json", config.vocab_size, list(config.eos_token_ids))


def find_scripts(
    folder: Path, taken: list[tuple[str, Any, Grammar]], kind: GrammarKind, vocabulary: Vocabulary
) -> list[Script]:
    """An instance for each of `ROWS` schemas, of the schemas with one neither short nor long."""
    tokenizer = make_tokenizer(vocabulary.path.read_text(), vocabulary.size, vocabulary.end_tokens)
    scripts: list[Script] = []
    for name, _, asked in taken:
        grammar = Grammar(kind, asked.source)
        tests = json.loads((folder / name).read_text())["tests"]
        instance = next((test["data"] for test in tests if test["valid"]), None)
        matcher = SlotMatcher(compile_grammar(tokenizer, grammar.kind, grammar.source))
        said = _tokens(matcher, tokenizer, json.dumps(instance, ensure_ascii=False).encode(), vocabulary.size)
        if SHORTEST <= len(said) <= LONGEST and len(scripts) < ROWS:
            scripts.append(Script(grammar, said))
    return scripts


def _tokens(matcher: SlotMatcher, tokenizer: Any, text: bytes, vocab_size: int) -> list[int]:
    """The tokens that spell a text: the grammar's forced ones, otherwise the tokenizer's; none if the grammar does not
    allow them.
    """
    said: list[int] = []
    mask = ctypes.create_string_buffer(4 * -(-vocab_size // 32))
    end = tokenizer.eos_token
    while end not in said and len(said) <= LONGEST:
        if matcher.fill(ctypes.addressof(mask), len(mask)) is not RowStatus.MASKED:
            return []
        left = text[len(tokenizer.decode_bytes(said)) :]
        token = matcher.forced[0] if matcher.forced else tokenizer.tokenize_bytes(left)[0] if left else end
        if not matcher.forced and not mask.raw[token // 8] >> token % 8 & 1:
            return []
        matcher.output_is(len(said), [token])
        said.append(token)
    return said if tokenizer.decode_bytes(said[:-1]) == text else []


def forced_share(scripts: list[Script], vocabulary: Vocabulary) -> float:
    """Returns the share of the tokens of scripts whose bytes are all forced when it is their turn: more cannot be had
    without asking the model, however forced bytes are made tokens.
    """
    tokenizer = make_tokenizer(vocabulary.path.read_text(), vocabulary.size, vocabulary.end_tokens)
    forced = 0
    for script in scripts:
        matcher = compile_grammar(tokenizer, script.grammar.kind, script.grammar.source)
        for token in script.token_ids:
            if token == tokenizer.eos_token:
                forced += bool(matcher.compute_ff_tokens())
            else:
                forced += matcher.compute_ff_bytes().startswith(tokenizer.decode_bytes([token]))
            matcher.consume_token(token)
    return forced / sum(len(script.token_ids) for script in scripts)


class ScriptedSampler:
    """Draws as another sampler does, and then takes the tokens of scripts, by the seeds of sequences."""

    def __init__(self, sampler: StepSampler, scripts: list[Script]) -> None:
        self._sampler = sampler
        self._scripts = scripts
        self._slots: dict[int, tuple[list[int], int]] = {}  # what a sequence says, and the length of its prompt

    def admit(self, admitted: NewSequence) -> None:
        self._sampler.admit(admitted)
        self._slots[admitted.slot] = (
            self._scripts[admitted.seed % len(self._scripts)].token_ids,
            admitted.num_prompt_tokens,
        )

    def stage(self, staged: StagedStep) -> TokenChoice:
        numbers, count = staged.piece.numbers, staged.num_sampled
        tokens = []
        for slot, position in zip(numbers.sampled_slots[:count], numbers.sampled_positions[:count], strict=True):
            said, num_prompt = self._slots[slot]
            tokens.append(said[min(position - num_prompt, len(said) - 1)])
        choice = self._sampler.stage(staged)
        return TokenChoice(partial(self._choose, choice, torch.tensor(tokens)), choice.restricts)

    @staticmethod
    def _choose(choice: TokenChoice, tokens: Tensor, logits: Tensor) -> Tensor:
        is_allowed = logits.gather(1, tokens.unsqueeze(1)).isfinite()
        assert bool(is_allowed.all()), "a mask forbids what an instance says next"
        choice.choose(logits)
        return tokens


def _gain(llm: LLM, scripts: list[Script], runs: int) -> dict[str, Measured]:
    several, runner = Runs(llm), llm.model.runner
    sampler = runner._sampler
    runner._sampler = ScriptedSampler(sampler, scripts)
    for n in range(runs + 1):
        for kind in (ONE_BY_ONE, FREE, AT_ONCE):
            sampling = [
                SamplingParams(seed=row, max_tokens=LONGEST, grammar=None if kind == FREE else script.grammar)
                for row, script in enumerate(ANSWERS * scripts)
            ]
            made = several.run(kind, sampling, n > 0)
            assert made == [script.token_ids for script in ANSWERS * scripts]
    runner._sampler = sampler
    return several.measured()


if __name__ == "__main__":
    raise SystemExit(main())
