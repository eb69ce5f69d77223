"""The same text for a seed in every batch, and the same memory after every workload: `python -m
labs.benchmarks.batch_invariance`.

The embedded model, offline, with the kernels that serve by default. Random requests at temperature 1, many with
penalties, prompts of up to 450 tokens, are answered one by one and then together: all at once, their prompts in chunks
of 96, 33 and 16 tokens, and with so little KV memory that they are preempted. Every run has requests of its own. Then
thousands of others follow each other, in batches of every shape, over 24 MiB of KV memory, and the process is weighed.
"""

import sys
import time
from dataclasses import dataclass
from random import Random

from backend import LLM, SamplingParams
from backend.config import EngineOptions
from labs.benchmarks.memory import MIB, Growth, resident_bytes
from labs.benchmarks.report import Report, scenario_parser

KV_BYTES = 24 * MIB
BURST_REQUESTS = 100  # concurrent requests before each weighing of the process
WARM_UP_REQUESTS = 500  # requests after which memory no longer grows
MAX_GROWTH = 8  # MiB
SHORT_PROMPT_TOKENS, LONG_PROMPT_TOKENS = 120, 450  # tokens of a prompt, at most; one in ten is long

BESIDE = {
    "all at once": EngineOptions(),
    "chunks of 96": EngineOptions(prefill_chunk=96),
    "chunks of 33": EngineOptions(prefill_chunk=33, max_num_seqs=48),
    "chunks of 16, preempted": EngineOptions(
        prefill_chunk=16, max_num_seqs=24, max_model_len=512, kv_memory_bytes=4 * MIB
    ),
}


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests: prompts as token ids, and their sampling parameters."""

    prompts: list[list[int]]
    sampling: list[SamplingParams]

    @classmethod
    def random(cls, count: int, seed: int) -> "Requests":
        generator = Random(seed)
        return cls([_prompt(generator) for _ in range(count)], [_sampling(generator, n) for n in range(count)])

    def texts(self, llm: LLM) -> list[list[int]]:
        return [one.token_ids for one in llm.generate(self.prompts, self.sampling, progress=False)]


def main(arguments: list[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=3)
    parser.add_argument("--requests", type=int, default=1100, help="of a run, answered alone and beside others")
    parser.add_argument("--soak", type=int, default=6000, help="requests that the process is weighed after")
    options = parser.parse_args(arguments)
    runs, requests, soak = (
        (1, 8, 2 * BURST_REQUESTS) if options.quick else (options.runs, options.requests, options.soak)
    )
    report = Report("batch_invariance", options.quick)
    alone = LLM("embedded", EngineOptions(max_num_seqs=1))
    invariant = alone.model.runner.decoder.ops.batch_invariant
    report.notes.append(f"kernels {'are' if invariant else 'are not'} batch invariant, as they say themselves")
    rows = [row for run in range(runs) for row in _compare(alone, Requests.random(requests, run), run)]
    report.add_table("texts beside others", rows)
    report.at_most("requests that drew another text beside others", sum(int(str(row["changed"])) for row in rows), 0)
    report.at_least("preemptions", sum(int(str(row["preemptions"])) for row in rows), 1)
    _weigh(report, soak)
    return report.finish(options.results)


def _compare(alone: LLM, requests: Requests, run: int) -> list[dict[str, object]]:
    expected = requests.texts(alone)
    rows: list[dict[str, object]] = []
    for name, options in BESIDE.items():
        llm = LLM("embedded", options)
        found = requests.texts(llm)
        changed = sum(one != other for one, other in zip(found, expected, strict=True))
        preemptions = llm.scheduler.counters.preemptions
        rows.append({"run": run, "how": name, "requests": len(found), "changed": changed, "preemptions": preemptions})
    return rows


def _weigh(report: Report, count: int) -> None:
    llm = LLM("embedded", EngineOptions(kv_memory_bytes=KV_BYTES, max_num_seqs=64))
    growth, started = Growth(), time.perf_counter()
    growth.add(0, resident_bytes() / MIB)
    for done in range(BURST_REQUESTS, count + 1, BURST_REQUESTS):
        Requests.random(BURST_REQUESTS, -done).texts(llm)
        growth.add(done, resident_bytes() / MIB)
    every = max(1, len(growth.samples) // 12)
    rows: list[dict[str, object]] = [{"requests": n, "resident MiB": round(mib)} for n, mib in growth.samples[::every]]
    report.add_table(f"memory, {time.perf_counter() - started:.0f} s", rows)
    report.at_most(
        f"MiB grown since {WARM_UP_REQUESTS} requests, of {count}", growth.since(WARM_UP_REQUESTS), MAX_GROWTH
    )


def _prompt(generator: Random) -> list[int]:
    longest = LONG_PROMPT_TOKENS if generator.random() < 0.1 else SHORT_PROMPT_TOKENS
    return [generator.randrange(2, 1000) for _ in range(generator.randint(1, longest))]


def _sampling(generator: Random, number: int) -> SamplingParams:
    penalised = generator.random() < 0.5
    return SamplingParams(
        temperature=1,
        seed=number,
        top_p=generator.choice([1, 0.95]),
        presence_penalty=generator.choice([0, 0.5]) if penalised else 0,
        frequency_penalty=generator.choice([0, 0.5]) if penalised else 0,
        repetition_penalty=generator.choice([1, 1.2]) if penalised else 1,
        max_tokens=generator.randint(1, 40),
        ignore_eos=True,
    )


if __name__ == "__main__":
    sys.exit(main())
