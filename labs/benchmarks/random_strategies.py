"""Random strategies of one tenant beside honest ones: python -m labs.benchmarks.random_strategies [--first 1]

Each strategy is drawn from its number: one to three streams of requests at once, each with lengths, classes (one,
several in turn, or another one now and then to age a class or to keep it asked for), deadlines for first and last
tokens, several answers, false declarations, pauses, and clients that hang up after some tokens or without one. Beside
them three or nine honest tenants send plain requests in the gateway's default class, with deadlines, without, or both.
Weights are equal, the policy is the gateway's default, all ask for 1.5 times what Llama-3-8B on an A100 (simulated)
completes, and each honest tenant for more than its share.

A strategy gains what its tenant has of the device's time over the honest mean, by true costs: in the first 90 s, which
the bound on debts and savings limits, and from the second minute on. Several keys are one tenant to the core.
"""

from collections.abc import Iterator, Sequence
from math import inf
from random import Random
from statistics import mean
from typing import NamedTuple

from admission.order import DEBT_RAMP_S, DEBT_TOLERANCE_S
from admission.share import BURST_S, DEBT_LIMIT_BURSTS
from labs.benchmarks.mixes import DEFAULT_CLASS, TARGETS, default_policy
from labs.benchmarks.overload_loads import DEVICE, ENGINE, MAX_TOKENS
from labs.benchmarks.report import Report, Spread, quantile, scenario_parser
from labs.benchmarks.strategies import STRATEGIST, Leavers, LeavingLoop
from labs.simulation.arrival import Arrival
from labs.simulation.policy import SimulatedPolicy, parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder

LOAD = 1.5
FIRST_SECONDS, SETTLED_SECONDS, END_SECONDS = 90.0, 120.0, 240.0
MOST_GAIN = 1.05
DATED_BOUND_S = DEBT_TOLERANCE_S + DEBT_RAMP_S  # engine seconds beyond its share, once, if all have deadlines
UNDATED_BOUND_S = (1 + DEBT_LIMIT_BURSTS) * BURST_S  # the same without
LENGTHS = ((600, 120), (600, 120), (6000, 80), (60, 12), (3000, 600), (50, 900), (660, 1), (12_000, 20))
CLASSES = ((1,), (1,), (0,), (2,), (0, 1), (1, 2), (0, 1, 2), (0, 2), (1, 1, 1, 1, 1, 1, 1, 1, 1, 2))
DEADLINES: tuple[tuple[float | None, ...], ...] = (
    (None,),
    (None,),
    (2.0,),
    (0.7,),
    (8.0,),
    (9.9,),
    (29.0,),
    (None, 2.0),
)
ENOUGH, SOME = (1.0, 1.5, 4.0), (0.02, 0.3, 1.0)  # of the requests for an honest tenant's device time
LEAVING_TOKENS = (1.0, 10.0, 100.0)


class Stream(NamedTuple):
    """Requests of one kind; lengths in mean tokens."""

    prompt: int = 600
    output: int = 120
    times: float = 1.0  # of the requests for an honest tenant's device time
    classes: tuple[int, ...] = (DEFAULT_CLASS,)
    deadlines: tuple[float | None, ...] = (2.0,)
    done_within: float | None = None
    answers: int = 1
    declared: int = MAX_TOKENS
    patience: float = inf
    sends_of_40_s: float = 40.0

    @classmethod
    def drawn(cls, random: Random, times: Sequence[float]) -> "Stream":
        prompt, output = random.choice(LENGTHS)
        return cls(
            prompt,
            output,
            random.choice(times),
            random.choice(CLASSES),
            random.choice(DEADLINES),
            random.choice((None, None, None, None, None, 10.0, 60.0)),
            random.choice((1, 1, 1, 1, 4, 16)),
            random.choice((MAX_TOKENS, MAX_TOKENS, 100_000)),
            random.choice((inf, inf, inf, inf, inf, inf, 0.2, 3.0)),
            random.choice((40.0, 40.0, 10.0)),
        )

    def arrivals(self, tenant: str, share: float, random: Random) -> Iterator[Arrival]:
        rates, time = DEVICE.rates, 0.0
        cost = self.prompt * rates.prefill * 1.05 + self.answers * self.output * rates.decode * 1.4  # with fixed parts
        while (time := time + random.expovariate(share * self.times / cost)) < END_SECONDS:
            prompt, output = (
                max(1, round(tokens * random.lognormvariate(-0.1, 0.45))) for tokens in (self.prompt, self.output)
            )
            if time % 40.0 < self.sends_of_40_s:
                answer = prompt, output, self.declared
                yield Arrival(
                    time,
                    prompt,
                    output,
                    tenant=tenant,
                    max_tokens=self.declared,
                    priority_class=random.choice(self.classes),
                    deadline=random.choice(self.deadlines),
                    done_within=self.done_within,
                    patience=self.patience,
                    more_prompts=(answer,) * (self.answers - 1),
                    num_answers=self.answers,
                )

    def __str__(self) -> str:
        usual = Stream()
        said = [f"{name} {value}" for name, value in self._asdict().items() if value != getattr(usual, name)]
        return ", ".join(said) or "as the honest"


class Strategy(NamedTuple):
    """A drawn strategy, and the honest tenants beside it."""

    number: int
    streams: tuple[Stream, ...]
    leaves_after: float  # tokens of each answer
    honest: Stream
    count: int

    @classmethod
    def drawn(cls, number: int) -> "Strategy":
        random = Random(number)
        honest = Stream(deadlines=random.choice(((2.0,), (2.0,), (None,), (None, 2.0))))
        times = (ENOUGH, *[SOME] * random.choice((0, 0, 1, 2)))
        streams = tuple(Stream.drawn(random, one) for one in times)
        leaves_after = random.choice(LEAVING_TOKENS) if random.random() < 0.2 else inf
        return cls(number, streams, leaves_after, honest, random.choice((3, 3, 9)))

    def gains(self) -> tuple[float, float]:
        """The strategist's device time over an honest tenant's: in the first seconds, and once it is settled."""
        parsed = parse_simulated_policy(f"order=fair,{ENGINE}", DEVICE)
        policy = SimulatedPolicy("fair", parsed.core, parsed.engine, default_policy(), TARGETS)
        core, recorder = policy.make_core(), Recorder(DEVICE, Objective(), {})
        loop = LeavingLoop(core, DEVICE, recorder, policy.engine.max_model_len, target=policy.target)
        core.observers.append(Leavers(loop, {STRATEGIST: self.leaves_after}))
        share, random = LOAD / (self.count + 1), Random(self.number + 10**6)
        asked = [arrival for stream in self.streams for arrival in stream.arrivals(STRATEGIST, share, random)]
        others = [f"honest-{number}" for number in range(self.count)]
        asked += [arrival for name in others for arrival in self.honest.arrivals(name, share, random)]
        loop.expect(sorted(asked, key=lambda arrival: arrival.time))
        used = list[dict[str, float]]()
        for until in (FIRST_SECONDS, SETTLED_SECONDS, END_SECONDS):
            loop.advance(until)
            used.append({name: tenant.seconds for name, tenant in recorder.tenants.items()})
        settled = {name: used[2][name] - used[1].get(name, 0.0) for name in used[2]}
        first, later = (one.get(STRATEGIST, 0.0) / mean([one[name] for name in others]) for one in (used[0], settled))
        return first, later

    @property
    def most_at_first(self) -> float:
        """What the bounds of docs/fairness.md allow in the first seconds."""
        is_dated = all(None not in stream.deadlines for stream in (self.honest, *self.streams))
        return 1.0 + (DATED_BOUND_S if is_dated else UNDATED_BOUND_S) * (self.count + 1) / FIRST_SECONDS

    def row(self, gains: tuple[float, float]) -> dict[str, object]:
        deadlines = " / ".join("none" if by is None else f"{by:g} s" for by in self.honest.deadlines)
        streams = "; ".join(map(str, self.streams))
        leaves = f"; leaves after {self.leaves_after:g} tokens" if self.leaves_after < inf else ""
        return {
            "strategy": self.number,
            "first 90 s": gains[0],
            "later": gains[1],
            "beside": f"{self.count} with {deadlines}",
            "streams": streams + leaves,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=60)
    parser.add_argument("--first", type=int, default=1, help="number of the first strategy")
    options = parser.parse_args(arguments)
    numbers = range(options.first, options.first + (1 if options.quick else options.runs))
    report = Report("random_strategies", options.quick)
    found = [(strategy, strategy.gains()) for strategy in map(Strategy.drawn, numbers)]
    first, later = (sorted(gains[n] for _, gains in found) for n in (0, 1))
    quantiles = {f"{share:.0%}": quantile(later, share) for share in (0.5, 0.9, 0.95)}
    report.add_table(
        "gains", [{"strategies": len(found), "first": Spread.of(first), "later": Spread.of(later), **quantiles}]
    )
    worst = sorted(found, key=lambda one: one[1][1], reverse=True)[:10]
    report.add_table(
        "the best strategies, by their gain from the second minute on", [s.row(gains) for s, gains in worst]
    )
    at_first = max(found, key=lambda one: one[1][0] / one[0].most_at_first)
    report.add_table("the best strategy in the first 90 s, by what the bound allows", [at_first[0].row(at_first[1])])
    report.at_most("gain of the best strategy from the second minute on", later[-1], MOST_GAIN)
    report.at_most("gain in the first 90 s over the bound's", at_first[1][0] / at_first[0].most_at_first, 1.0)
    return report.finish(options.results)


if __name__ == "__main__":
    raise SystemExit(main())
