"""Random strategies of one tenant beside honest ones: python -m labs.benchmarks.random_strategies [--first 1]

Each strategy is drawn from its number: one to three streams of requests at once, each with lengths, classes (one,
several in turn, or another one now and then to age a class or to keep it asked for), deadlines for first and last
tokens, several answers, false declarations, pauses, and clients that hang up after some tokens or without one. Beside
them three or nine honest tenants send plain requests in the gateway's default class, with deadlines, without, or both.
Weights are equal, the policy is the gateway's default, all ask for 1.5 times what Llama-3-8B on an A100 (simulated)
completes, and each honest tenant for more than its share.

A strategy gains what its tenant has of the device's time over the honest mean, by true costs: in the first 90 s, and
from the second minute on. The bound on debts and savings limits both: a tenant that comes into an interval with all
that it may save, and leaves it with the most debt, has that much beyond its share, once. What it has from the second
minute on beyond what it was served less until then is its lasting gain (`Gains`). Several keys are one tenant to the
core.
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
from labs.benchmarks.strategies import STRATEGIST, Gains, Leavers, LeavingLoop
from labs.simulation.arrival import Arrival
from labs.simulation.policy import SimulatedPolicy, parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder

LOAD = 1.5
FIRST_SECONDS, SETTLED_SECONDS, END_SECONDS = 90.0, 120.0, 240.0
MOST_GAIN = 1.05
DATED_BOUND_S = DEBT_TOLERANCE_S + DEBT_RAMP_S  # engine seconds beyond its share, once, if all have deadlines
UNDATED_BOUND_S = (1 + DEBT_LIMIT_BURSTS) * BURST_S  # the same without, and with what it had saved before
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
    num_honest: int

    @classmethod
    def drawn(cls, number: int) -> "Strategy":
        random = Random(number)
        honest = Stream(deadlines=random.choice(((2.0,), (2.0,), (None,), (None, 2.0))))
        times = (ENOUGH, *[SOME] * random.choice((0, 0, 1, 2)))
        streams = tuple(Stream.drawn(random, one) for one in times)
        leaves_after = random.choice(LEAVING_TOKENS) if random.random() < 0.2 else inf
        return cls(number, streams, leaves_after, honest, random.choice((3, 3, 9)))

    def gains(self) -> Gains:
        parsed = parse_simulated_policy(f"order=fair,{ENGINE}", DEVICE)
        policy = SimulatedPolicy("fair", parsed.core, parsed.engine, default_policy(), TARGETS)
        core, recorder = policy.make_core(), Recorder(DEVICE, Objective(), {})
        loop = LeavingLoop(core, DEVICE, recorder, policy.engine.max_model_len, target=policy.target)
        core.observers.append(Leavers(loop, {STRATEGIST: self.leaves_after}))
        share, random = LOAD / (self.num_honest + 1), Random(self.number + 10**6)
        asked = [arrival for stream in self.streams for arrival in stream.arrivals(STRATEGIST, share, random)]
        others = [f"honest-{number}" for number in range(self.num_honest)]
        asked += [arrival for name in others for arrival in self.honest.arrivals(name, share, random)]
        loop.expect(sorted(asked, key=lambda arrival: arrival.time))
        own, honest = list[float](), list[float]()
        for until in (FIRST_SECONDS, SETTLED_SECONDS, END_SECONDS):
            loop.advance(until)
            used = {name: tenant.seconds for name, tenant in recorder.tenants.items()}
            own.append(used.get(STRATEGIST, 0.0))
            honest.append(mean([used[name] for name in others]))
        return Gains.of(own, honest)

    def _most(self, seconds: float, saved: float) -> float:
        """What the bounds of docs/fairness.md allow in an interval, before which it had `saved` seconds at most."""
        is_dated = all(None not in stream.deadlines for stream in (self.honest, *self.streams))
        once = saved + DATED_BOUND_S if is_dated else UNDATED_BOUND_S
        return 1.0 + once * (self.num_honest + 1) / seconds

    def of_bound(self, gains: Gains) -> float:
        """The larger of both intervals' gains over what the bounds allow in it."""
        later = gains.later / self._most(END_SECONDS - SETTLED_SECONDS, saved=BURST_S)
        return max(gains.first / self._most(FIRST_SECONDS, saved=0.0), later)

    def row(self, gains: Gains) -> dict[str, object]:
        deadlines = " / ".join("none" if by is None else f"{by:g} s" for by in self.honest.deadlines)
        streams = "; ".join(map(str, self.streams))
        leaves = f"; leaves after {self.leaves_after:g} tokens" if self.leaves_after < inf else ""
        return {
            "strategy": self.number,
            "first 90 s": gains.first,
            "later": gains.later,
            "lasting": gains.lasting,
            "beside": f"{self.num_honest} with {deadlines}",
            "streams": streams + leaves,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=60)
    parser.add_argument("--first", type=int, default=1, help="number of the first strategy")
    options = parser.parse_args(arguments)
    numbers = range(options.first, options.first + (1 if options.quick else options.runs))
    report = Report("random_strategies", options.quick)
    found = [(strategy, strategy.gains()) for strategy in map(Strategy.drawn, numbers)]
    show(report, found)
    return report.finish(options.results)


def show(report: Report, found: Sequence[tuple[Strategy, Gains]]) -> None:
    lasting = sorted(gains.lasting for _, gains in found)
    quantiles = {f"{share:.0%}": quantile(lasting, share) for share in (0.5, 0.9, 0.95)}
    spreads = {name: Spread.of([getattr(gains, name) for _, gains in found]) for name in Gains._fields}
    report.add_table("gains", [{"strategies": len(found), **spreads, **quantiles}])
    for name in ("lasting", "later"):
        worst = sorted(found, key=lambda one: getattr(one[1], name), reverse=True)[:10]
        report.add_table(f"the best strategies, by their {name} gain", [s.row(gains) for s, gains in worst])
    nearest, gains = max(found, key=lambda one: one[0].of_bound(one[1]))
    report.add_table("the strategy nearest to what the bound allows", [nearest.row(gains)])
    report.at_most("gain of the best strategy from the second minute on", max(g.later for _, g in found), MOST_GAIN)
    report.at_most("lasting gain of the best strategy, from the second minute on", lasting[-1], MOST_GAIN)
    report.at_most("gain at first or later, over the bound's", nearest.of_bound(gains), 1.0)


if __name__ == "__main__":
    raise SystemExit(main())
