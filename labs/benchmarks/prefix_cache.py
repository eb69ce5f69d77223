"""The worth and the cost of the prefix cache: `python -m labs.benchmarks.prefix_cache [--trace FILE] [--runs 5]`.

Llama-3-8B on an A100 (simulated, published step times), 512 tokens a step, 256 sequences. Conversations come from a
Mooncake trace, slowed down to the load that this machine serves, or are made: sessions of two to eight turns that begin
with one of a few system prompts of 1,008 tokens, think half a minute between turns, and have lengths as in
`labs.benchmarks.overload`. Each is served with the cache and without, from pools of several sizes. The hit rate is held
against an exact LRU of as many blocks as the pool has, that sees the same prompts one after the other, computes in no
time and needs no memory for anything else.

Then system prompts alone, against the prefill that computing each once would save; what planning costs with 256 running
and 100,000 cached blocks; how long naming a prompt of 12,288 tokens holds the event loop at a time, in CPU time, beside
100,000 names; and what the offline engine loses on prompts that share nothing (the embedded model, real).
"""

import gc
import sys
import time
from argparse import ArgumentParser
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from statistics import mean, median

from admission.core import CoreConfig, make_core
from backend.config import EngineConfig, EngineOptions
from backend.llm import LLM
from backend.paged_kv.block_names import BlockNames
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.sequence import FinishReason, PromptRequest
from backend.scheduler.sequence import Sequence as EngineSequence
from gateway.api.prompt_names import PromptNames
from labs.benchmarks.overload_loads import OUTPUTS, drawn_trace
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.simulation.arrival import Arrival
from labs.simulation.contents import Content
from labs.simulation.device import DEVICES
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective
from labs.simulation.study import simulate_run
from labs.simulation.summary import Summary
from labs.simulation.traces import read_trace

DEVICE = DEVICES["llama3-8b-a100"]
ENGINE = "order=fcfs,overload=unbounded,max_num_batched_tokens=512,max_num_seqs=256,prefill_chunk=512"
BLOCK = 16
MADE_POOLS, TRACED_POOLS = (1_500, 4_000, 27_000), (8_000, 27_000, 100_000)  # blocks; the device has 27,000
SYSTEM = 63 * BLOCK  # tokens of a system prompt
SYSTEM_PROMPTS = 4
SESSIONS, RATE, THINKING = 250, 0.35, 30.0  # a second; seconds between an answer and the next turn
TRACED, SLOWER = 1_500, 12.0  # requests of a trace, and how many times as long they take to come
SMALL_POOL = 2**25  # bytes
RUNNING, CACHED, STEP = 256, 100_000, 7.4e-3
PROMPT, NAMED_PROMPTS, NAMING = 12_288, 200, 0.5  # tokens; milliseconds
OF_LRU, OF_IDEAL, PLANNING, UNSHARED = 0.97, 0.9, 0.05, 0.99


def main(arguments: list[str] | None = None) -> int:
    parser: ArgumentParser = scenario_parser(__doc__, runs=5)
    parser.add_argument("--trace", type=Path, help="a Mooncake trace, JSON lines")
    options = parser.parse_args(arguments)
    seeds = (1,) if options.quick else tuple(range(1, options.runs + 1))
    report = Report("prefix_cache", options.quick)
    made = {f"made, seed {seed}": conversations(seed, 30 if options.quick else SESSIONS) for seed in seeds}
    if options.trace is not None:
        made["traced"] = traced(options.trace, 100 if options.quick else TRACED)
    _hits(report, made)
    _system_prompts(report, seeds, 30 if options.quick else 300)
    cached = 2_000 if options.quick else CACHED
    _planning(report, cached, 20 if options.quick else 400)
    _naming(report, cached, 5 if options.quick else NAMED_PROMPTS)
    _unshared(report, 1 if options.quick else options.runs)
    return report.finish(options.results)


# Hits -----------------------------------------------------------------------------------------------------------------


def conversations(seed: int, sessions: int) -> list[Arrival]:
    """In order of time. A turn comes its thinking time after the turn before it, however long that took."""
    random, made, begin = Random(seed), list[Arrival](), 0.0
    lengths = iter(drawn_trace(seed, 10 * sessions))
    for session in range(1, sessions + 1):
        begin += random.expovariate(RATE)
        moment, history = begin, SYSTEM
        system = -random.randint(1, SYSTEM_PROMPTS)
        for _ in range(random.randint(2, 8)):
            drawn = next(lengths)
            prompt = history + max(8, drawn.prompt_tokens // 8)
            ids = (system, *[session] * (-(-(prompt + drawn.output_tokens) // SYSTEM)))
            made.append(Arrival(moment, prompt, drawn.output_tokens, session, "everyone", content=Content(ids, SYSTEM)))
            history = prompt + drawn.output_tokens
            moment += THINKING * random.uniform(0.5, 1.5) + drawn.output_tokens * 0.02
    made.sort(key=lambda arrival: arrival.time)
    return made


def traced(path: Path, requests: int) -> list[Arrival]:
    arrivals = read_trace(path)[:requests]
    return [one._replace(time=one.time * SLOWER, tenant="everyone") for one in arrivals]


def lru_found(arrivals: Iterable[Arrival], blocks: int) -> list[int]:
    """Return the tokens of each prompt that an exact LRU of `blocks` has cached, for prompts one after the other."""
    cache: OrderedDict[tuple[str, int, int], None] = OrderedDict()
    found = []
    for arrival in arrivals:
        content = arrival.content
        assert content is not None
        ends = range(BLOCK - 1, arrival.prompt_tokens + arrival.output_tokens - 1, BLOCK)
        names = [(arrival.tenant, unit, end) for end in ends if (unit := content.id_at(end)) is not None]
        tokens = 0
        for name in names[: (arrival.prompt_tokens - 1) // BLOCK]:
            if name not in cache:
                break
            tokens += BLOCK
        found.append(tokens)
        for name in reversed(names):  # the last of them is given up first
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return found


def _hits(report: Report, workloads: dict[str, list[Arrival]]) -> None:
    rows: list[dict[str, object]] = []
    worst = 1.0
    for name, arrivals in workloads.items():
        for blocks in TRACED_POOLS if name == "traced" else MADE_POOLS:
            cached, without = (_run(arrivals, f"num_blocks={blocks},prefix_cache={on}") for on in ("on", "off"))
            best = sum(lru_found(arrivals, blocks)) / sum(arrival.prompt_tokens for arrival in arrivals)
            worst = min(worst, cached.hit_rate / best)
            rows.append({"workload": name, "blocks": blocks, "LRU hits": best} | _row(cached, without))
    report.add_table("conversations with the cache and without", rows)
    report.at_least("hit rate, of an exact LRU's, worst workload and pool", worst, OF_LRU)


def _row(cached: Summary, without: Summary) -> dict[str, object]:
    return {
        "hits": cached.hit_rate,
        "TTFT p50 s": cached.first_token.p50,
        "off p50": without.first_token.p50,
        "TTFT p99 s": cached.first_token.p99,
        "off p99": without.first_token.p99,
        "tokens/s": cached.output_rate,
        "off tokens/s": without.output_rate,
    }


def _run(arrivals: Sequence[Arrival], settings: str) -> Summary:
    longest = max(arrival.most_tokens for arrival in arrivals)
    policy = parse_simulated_policy(f"{ENGINE},max_model_len={longest + 1},{settings}", DEVICE)
    return simulate_run(policy, arrivals, DEVICE, Objective())


def _system_prompts(report: Report, seeds: Sequence[int], requests: int) -> None:
    """Requests of one turn behind few system prompts: the prefill saved, of what computing each prompt once saves."""
    rows, shares = list[dict[str, object]](), []
    for seed in seeds:
        random, moment, arrivals = Random(seed), 0.0, list[Arrival]()
        for n, drawn in enumerate(drawn_trace(seed, requests), 1):
            moment += random.expovariate(4.0)
            prompt, output = SYSTEM + max(8, drawn.prompt_tokens // 8), min(drawn.output_tokens, OUTPUTS[8])
            ids = (-random.randint(1, SYSTEM_PROMPTS), *[n] * (-(-(prompt + output) // SYSTEM)))
            arrivals.append(Arrival(moment, prompt, output, n, "everyone", content=Content(ids, SYSTEM)))
        summary = _run(arrivals, "num_blocks=27000")
        total = sum(arrival.prompt_tokens for arrival in arrivals)
        ideal = (requests - SYSTEM_PROMPTS) * SYSTEM
        shares.append(summary.hit_rate * total / ideal)
        rows.append({"seed": seed, "prompt tokens": total, "ideally saved": ideal, "saved, of ideal": shares[-1]})
    report.add_table(f"{SYSTEM_PROMPTS} system prompts of {SYSTEM:,} tokens", rows)
    report.at_least("prefill saved, of the ideal, worst seed", min(shares), OF_IDEAL)


# What it costs --------------------------------------------------------------------------------------------------------


class Machine:
    """A core of real decisions, over a device that draws tokens at once."""

    def __init__(self, cached: int) -> None:
        self._random, self._numbers, self._now = Random(1), count(), 0.0
        self._flying: deque[Batch] = deque()
        self._names = BlockNames(b"secret", BLOCK)
        engine = EngineConfig(
            num_blocks=cached + RUNNING * 100,
            max_model_len=4096,
            max_num_seqs=RUNNING,
            max_num_batched_tokens=2048,
            prefill_chunk=512,
        )
        self.core = make_core(CoreConfig(max_waiting=10**6), engine)
        self.core.scheduler.name_blocks_by(self._names)
        while len(self.core.scheduler.kv_manager.cache) < cached:
            for _ in range(4):
                self.arrive([], 2_000, 1)
            while self.core.scheduler.has_work:
                self.step()

    def tokens(self, number: int) -> list[int]:
        return [self._random.randrange(1000) for _ in range(number)]

    def arrive(self, shared: list[int], more: int, output: int) -> None:
        """A sequence whose prompt begins with the shared tokens and goes on with as many others."""
        name, prompt = str(next(self._numbers)), [*shared, *self.tokens(more)]
        request = PromptRequest(name, "everyone", prompt, SamplingParams(), output, 0, frozenset())
        one = EngineSequence(request, cache_root=self._names.root("everyone"))
        self._names.name(one, len(prompt) // BLOCK)
        self.core.arrive(one, self._now)

    def leave(self) -> None:
        """The sequence that has run the longest is cancelled."""
        self.core.finish_sequence(next(iter(self.core.scheduler.running.values())), FinishReason.CANCELLED, self._now)

    def step(self) -> float:
        """Plan steps, and account for the oldest; seconds of deciding."""
        self._now += STEP
        begin = time.perf_counter()
        while (batch := self.core.schedule(self._now)) is not None:
            self._flying.append(batch)
        planned = time.perf_counter()
        oldest = self._flying.popleft()
        output = StepOutput(oldest.step, self.tokens(len(oldest.sampled)), STEP)
        completing = time.perf_counter()
        self.core.update_from_output(output, self._now)
        return planned - begin + time.perf_counter() - completing


def _planning(report: Report, cached: int, steps: int) -> None:
    """Deciding steps of which every fourth has one joining, the first half of whose prompt is cached."""
    machine = Machine(cached)
    shared = machine.tokens(400)
    for _ in range(RUNNING):
        machine.arrive(shared, 400, 1000)
    for _ in range(2 * RUNNING):
        machine.step()
    gc.collect()
    gc.freeze()
    seconds = []
    for n in range(steps):
        if n % 4 == 0:
            machine.leave()
            machine.arrive(shared, 400, 1000)
        seconds.append(machine.step())
    gc.unfreeze()
    report.add_table(
        f"deciding a step at {RUNNING} running and {cached:,} cached blocks",
        [{"median us": median(seconds) * 1e6, "mean us": mean(seconds) * 1e6, "most us": max(seconds) * 1e6}],
    )
    report.at_most(f"share of a {STEP * 1e3:g} ms step that deciding takes", mean(seconds) / STEP, PLANNING)


def _naming(report: Report, known: int, prompts: int) -> None:
    """The event loop's holds by each part of an arriving prompt's naming, as `PromptNames` does it."""
    gc.collect()
    gc.freeze()
    rows: list[dict[str, object]] = []
    for size in (BLOCK, 2 * BLOCK):
        names = PromptNames(BlockNames(b"secret", size), size)
        kept = [_named(names, PROMPT, n)[0] for n in range(-(-known * size // PROMPT))]
        first = sorted(ms for n in range(prompts) for ms in _named(names, PROMPT, -1 - n)[1])
        again = sorted(ms for n in range(prompts) for ms in _named(names, PROMPT, n % len(kept))[1])
        for whose, parts in (("new", first), ("known", again)):
            p99, longer = quantile(parts, 0.99), sum(part > NAMING for part in parts)
            row = {"blocks of": size, "names": whose, "parts": len(parts), "p50 ms": median(parts), "p99 ms": p99}
            rows.append(row | {"most ms": parts[-1], f"above {NAMING} ms": longer})
            report.at_most(f"ms that a part of naming takes, {whose} names, blocks of {size}, p99", p99, NAMING)
    gc.unfreeze()
    report.add_table(f"naming a prompt of {PROMPT:,} tokens beside {known:,} names, CPU time of each part", rows)


def _named(names: PromptNames, tokens: int, seed: int) -> tuple[EngineSequence, list[float]]:
    """Returns a sequence of random tokens, and the milliseconds of each part of its naming."""
    random, parts, is_named = Random(seed), list[float](), False
    prompt = random.choices(range(130_000), k=tokens)
    one = EngineSequence(PromptRequest(str(seed), "everyone", prompt, SamplingParams(), 1, 0, frozenset()))
    names.begin([one], "everyone", None)
    while not is_named:
        begin = time.thread_time_ns()
        is_named = names.name_some([one])
        parts.append((time.thread_time_ns() - begin) / 1e6)
    return one, parts


def _unshared(report: Report, runs: int) -> None:
    """Tokens a second of the offline engine on prompts of which no two begin alike, with the cache and without.

    A pool that is much larger than what runs is written to all over with the cache, and without it the same few blocks
    again and again, which a processor's caches have. So the pool is small here, and blocks are given up throughout.
    """
    random = Random(5)
    options = EngineOptions(max_num_seqs=32, kv_memory_bytes=SMALL_POOL)
    engines = {on: LLM("embedded", replace(options, prefix_cache=on)) for on in (True, False)}
    sampling = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for run in range(runs + 1):
        for on in (True, False) if run % 2 else (False, True):
            prompts = [[random.randrange(200) for _ in range(150)] for _ in range(48)]
            begin = time.process_time()
            engines[on].generate(prompts, sampling, progress=False)
            if run:  # the first warms up
                rates[on].append(48 * 64 / (time.process_time() - begin))
    share = median(with_cache / without for with_cache, without in zip(rates[True], rates[False], strict=True))
    rows: list[dict[str, object]] = [
        {"cache": "on" if on else "off", "tokens/CPU-s": Spread.of(rates[on])} for on in rates
    ]
    report.add_table("prompts that share nothing, the embedded model, offline", rows)
    report.at_least("throughput where nothing is shared, of that without the cache", share, UNSHARED)


if __name__ == "__main__":
    sys.exit(main())
