"""Random worlds: the fair order beside plain ones with the same admission: `python -m labs.benchmarks.mixes [--first
1]`.

Each world is drawn from its number: tenants with weights, classes, kinds of lengths, deadlines and pauses, 8 to 256
slots, ample or scarce memory, 0.4 to 2.5 times what Llama-3-8B on an A100 (simulated) completes. Beside `fair` there
are first come first served, earliest deadline first and shortest first, by the same admission control.

The good requests (`labs.benchmarks.overload`) of tenants within their share are counted: a tenant is within its share
if it asks for no more than its weight's part of the machine. No request may wait while the device is idle, and each has
to end.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from admission.observer import CoreObserver
from admission.scheduling_policy import SchedulingPolicy
from backend.scheduler.scheduled_step import ScheduledStep
from labs.benchmarks.counterfactual import by_session
from labs.benchmarks.overload_loads import DEVICE, MAX_TOKENS, SHORT_PROMPTS, Traffic, drawn_trace
from labs.benchmarks.overload_runs import FIRST_TOKEN, PER_TOKEN_SECONDS
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.simulation.arrival import Arrival
from labs.simulation.loop import Loop
from labs.simulation.policy import SimulatedPolicy, parse_simulated_policy
from labs.simulation.recorder import AttemptOutcome, Objective, Recorder

PLAIN = ("fcfs", "earliest_deadline", "shortest_first")
RUN_SECONDS = 120.0
LEAST_OF_BEST = 0.9  # of the good requests of the best plain order, by tenants within their share
FEWEST_REQUESTS = 30  # of tenants within their share, for a world to be judged
ANSWERS = (1, 5, 20, 60, 120, 250, 400, 500, 600, 700, 750, 800, 850, 900, 950, 1000, 1024)
DOCUMENTS = (300, 900, 1400, 2000, 2600, 3200, 3600, 4000, 4600, 5400, 6000, 6600, 7200, 7600, 7900, 8100, 8192)
DEADLINES: tuple[tuple[float | None, ...], ...] = ((2.0,), (None,), (8.0,), (None, 2.0), (0.7, 2.0, 8.0), (30.0, None))
KINDS = {
    "conversations": Traffic.conversations(),
    "code": Traffic.code(),
    "documents": Traffic("documents", drawn_trace(prompts=DOCUMENTS, count=4000), MAX_TOKENS),
    "stories": Traffic("stories", drawn_trace(prompts=SHORT_PROMPTS, outputs=ANSWERS, count=4000), MAX_TOKENS),
}


class Asking(NamedTuple):
    """The demand of one tenant."""

    tenant: str
    weight: float
    load: float  # of the machine's capacity
    kind: str
    deadlines: tuple[float | None, ...]
    priority_class: int
    period: tuple[float, float]  # seconds, of which the second is the part in which it sends, at a higher rate


class World(NamedTuple):
    """The tenants and the machine of a world."""

    number: int
    tenants: list[Asking]
    engine: str

    @classmethod
    def drawn(cls, number: int) -> "World":
        random = Random(number)
        names = [f"t{n}" for n in range(random.choice((2, 3, 4, 6, 10, 20)))]
        shares = [random.paretovariate(random.choice((1.1, 3.0))) for _ in names]
        load, has_classes = random.uniform(0.4, 2.5), random.random() < 0.25
        tenants = [
            Asking(
                name,
                random.choice((1.0, 1.0, 1.0, 2.0, 4.0)),
                load * share / sum(shares),
                random.choice(list(KINDS)),
                random.choice(DEADLINES),
                random.randrange(2) if has_classes else 0,
                (random.uniform(10, 40), random.uniform(2, 10)) if random.random() < 0.25 else (1.0, 1.0),
            )
            for name, share in zip(names, shares, strict=True)
        ]
        slots, memory = random.choice((8, 64, 192, 256)), random.choice((400_000, 400_000, 60_000, 30_000))
        engine = f"max_num_batched_tokens=512,prefill_chunk=512,max_num_seqs={slots},kv_tokens={memory}"
        return cls(number, tenants, engine)

    def within_share(self) -> set[str]:
        """The tenants that ask for at most their weight's part of the machine."""
        weight = sum(one.weight for one in self.tenants)
        return {one.tenant for one in self.tenants if one.load <= one.weight / weight}

    def arrivals(self, seconds: float) -> list[Arrival]:
        random, made = Random(self.number + 10**6), list[Arrival]()
        for one in self.tenants:
            traffic = KINDS[one.kind]
            period, sending = one.period
            rate, time = one.load * traffic.capacity * period / sending, 0.0
            while (time := time + random.expovariate(rate)) < seconds:
                arrival, deadline = random.choice(traffic.trace), random.choice(one.deadlines)
                if time % period < sending:
                    asked = {"tenant": one.tenant, "deadline": deadline, "priority_class": one.priority_class}
                    made.append(arrival._replace(time=time, max_tokens=traffic.max_tokens, **asked))
        return [a._replace(session=n) for n, a in enumerate(sorted(made, key=lambda arrival: arrival.time))]

    def policy(self, order: str) -> SimulatedPolicy:
        parsed = parse_simulated_policy(f"order={order},{self.engine}", DEVICE)
        weights = {one.tenant: one.weight for one in self.tenants}
        return SimulatedPolicy(
            order, parsed.core, parsed.engine, SchedulingPolicy(weights=weights, offsets=(0.0, 20.0))
        )


class IdleWatch(CoreObserver):
    """Counts plans of nothing while a request waits, nothing runs, and no limit holds its tenant."""

    def __init__(self, core: object) -> None:
        self._scheduler = core.scheduler  # type: ignore[attr-defined]
        self.idle = 0

    def scheduled(self, step: ScheduledStep | None, now: float) -> None:
        scheduler = self._scheduler
        if step is None and not scheduler.in_flight and not scheduler.running and scheduler.waiting.head() is not None:
            self.idle += 1


class Outcome(NamedTuple):
    """One order in one world."""

    good: float  # of all requests
    good_within: float  # of tenants within their share; 1 if they are too few
    idle: int
    open: int  # requests that have not ended


def run(world: World, order: str, seconds: float) -> Outcome:
    policy, arrivals = world.policy(order), world.arrivals(seconds)
    core, recorder = policy.make_core(), Recorder(DEVICE, Objective(FIRST_TOKEN, PER_TOKEN_SECONDS), {})
    core.observers.append(watch := IdleWatch(core))
    Loop(core, DEVICE, recorder, policy.engine.max_model_len).run(arrivals)
    outcomes = by_session(recorder.outcomes)
    within, good = world.within_share(), {s for s, outcome in outcomes.items() if outcome is AttemptOutcome.GOOD}
    own = [arrival.session in good for arrival in arrivals if arrival.tenant in within]
    left = len(arrivals) - len(outcomes)
    return Outcome(
        sum(a.session in good for a in arrivals) / max(1, len(arrivals)),
        sum(own) / len(own) if len(own) >= FEWEST_REQUESTS else 1.0,
        watch.idle,
        left,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=300)
    parser.add_argument("--first", type=int, default=1, help="number of the first world")
    options = parser.parse_args(arguments)
    count, seconds = (2, 20.0) if options.quick else (options.runs, RUN_SECONDS)
    report, rows = Report("mixes", options.quick), list[dict[str, object]]()
    ratios, idle, left, below = list[float](), 0, 0, 0
    for number in range(options.first, options.first + count):
        world = World.drawn(number)
        outcomes = {order: run(world, order, seconds) for order in ("fair", *PLAIN)}
        fair, best = outcomes["fair"], max(outcomes[order].good_within for order in PLAIN)
        ratio = fair.good_within / best if best else 1.0
        ratios.append(ratio)
        idle, left, below = idle + fair.idle, left + fair.open, below + (ratio < LEAST_OF_BEST)
        if ratio < LEAST_OF_BEST or fair.idle or fair.open:
            shown = {order: f"{one.good_within:.3f} / {one.good:.3f}" for order, one in outcomes.items()}
            rows.append({"world": number, **shown, "idle": fair.idle, "open": fair.open})
    ratios.sort()
    report.add_table("fair over the best plain order", [{"worlds": count, "ratio": Spread.of(ratios)}])
    if rows:
        report.add_table("worlds below: good of tenants within their share / of all", rows)
    report.at_most(f"worlds in which tenants within their share have under {LEAST_OF_BEST} of the best", below, 0)
    report.at_most("plans of nothing while something waits and nothing runs", idle, 0)
    report.at_most("requests that have not ended", left, 0)
    return report.finish(options.results)


if __name__ == "__main__":
    raise SystemExit(main())
