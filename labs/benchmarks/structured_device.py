"""The step time from which masks cost nothing and forced tokens gain: `python -m labs.benchmarks.structured_device
FOLDER`.

FOLDER as `json_schemas` takes it. The core, the engine and its threads run on the event loop as they do in a
gateway, and grammar processes are real; the device takes its time and no core (simulated), as a GPU does. 32 rows say
valid instances of 32 schemas, four after each other, as of a model that knows them. Tokens per second are held against
those of the same tokens without a grammar, in turns of one run, for devices whose steps take more and less time.

A forced token that is taken with others prolongs its step by `--token-us`. The vocabulary is the embedded model's, or
with `--tokenizer` another's; as large ones have it, its masks are larger. The tables tell as well what masks take of
a processor, which is less than it takes to wait for one on a busy machine: where a core is free, longer steps hide it.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

import uvloop
from tokenizers import Tokenizer

from admission.core import CoreConfig, make_core
from backend.config import EngineConfig
from backend.engine import Engine
from backend.grammar import GrammarKind
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch
from backend.scheduler.sequence import PromptRequest, Sequence
from backend.structured_output.compiler import GrammarCompiler
from backend.structured_output.masks import TokenMasks
from backend.structured_output.process_setup import ProcessSetup, StructuredOutputOptions
from backend.structured_output.processes import GrammarProcesses
from gateway.app import SWITCH_INTERVAL_SECONDS
from labs.benchmarks.constrained_device import ConstrainedDevice
from labs.benchmarks.json_schemas import SEED, try_schemas
from labs.benchmarks.report import Report, scenario_parser
from labs.benchmarks.structured import (
    ANSWERS,
    AT_ONCE,
    COST,
    FREE,
    GAIN,
    LONGEST,
    ONE_BY_ONE,
    ROWS,
    Script,
    Vocabulary,
    find_scripts,
    forced_share,
)

STEPS_MS = (2.0, 3.5, 7.4)
JUDGED_MS = 7.4  # of 32 rows of a model of 8 B parameters in 16 bits on an H100
TOKEN_US = 20.0  # of the same model's products
PROMPT = [1, 2, 3, 4]
ENGINE = EngineConfig(
    num_blocks=4096, max_model_len=1024, max_num_seqs=ROWS, max_num_batched_tokens=1024, prefill_chunk=256
)


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("folder", type=Path, help="of the files with schemas and instances")
    parser.add_argument("--schemas", type=int, default=200, help="to choose from (default: %(default)s)")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of another vocabulary")
    parser.add_argument("--end", default="<|endoftext|>", help="its token that ends a text (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, nargs="*", default=STEPS_MS, help="how long steps take")
    parser.add_argument("--token-us", type=float, default=TOKEN_US, help="longer for each token beyond one a row")
    options = parser.parse_args(arguments)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    report = Report("structured_device", options.quick)
    taken = try_schemas(options.folder, options.schemas, SEED).taken
    Random(SEED).shuffle(taken)
    vocabulary = _vocabulary(options)
    for how, kind in (("any whitespace", GrammarKind.JSON_SCHEMA), ("in a line", GrammarKind.JSON_LINE)):
        scripts = find_scripts(options.folder, taken, kind, vocabulary)
        measured = _measure(options, scripts, vocabulary)
        title = f"{ROWS} rows, {ROWS} schemas, {vocabulary.size:,} tokens in the vocabulary, valid instances: {how}"
        report.add_table(title, [one.row() for of_step in measured.values() for one in of_step.values()])
        _judge(report, how, measured)
        forced = forced_share(scripts, vocabulary)
        most = f"forced at once has at most {1 / (1 - forced):.2f} of unconstrained"
        report.notes.append(f"schemas force {forced:.0%} of these tokens, {how}: {most}")
    return report.finish(options.results)


def _vocabulary(options: argparse.Namespace) -> Vocabulary:
    if options.tokenizer is None:
        return Vocabulary.embedded()
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    end = tokenizer.token_to_id(options.end)
    if end is None:
        raise SystemExit(f"--end {options.end}: no token of {options.tokenizer}")
    return Vocabulary(options.tokenizer, tokenizer.get_vocab_size(), [end])


def _judge(report: Report, how: str, measured: dict[float, dict[str, "_Measured"]]) -> None:
    for kind, bound in ((ONE_BY_ONE, COST), (AT_ONCE, GAIN)):
        shortest = "no step is long enough"
        for milliseconds in sorted(measured, reverse=True):
            if measured[milliseconds][kind].of_free < bound:
                break
            shortest = f"steps of {milliseconds} ms and longer"
        report.notes.append(f">= {bound} of unconstrained, {kind}, {how}: {shortest}")
        if JUDGED_MS in measured:
            what = f"tokens/s of those without masks, {kind}, {how}, steps of {JUDGED_MS} ms"
            report.at_least(what, measured[JUDGED_MS][kind].of_free, bound)


def _measure(
    options: argparse.Namespace, scripts: list[Script], vocabulary: Vocabulary
) -> dict[float, dict[str, "_Measured"]]:
    """Returns what was measured by the length of steps, and by what was done with forced tokens."""
    setup = ProcessSetup(
        str(vocabulary.path),
        vocabulary.size,
        vocabulary.end_tokens,
        ENGINE.max_num_seqs,
        ENGINE.max_model_len,
        StructuredOutputOptions(),
    )
    processes = GrammarProcesses(setup)
    compiler = GrammarCompiler(processes, sys.maxsize)
    for script in scripts:
        compiler.compile_now(script.grammar)
    found: dict[float, dict[str, _Measured]] = {}
    for milliseconds in options.step_ms:
        device = _DeviceTime(milliseconds / 1e3, options.token_us / 1e6)
        runs: dict[str, list[_Run]] = {ONE_BY_ONE: [], FREE: [], AT_ONCE: []}
        warms_up = not found
        for number in range(warms_up + (1 if options.quick else options.runs)):
            for kind, measured in runs.items():
                masks = TokenMasks(processes, kind == AT_ONCE)
                executor = ConstrainedDevice(masks, ENGINE, [script.token_ids for script in scripts], device)
                run = uvloop.run(_run(executor, scripts, kind, vocabulary))
                if number >= warms_up:
                    measured.append(run)
        found[milliseconds] = {
            kind: _Measured(milliseconds, kind, measured, runs[FREE]) for kind, measured in runs.items()
        }
    processes.end_all()
    return found


@dataclass(frozen=True, slots=True)
class _DeviceTime:
    """The seconds that a step takes: as long for few rows as for many, and longer for tokens beyond one of each."""

    step: float
    token: float

    def __call__(self, batch: Batch) -> float:
        return self.step + self.token * (batch.num_tokens - len(batch.slots))


@dataclass(frozen=True, slots=True)
class _Run:
    rate: float  # tokens per second
    jumped: float  # share of the tokens that were taken with those before them
    per_step: float  # tokens
    idle: float  # share of the time in which the device had nothing to do
    mask_ms: float  # that the masks of a step took of a processor


@dataclass(frozen=True, slots=True)
class _Measured:
    milliseconds: float  # of a step
    kind: str
    runs: list[_Run]
    free: list[_Run]  # side by side with them

    @property
    def of_free(self) -> float:
        return median(a.rate / b.rate for a, b in zip(self.runs, self.free, strict=True))

    def row(self) -> dict[str, object]:
        return {
            "step ms": self.milliseconds,
            "tokens": self.kind,
            "tokens/s": median(run.rate for run in self.runs),
            "of unconstrained": self.of_free,
            "taken with those before": median(run.jumped for run in self.runs),
            "tokens a step": median(run.per_step for run in self.runs),
            "device idle": median(run.idle for run in self.runs),
            "CPU ms of masks a step": median(run.mask_ms for run in self.runs),
        }


async def _run(executor: ConstrainedDevice, scripts: list[Script], kind: str, vocabulary: Vocabulary) -> _Run:
    core = make_core(CoreConfig(), ENGINE)
    engine = Engine(core, executor)
    engine.start()
    taken = executor.masks._shared.nanoseconds
    masked = taken.sum()
    began = time.perf_counter()
    sequences = [_sequence(number, script, kind, vocabulary) for number, script in enumerate(ANSWERS * scripts)]
    await asyncio.gather(*(_drain(engine, sequence) for sequence in sequences))
    seconds = time.perf_counter() - began
    assert [one.output for one in sequences] == [script.token_ids for script in ANSWERS * scripts]
    total, counters = sum(len(one.output) for one in sequences), core.scheduler.counters
    steps = core.scheduler._next_step
    await engine.shut_down()
    jumped, idle = counters.jump_forward_tokens / total, 1 - executor.busy / seconds
    return _Run(total / seconds, jumped, total / steps, idle, float(taken.sum() - masked) / 1e6 / steps)


def _sequence(number: int, script: Script, kind: str, vocabulary: Vocabulary) -> Sequence:
    sampling = SamplingParams(max_tokens=LONGEST, grammar=None if kind == FREE else script.grammar)
    ends = frozenset(vocabulary.end_tokens)
    return Sequence(PromptRequest(str(number), "", [*PROMPT, number], sampling, LONGEST, number, ends))


async def _drain(engine: Engine, sequence: Sequence) -> None:
    stream = engine.submit(sequence)
    while stream.finish_reason is None:
        await stream.take()


if __name__ == "__main__":
    raise SystemExit(main())
