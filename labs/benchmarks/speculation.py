"""Tokens drafted by lookup beside one token a step, on real text: `python -m labs.benchmarks.speculation`.

SmolLM2-135M (as `scripts/download smollm2` has it) on a CPU, one thread, the core with its step times as calibrated.
Answers that copy their prompts, a page of this repository, and answers of chats, greedy and drawn; both ways take turns
run by run, each from an empty cache, with rates not learned yet. The ratio is of the CPU time of whole runs, tokens
being the same.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Sequence as Listed
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import torch

from admission.core import CoreConfig, make_core
from backend.calibration_steps import CalibrationTimes
from backend.config import EngineOptions, Speculate
from backend.loader import LoadedModel, load_model
from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import PromptRequest, Sequence
from backend.step_loop import StepLoop
from backend.worker.executor import InlineDevice
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.benchmarks.small_talk import small_talk

ROOT = Path(__file__).resolve().parents[2]
COPY_WORDS = 120
LEAST_COPYING, LEAST = 1.5, 0.98
WAYS: tuple[Speculate, ...] = ("off", "lookup")


class Workload(NamedTuple):
    """Requests that arrive at once, `at_once` at a time."""

    name: str
    prompts: list[str]
    at_once: int
    tokens: int  # the most of an answer
    least: float  # of the throughput without drafts


class Run(NamedTuple):
    """One run of a workload."""

    seconds: float  # of CPU
    texts: list[list[int]]
    steps: int
    drafted: int
    accepted: int


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=4)
    options = parser.parse_args(arguments)
    runs, share = (1, 0.1) if options.quick else (options.runs, 1.0)
    torch.set_num_threads(1)
    report = Report("speculation", options.quick)
    engine = EngineOptions(max_num_seqs=32, max_model_len=1024, kv_memory_bytes=1 << 30, speculate="lookup")
    model = load_model("smollm2", engine, device="cpu")
    model.runner.warm_up()
    measured = model.runner.calibrate(2.0)
    rows, differing = list[dict[str, object]](), 0
    for workload in workloads(share):
        found, ratios = defaultdict[str, list[Run]](list), list[float]()
        for turn in range(runs):
            for how in WAYS if turn % 2 else WAYS[::-1]:
                found[how].append(run(model, measured, how, workload, turn))
            off, lookup = (found[how][-1] for how in WAYS)
            ratios.append(off.seconds / lookup.seconds)
            differing += sum(one != other for one, other in zip(off.texts, lookup.texts, strict=True))
        tokens = sum(map(len, found["off"][0].texts))
        last = found["lookup"][-1]
        rows.append(
            {
                "answers": workload.name,
                "tokens": tokens,
                "tokens/s without": tokens / median([one.seconds for one in found["off"]]),
                "with drafts, times as many": Spread.of(ratios),
                "steps": last.steps / found["off"][-1].steps,
                "drafted": last.drafted / tokens,
                "accepted": last.accepted / tokens,
            }
        )
        report.at_least(f"{workload.name}: tokens a CPU second, over those without", median(ratios), workload.least)
    report.add_table("CPU, one thread, median (extremes)", rows)
    report.at_most("answers whose text differs", differing, 0)
    report.notes = ["steps, drafted, accepted: over the steps, and the tokens, without drafts"]
    return report.finish(options.results)


def workloads(share: float) -> list[Workload]:
    words = (ROOT / "docs" / "fairness.md").read_text().split()
    pages = [" ".join(words[at : at + COPY_WORDS]) for at in range(2 * COPY_WORDS, 12 * COPY_WORDS, COPY_WORDS)]
    copies = [f"Repeat this text word for word, and nothing else:\n\n{page}" for page in pages]
    chats = [small_talk(Random(n))[0] for n in range(32)]
    some = max(1, round(4 * share))
    return [
        Workload("copies, one at a time", copies[:some], 1, round(200 * share), LEAST_COPYING),
        Workload("chats, one at a time", chats[: 2 * some], 1, round(128 * share), LEAST),
        Workload("chats, 8 at a time", chats[:8], 8, round(96 * share), LEAST),
        Workload("chats, 32 at a time", chats[:32], 32, round(96 * share), LEAST),
        Workload("copies, 8 at a time", copies[:8], 8, round(96 * share), LEAST),
    ]


def run(model: LoadedModel, measured: CalibrationTimes, how: Speculate, workload: Workload, turn: int) -> Run:
    """Answer all prompts; those of odd numbers are drawn."""
    core = make_core(CoreConfig(), replace(model.engine_config, speculate=how))
    core.calibrated(measured, time.perf_counter())
    device = InlineDevice(model.runner)
    loop = StepLoop(core, device.launch, time.perf_counter)
    sequences = [_sequence(model, n, prompt, workload.tokens, turn) for n, prompt in enumerate(workload.prompts)]
    steps, coming, began = 0, sequences[::-1], time.process_time()
    while coming or core.scheduler.has_work:
        if coming and not core.scheduler.has_work:
            for _ in range(min(len(coming), workload.at_once)):
                core.arrive(coming.pop(), time.perf_counter())
        loop.schedule()
        loop.step(device.wait())
        steps += 1
    seconds = time.process_time() - began
    counts = core.scheduler.drafting.counts if core.scheduler.drafting is not None else {}
    return Run(seconds, [one.output for one in sequences], steps, *counts.get("", (0, 0)))


def _sequence(model: LoadedModel, number: int, prompt: str, tokens: int, turn: int) -> Sequence:
    messages: Listed[dict[str, str]] = [{"role": "user", "content": prompt}]
    ids = model.tokenizer.encode_text(model.tokenizer.render_chat(messages), add_special_tokens=False)
    sampling = SamplingParams(temperature=0.7 * (number % 2), max_tokens=tokens)
    return Sequence(PromptRequest(str(number), "", ids, sampling, tokens, 100 * turn + number, model.end_tokens))


if __name__ == "__main__":
    sys.exit(main())
