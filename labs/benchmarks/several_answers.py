"""The cost of several answers to one prompt until each has begun: `python -m labs.benchmarks.several_answers [--runs
5]`.

CPU seconds of the offline engine on the embedded model (real) until all have a first token: one answer to a prompt of
1,000 tokens, sixteen answers to one, sixteen prompts that differ in their last token alone, and sixteen that share
nothing. Kinds take turns within a run, and each is held against the one answer of its run.
"""

import sys
import time
from collections.abc import Callable
from random import Random
from statistics import median

from backend.config import EngineOptions
from backend.llm import LLM
from backend.sampling_params import SamplingParams
from labs.benchmarks.report import Report, Spread, scenario_parser

ANSWERS, PROMPT = 16, 1_000  # to one prompt of 1,000 tokens
OF_ONE = 1.2


def main(arguments: list[str] | None = None) -> int:
    options = scenario_parser(__doc__, runs=5).parse_args(arguments)
    report = Report("several_answers", options.quick)
    answers = 2 if options.quick else ANSWERS
    random = Random(7)
    llm = LLM("embedded", EngineOptions(max_num_seqs=2 * answers))
    seconds, computed = _measure(llm, _kinds(random, answers), 1 if options.quick else options.runs)
    one, many, *_ = seconds.values()
    rows: list[dict[str, object]] = [
        {
            "asked": kind,
            "CPU ms": Spread.of([1e3 * each for each in taken]),
            "of one": median(each / alone for each, alone in zip(taken, one, strict=True)),
            "prompt tokens computed": computed[kind],
        }
        for kind, taken in seconds.items()
    ]
    report.add_table(f"until all have a first token, {answers} at once, prompts of {PROMPT:,} tokens", rows)
    ratio = median(each / alone for each, alone in zip(many, one, strict=True))
    report.at_most("CPU of several answers to one prompt, of that of one", ratio, OF_ONE)
    return report.finish(options.results)


def _kinds(random: Random, answers: int) -> dict[str, Callable[[], list[list[int]]]]:
    def prompt() -> list[int]:
        return [random.randrange(200) for _ in range(PROMPT)]

    def alike() -> list[list[int]]:
        *shared, _ = prompt()
        return [[*shared, last] for last in range(answers)]

    return {
        "one answer": lambda: [prompt()],
        "answers to one prompt": lambda: [prompt()] * answers,
        "prompts that differ in their last token": alike,
        "prompts that share nothing": lambda: [prompt() for _ in range(answers)],
    }


def _measure(
    llm: LLM, kinds: dict[str, Callable[[], list[list[int]]]], runs: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Returns the CPU seconds of each run by kind, and the prompt tokens that were computed in the last."""
    sampling, counters = SamplingParams(temperature=1, max_tokens=1, ignore_eos=True), llm.scheduler.counters
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    computed = dict.fromkeys(kinds, 0)
    for run in range(runs + 1):
        for kind, prompts in kinds.items():
            asked, before, begin = prompts(), counters.prompt_tokens, time.process_time()
            llm.generate(asked, sampling, progress=False)
            if run:  # the first warms up
                seconds[kind].append(time.process_time() - begin)
                computed[kind] = counters.prompt_tokens - before
    return seconds, computed


if __name__ == "__main__":
    sys.exit(main())
