"""A long prompt and ten short ones of its class: `python -m labs.benchmarks.long_prompt [--runs 3]`.

Llama-3-8B on an A100 (simulated, published step times), 512 tokens a step, beside 32 answers of other tenants. A prompt
of 8,192 tokens comes, and ten of 100 tokens while it is computed: all at once or each at a time of its own, of its
tenant or each of another, with no deadlines or with 2 s for each. A short prompt's queueing is the number of
steps that are planned without it after it came; the long one's slowdown is its time to the first token over that
without short ones. Beside it, all is served and computed in the order of arrival (`order=fcfs`).

Eight prompts of 8,192 tokens of one tenant are computed side by side (64 tokens of each a step), and one of another's
comes while they are: its time to the first token over that of a machine of its own, and that of the eight over theirs
without it.

Then the whole machine: conversations as Azure's of 2023 (`overload`) at 0.7 of capacity, times to the first
token by quartile of length. Medians over runs of other seeds, with the extremes.
"""

import sys
from itertools import product
from random import Random

from admission.observer import CoreObserver
from admission.outcome import AdmissionRefused
from admission.promise import Promise
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence
from labs.benchmarks.overload_loads import DEVICE, MAX_TOKENS, drawn_trace
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.simulation.arrival import Arrival
from labs.simulation.loop import Loop
from labs.simulation.policy import SimulatedPolicy, parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder, TrackedRequest
from labs.simulation.study import capacity
from labs.simulation.workload import Workload

POLICY = "order=fair,max_num_batched_tokens=512,max_num_seqs=192,prefill_chunk=512,max_waiting=100000"
RULES = {"the default": POLICY, "by arrival": POLICY.replace("order=fair", "order=fcfs")}
LONG_PROMPT_TOKENS, SHORT_PROMPT_TOKENS, NUM_SHORT_PROMPTS = 8192, 100, 10  # tokens, and how many
NUM_LONG_PROMPTS = 8  # long ones side by side
ANSWERS, BEGIN, DURATION = 32, 2.0, 0.9  # beside them; when the long prompt comes, and how long most of it takes
POSITIONS = 50  # of the short ones, in each run
FIRST_SEED = 101
LOAD, SECONDS, TENANTS = 0.7, 300.0, 4


class _Queueing(CoreObserver):
    """Counts the steps planned while a prompt waits for its last chunk, and the steps of its chunks."""

    def __init__(self) -> None:
        self.steps: dict[Sequence, int] = {}  # planned without it
        self.done: list[tuple[Sequence, int]] = []

    def arrived(self, sequence: Sequence, answer: Promise | AdmissionRefused, now: float) -> None:
        assert isinstance(answer, Promise)
        self.steps[sequence] = 0

    def scheduled(self, step: ScheduledStep | None, now: float) -> None:
        if step is None:
            return
        for sequence in [s for s in self.steps if s not in step.sequences]:
            self.steps[sequence] += 1
        for sequence in step.sampled[step.batch.num_decodes :]:
            self.done.append((sequence, self.steps.pop(sequence)))


class _FirstTokens(Recorder):
    """Keeps each one's length and time to the first token."""

    def __init__(self) -> None:
        super().__init__(DEVICE, Objective(), {})
        self.found: list[tuple[int, float]] = []

    def _done(self, sequence: Sequence, request: TrackedRequest, now: float) -> None:
        super()._done(sequence, request, now)
        self.found.append((request.arrival.prompt_tokens, request.first_token - request.arrival.time))


def main(arguments: list[str] | None = None) -> int:
    options = scenario_parser(__doc__, runs=3).parse_args(arguments)
    runs, positions, shorter = (1, 3, 0.1) if options.quick else (options.runs, POSITIONS, 1.0)
    seeds = range(FIRST_SEED, FIRST_SEED + runs)
    report = Report("long_prompt", options.quick)
    rows = []
    for tenants, at_once, deadline in product(("same", "others"), (True, False), (None, 2.0)):
        for rule, policy in RULES.items():
            found = [_beside(policy, tenants, at_once, deadline, positions, seed) for seed in seeds]
            row = {
                "short prompts": f"{tenants}, {_when(at_once)}",
                "deadline": "none" if deadline is None else f"{deadline:g} s",
                "order": rule,
            }
            spreads = {what: Spread.of([one[what] for one in found]) for what in found[0]}
            rows.append(row | spreads)
            if rule == "the default":
                case = f"{row['short prompts']}, deadline {row['deadline']}"
                report.at_most(f"steps that short prompts wait, p99: {case}", spreads["short, steps p99"].high, 2)
                report.at_most(f"long prompt's slowdown, mean: {case}", spreads["long, slowdown"].high, 1.2)
    report.add_table("a prompt of 8,192 tokens and ten of 100, median over runs (extremes)", rows)
    rows = []
    for rule, policy in RULES.items():
        found = [_side_by_side(policy.replace("prefill_chunk=512", "prefill_chunk=64"), seed) for seed in seeds]
        rows.append({"order": rule} | {what: Spread.of([one[what] for one in found]) for what in found[0]})
    ours, theirs = (row["the other's"] for row in rows)
    assert isinstance(ours, Spread) and isinstance(theirs, Spread)
    report.at_most("a prompt beside eight of another tenant's, over that by arrival", ours.high / theirs.low, 0.8)
    report.add_table("eight prompts of 8,192 tokens side by side, and one of another tenant's: slowdown", rows)
    report.add_table(f"seconds to the first token at {LOAD} of capacity", _conversations(seeds, shorter, report))
    return report.finish(options.results)


def _when(at_once: bool) -> str:
    return "at once" if at_once else "one by one"


def _beside(
    policy: str, tenants: str, at_once: bool, deadline: float | None, positions: int, seed: int
) -> dict[str, float]:
    random, waited, slowdowns, firsts = Random(seed), [], [], []
    alone = _run(policy, [Arrival(BEGIN, LONG_PROMPT_TOKENS, 16, tenant="long", deadline=deadline)])[1][
        LONG_PROMPT_TOKENS
    ][0]
    for _ in range(positions):
        start = random.uniform(0.0, DURATION)
        times = sorted(start if at_once else random.uniform(0.0, DURATION) for _ in range(NUM_SHORT_PROMPTS))
        names = ["long" if tenants == "same" else f"short-{n}" for n in range(NUM_SHORT_PROMPTS)]
        shorts = [
            Arrival(BEGIN + time, SHORT_PROMPT_TOKENS, 16, tenant=name, deadline=deadline)
            for time, name in zip(times, names, strict=True)
        ]
        steps, first = _run(policy, [Arrival(BEGIN, LONG_PROMPT_TOKENS, 16, tenant="long", deadline=deadline), *shorts])
        waited += steps
        firsts += first[SHORT_PROMPT_TOKENS]
        slowdowns.append(first[LONG_PROMPT_TOKENS][0] / alone)
    return {
        "short, steps p99": float(quantile(sorted(waited), 0.99)),
        "short, s p99": quantile(sorted(firsts), 0.99),
        "long, slowdown": sum(slowdowns) / len(slowdowns),
        "long, worst": max(slowdowns),
    }


def _side_by_side(policy: str, seed: int) -> dict[str, float]:
    begin = BEGIN + Random(seed).uniform(0.0, DURATION)
    many = [Arrival(BEGIN, LONG_PROMPT_TOKENS, 16, tenant="many") for _ in range(NUM_LONG_PROMPTS)]
    other = Arrival(begin, LONG_PROMPT_TOKENS + 1, 16, tenant="other")
    alone, without, both = (_run(policy, arrivals)[1] for arrivals in ([other], many, [*many, other]))
    return {
        "the other's": both[LONG_PROMPT_TOKENS + 1][0] / alone[LONG_PROMPT_TOKENS + 1][0],
        "the eight, mean": sum(both[LONG_PROMPT_TOKENS]) / sum(without[LONG_PROMPT_TOKENS]),
        "the eight, last": max(both[LONG_PROMPT_TOKENS]) / max(without[LONG_PROMPT_TOKENS]),
    }


def _run(policy: str, arrivals: list[Arrival]) -> tuple[list[int], dict[int, list[float]]]:
    """Returns the steps that short prompts waited, and times to the first token by length of prompt."""
    simulated, recorder, queueing = parse_simulated_policy(policy, DEVICE), _FirstTokens(), _Queueing()
    core = simulated.make_core()
    core.observers.append(queueing)
    answers = [Arrival(n * 0.01, 64, 300, tenant=f"answers-{n % 8}") for n in range(ANSWERS)]
    Loop(core, DEVICE, recorder, simulated.engine.max_model_len).run([*answers, *arrivals])
    first: dict[int, list[float]] = {}
    for length, time in recorder.found:
        first.setdefault(length, []).append(time)
    return [steps for sequence, steps in queueing.done if sequence.num_prompt_tokens == SHORT_PROMPT_TOKENS], first


def _conversations(seeds: range, shorter: float, report: Report) -> list[dict[str, object]]:
    trace = drawn_trace()
    rate = capacity(_policy(POLICY), Workload(tuple(trace), max_tokens=MAX_TOKENS), DEVICE)
    found: dict[str, dict[str, list[float]]] = {rule: {} for rule in RULES}
    for rule, seed in product(RULES, seeds):
        for what, value in _first_tokens(_policy(RULES[rule]), trace, rate * LOAD, SECONDS * shorter, seed).items():
            found[rule].setdefault(what, []).append(value)
    ours, theirs = (found[rule] for rule in RULES)
    for what, bound in (("mean", 0.95), ("shortest p99", 1.0), ("longest p99", 1.1)):
        ratio = sum(ours[what]) / sum(theirs[what])
        report.at_most(f"time to the first token, {what}, over that of the order of arrival", ratio, bound)
    return [{"order": rule} | {what: Spread.of(each) for what, each in row.items()} for rule, row in found.items()]


def _policy(text: str) -> SimulatedPolicy:
    return parse_simulated_policy(text, DEVICE)


def _first_tokens(
    policy: SimulatedPolicy, trace: list[Arrival], rate: float, seconds: float, seed: int
) -> dict[str, float]:
    random, time, arrivals = Random(seed), 0.0, []
    while (time := time + random.expovariate(rate)) < seconds:
        tenant = f"tenant-{random.randrange(TENANTS)}"
        arrivals.append(random.choice(trace)._replace(time=time, tenant=tenant, max_tokens=MAX_TOKENS))
    recorder = _FirstTokens()
    Loop(policy.make_core(), DEVICE, recorder, policy.engine.max_model_len).run(arrivals)
    by_length = sorted(recorder.found)
    quarter = len(by_length) // 4
    of = {"shortest": by_length[:quarter], "longest": by_length[-quarter:]}
    times = {what: sorted(time for _, time in found) for what, found in of.items()}
    return {"mean": sum(time for _, time in by_length) / len(by_length)} | {
        f"{what} p{share * 100:g}": quantile(times[what], share) for what in times for share in (0.5, 0.99)
    }


if __name__ == "__main__":
    sys.exit(main())
