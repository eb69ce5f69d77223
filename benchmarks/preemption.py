"""Swap or recompute, where memory is a quarter of what is asked for: python -m benchmarks.preemption [--runs 5]

Llama-3-8B on an A100 (simulated, published step times; 2 MiB of keys and values a block), 512 tokens a step, twice as
many requests as it can serve from the start on, with lengths drawn as in `benchmarks.overload`, prompts
half as long. They are admitted whatever they may still need (`memory=optimistic`), so that
memory runs out all the time, with a host pool for half of the device's. A copy of a block takes what a stated bandwidth
makes of it. Each seed's requests are the same under each rule: the measured choice is judged beside always swapping and
never swapping, by the tokens that are generated a second until all have ended.

Then the default admission, which forecasts memory, beside the optimistic one: its throughput and its preemptions.
"""

import sys
from collections.abc import Sequence
from statistics import median

from admission.simulation.arrival import Arrival
from admission.simulation.contents import Content
from admission.simulation.device import DEVICES
from admission.simulation.policy import parse_simulated_policy
from admission.simulation.recorder import Objective
from admission.simulation.study import simulate_run
from admission.simulation.summary import Summary
from benchmarks.overload import drawn_trace
from benchmarks.report import Report, Spread, scenario_parser

DEVICE = DEVICES["llama3-8b-a100"]
BLOCK_BYTES = 16 * 131_072
BANDWIDTHS = (1, 3, 12, 25, 50)  # GB/s, of a copy from the device to the host or back
RULES = ("measured", "always", "never")
REQUESTS = 300
SEQS = 96
BLOCKS = 1_500  # 24,000 tokens; what 96 of these requests hold at their fullest is four times as much
ENGINE = f"max_num_batched_tokens=512,max_num_seqs={SEQS},prefill_chunk=512,max_model_len=16384,num_blocks={BLOCKS}"
CORE = "order=fcfs,overload=unbounded"
MAX_TOKENS = 1024
WORST = 0.95  # of the better rule's throughput


def main(arguments: list[str] | None = None) -> int:
    options = scenario_parser(__doc__, runs=5).parse_args(arguments)
    seeds, requests = ((1,), 40) if options.quick else (tuple(range(101, 101 + options.runs)), REQUESTS)
    report = Report("preemption", options.quick)
    rows: list[dict[str, object]] = []
    worst = 1.0
    for bandwidth in BANDWIDTHS:
        runs = {rule: [_run("optimistic", rule, bandwidth, seed, requests) for seed in seeds] for rule in RULES}
        rows += [_row(f"{bandwidth} GB/s, {rule}", runs[rule]) for rule in RULES]
        for measured, *others in zip(*runs.values(), strict=True):
            worst = min(worst, measured.output_rate / max(one.output_rate for one in others))
    report.add_table("optimistic admission, a quarter of the memory, median (extremes)", rows)
    report.at_least("measured choice, of the better rule's tokens/s, worst seed and bandwidth", worst, WORST)
    _admission(report, seeds, requests)
    return report.finish(options.results)


def _admission(report: Report, seeds: Sequence[int], requests: int) -> None:
    runs = {
        memory: [_run(memory, "measured", 25, seed, requests) for seed in seeds]
        for memory in ("optimistic", "forecast")
    }
    report.add_table("admission, copies at 25 GB/s, median (extremes)", [_row(name, runs[name]) for name in runs])
    pairs = list(zip(runs["forecast"], runs["optimistic"], strict=True))
    rate = median(ours.output_rate / theirs.output_rate for ours, theirs in pairs)
    report.at_least("forecast, of optimistic admission's tokens/s", rate, 0.99)
    preemptions = median(ours.preemptions / max(1, theirs.preemptions) for ours, theirs in pairs)
    report.at_most("forecast, of optimistic admission's preemptions", preemptions, 0.6)


def _run(memory: str, rule: str, bandwidth: float, seed: int, requests: int) -> Summary:
    copy = BLOCK_BYTES / (bandwidth * 1e9)
    swap = f"num_host_blocks={BLOCKS // 2},block_copy_seconds={copy},swap={rule}"
    policy = parse_simulated_policy(f"{CORE},{ENGINE},memory={memory},{swap}", DEVICE)
    return simulate_run(policy, _arrivals(seed, requests), DEVICE, Objective(), seed)


def _arrivals(seed: int, requests: int) -> list[Arrival]:
    drawn = drawn_trace(seed, requests)
    return [
        Arrival(
            n * 0.05,
            max(1, one.prompt_tokens // 2),
            one.output_tokens,
            tenant="everyone",
            max_tokens=MAX_TOKENS,
            content=Content.of_session(n),
        )
        for n, one in enumerate(drawn)
    ]


def _row(name: str, runs: Sequence[Summary]) -> dict[str, object]:
    return {
        "run": name,
        "tokens/s": Spread.of([run.output_rate for run in runs]),
        "preemptions": Spread.of([float(run.preemptions) for run in runs]),
        "computed again": Spread.of([float(run.recomputed_tokens) for run in runs]),
        "TTFT p50 s": Spread.of([run.first_token.p50 or 0.0 for run in runs]),
        "TTFT p99 s": Spread.of([run.first_token.p99 or 0.0 for run in runs]),
    }


if __name__ == "__main__":
    sys.exit(main())
