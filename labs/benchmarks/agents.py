"""The blocks of agents' conversations that stay cached while the agents wait for their tools: `python -m
labs.benchmarks.agents [--runs 3]`.

Llama-3-8B on an A100 (simulated, published step times; 2 MiB of keys and values a block), 512 tokens a step. More
agents come than the machine could serve if each turn were computed from its beginning. Each sends 8 to 16 turns, one
after another: a turn comes 1 to 60 s after the answer before it, when a tool has returned, and begins with the whole
conversation so far. The waits are log-normal, of a fast tool and a slow one, or uniform, and memory holds a third to
two thirds of the blocks of all waiting agents.

Each seed's agents are the same under each rule: idle blocks dropped at once, evicted least recently used first, and
kept by measured return times, with clients that announce nothing, the truth, three times too long or too short, or one
second for everything. The mean time from an agent's first request to the end of its last answer, waits included, is
judged.

Then two tenants, one of which announces a return in a second for every request: the hits of the other are compared with
its hits where no tenant announces anything.
"""

import math
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from random import Random
from statistics import median

from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.process_pool import process_pool
from labs.simulation.arrival import Arrival, Turn
from labs.simulation.contents import Content
from labs.simulation.device import DEVICES
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective
from labs.simulation.study import SimulatedRun
from labs.simulation.summary import Summary

DEVICE = DEVICES["llama3-8b-a100"]
ENGINE = "overload=unbounded,max_num_batched_tokens=512,max_num_seqs=128,prefill_chunk=512,max_model_len=32768"
SYSTEM = 1008  # tokens of a system prompt, common to a tenant's agents
COPY = 16 * 131_072 / 25e9  # seconds, of a block at 25 GB/s
AGENTS = 60
BETTER, WORST, LOST = 1.2, 0.97, 0.01
FIRST_JUDGED_SEED = 1000  # the first judged seed; no setting was tuned with them


@dataclass(frozen=True, slots=True)
class Load:
    """Agents arriving at a rate, and the durations of their tools."""

    name: str
    rate: float  # a second
    gap: Callable[[Random], float]
    blocks: tuple[int, ...]  # of memory


def _clipped(seconds: float) -> float:
    return min(60.0, max(1.0, seconds))


def _lognormal(random: Random) -> float:
    return _clipped(random.lognormvariate(math.log(8.0), 1.0))


def _two_tools(random: Random) -> float:
    return _clipped(random.gauss(2.0, 0.5) if random.random() < 0.7 else random.gauss(45.0, 8.0))


def _uniform(random: Random) -> float:
    return random.uniform(1.0, 60.0)


LOADS = {
    load.name: load
    for load in (
        Load("log-normal", 0.35, _lognormal, (8_000, 12_000)),
        Load("two tools", 0.30, _two_tools, (8_000, 12_000)),
        Load("uniform", 0.35, _uniform, (16_000, 24_000)),
    )
}
SAYINGS: dict[str, Callable[[float, Random], float | None]] = {
    "nothing": lambda gap, random: None,
    "the truth": lambda gap, random: gap,
    "three times as long": lambda gap, random: 3 * gap,
    "a third": lambda gap, random: gap / 3,
    "three times off": lambda gap, random: gap * random.choice((1 / 3, 3.0)),
    "1 s of all": lambda gap, random: 1.0,
}
RULES = (("drop", "nothing"), ("lru", "nothing"), ("measured", "nothing"))
OURS = ("measured", "the truth")
WRONG = tuple(("measured", said) for said in ("three times as long", "a third", "three times off", "1 s of all"))


@dataclass(frozen=True, slots=True)
class Run:
    load: str
    blocks: int
    host: bool
    seed: int
    rule: str
    said: str
    agents: int


def agents(load: Load, said: str, seed: int, count: int, tenant: str = "everyone") -> list[Arrival]:
    """The first request of each agent; the clients' hints do not change arrivals."""
    random, words, moment, made = Random(seed), Random(seed + 1), 0.0, list[Arrival]()
    for number in range(1, count + 1):
        moment += random.expovariate(load.rate)
        prompt, output = SYSTEM + random.randint(1000, 5000), random.randint(30, 200)
        gaps = [load.gap(random) for _ in range(random.randint(7, 15))]
        expected = [*(SAYINGS[said](gap, words) for gap in gaps), None]
        turns = tuple(
            Turn(gap, random.randint(100, 800), random.randint(30, 200), expects)
            for gap, expects in zip(gaps, expected[1:], strict=True)
        )
        tokens = prompt + output + sum(turn.more_tokens + turn.output_tokens for turn in turns)
        content = Content((-1, *[number] * (-(-tokens // SYSTEM))), SYSTEM)
        made.append(Arrival(moment, prompt, output, number, tenant, content=content, expects=expected[0], turns=turns))
    return made


def serve(run: Run) -> Summary:
    return _serve(run, agents(LOADS[run.load], run.said, run.seed, run.agents))


def _serve(run: Run, arrivals: list[Arrival]) -> Summary:
    host = f",num_host_blocks={2 * run.blocks},block_copy_seconds={COPY}" if run.host else ""
    rule = "lru" if run.rule == "drop" else run.rule
    settings = f"{ENGINE},num_blocks={run.blocks},between_turns={rule}{host}"
    simulated = SimulatedRun(parse_simulated_policy(settings, DEVICE), arrivals, DEVICE, Objective())
    if run.rule == "drop":
        simulated.core.limit_cache("everyone", 0, 0, 0.0)
    simulated.loop.advance(math.inf)
    return simulated.summary(seed=run.seed)


def beside_a_liar(run: Run) -> float:
    """The hit share of a tenant's prompt tokens beside a tenant that claims `run.said` for all its requests."""
    load, half = LOADS[run.load], run.agents // 2
    liars = agents(load, run.said, run.seed, half, "liar")
    honest = agents(load, "nothing", run.seed + 500_000, half, "honest")
    arrivals = sorted(liars + honest, key=lambda arrival: arrival.time)
    tenants = {tenant.name: tenant for tenant in _serve(run, arrivals).tenants}
    return tenants["honest"].hit_rate


def main(arguments: list[str] | None = None) -> int:
    options = scenario_parser(__doc__, runs=3).parse_args(arguments)
    seeds, count = (
        ((1,), 6) if options.quick else (tuple(range(FIRST_JUDGED_SEED, FIRST_JUDGED_SEED + options.runs)), AGENTS)
    )
    report = Report("agents", options.quick)
    with process_pool(2) as pool:
        cases = [(name, blocks, host) for name, load in LOADS.items() for blocks, host in _memory(load)]
        runs = [
            Run(*case, seed, *rule, count)
            for case, seed in product(cases, seeds)
            for rule in (*RULES, OURS, *(WRONG if _is_first(case) else ()))
        ]
        found = dict(zip(runs, pool.map(serve, runs), strict=True))
        _completion(report, found)
        _greed(report, pool, seeds, count)
    return report.finish(options.results)


def _memory(load: Load) -> list[tuple[int, bool]]:
    small, *_ = load.blocks
    return [*((blocks, False) for blocks in load.blocks), (small, True)]


def _is_first(case: tuple[str, int, bool]) -> bool:
    name, blocks, host = case
    return blocks == LOADS[name].blocks[0] and not host


def _completion(report: Report, found: dict[Run, Summary]) -> None:
    rows: list[dict[str, object]] = []
    over_drop, over_lru = list[float](), list[float]()
    for case in dict.fromkeys((run.load, run.blocks, run.host) for run in found):
        by_rule: dict[tuple[str, str], dict[int, Summary]] = {}
        for run, summary in found.items():
            if (run.load, run.blocks, run.host) == case:
                by_rule.setdefault((run.rule, run.said), {})[run.seed] = summary
        seconds = {rule: {seed: s.session_seconds for seed, s in runs.items()} for rule, runs in by_rule.items()}
        dropped, recent = (seconds[rule] for rule in RULES[:2])
        for rule, runs in by_rule.items():
            against = [dropped[seed] / took for seed, took in seconds[rule].items()]
            rows.append(_row(case, rule, list(runs.values()), against))
            if rule[0] == "measured":
                over_drop += against
                over_lru += [recent[seed] / took for seed, took in seconds[rule].items()]
    report.add_table("mean completion of agents, median over seeds (extremes)", rows)
    report.at_least("mean completion, times as soon as drop-always, worst row and seed", min(over_drop), BETTER)
    report.at_least("the same, of the least recently used first", min(over_lru), WORST)
    report.notes.append(f"over least recently used: median {median(over_lru):.3f}, best {max(over_lru):.3f}")


def _row(
    case: tuple[str, int, bool], rule: tuple[str, str], runs: list[Summary], against: list[float]
) -> dict[str, object]:
    name, blocks, host = case
    return {
        "waits": name,
        "blocks": f"{blocks:,}{' + host' if host else ''}",
        "rule": rule[0],
        "clients say": rule[1],
        "completion s": Spread.of([run.session_seconds for run in runs]),
        "times as soon as drop": Spread.of(against),
        "hits": Spread.of([run.hit_rate for run in runs]),
        "preemptions": Spread.of([float(run.preemptions) for run in runs]),
    }


def _greed(report: Report, pool: ProcessPoolExecutor, seeds: tuple[int, ...], count: int) -> None:
    cases = [
        Run(load.name, load.blocks[0], False, seed, "measured", said, count)
        for load, seed, said in product(LOADS.values(), seeds, ("nothing", "1 s of all"))
    ]
    found = dict(zip(cases, pool.map(beside_a_liar, cases), strict=True))
    rows, lost = list[dict[str, object]](), list[float]()
    for quiet, liar in zip(cases[::2], cases[1::2], strict=True):
        lost.append(found[quiet] - found[liar])
        rows.append({"waits": quiet.load, "seed": quiet.seed, "hits": found[quiet], "beside a liar": found[liar]})
    report.add_table("what a tenant finds beside one that says of all that it is back in a second", rows)
    report.at_most("share of its tokens that it finds no more, worst", max(lost), LOST)


if __name__ == "__main__":
    sys.exit(main())
