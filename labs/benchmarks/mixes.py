"""Random worlds: the fair order beside plain ones with the same admission: `python -m labs.benchmarks.mixes [--first
1]`.

Each world is drawn from its number: tenants with weights, kinds of lengths, deadlines, pauses and bursts, 8 to 256
slots, ample or scarce memory, 0.4 to 2 times what Llama-3-8B on an A100 (simulated) completes with them. Classes are
those of the gateway's default policy, with its targets and queues: a tenant uses the default class, another, or several
in turn. Some ask for several answers, for their last token by a time, hang up in the midst of their answers, or leave
without a first token. Beside `fair` there are first come first served, earliest deadline first and shortest first, by
the same admission control, unless the fair order alone has `LEAST_OF_BEST` of all that is counted.

Counted are the good requests of tenants within their share: tenants that ask for no more than their weight's part of
the machine and read their answers to the end. A request is good if each of its answers begins within its deadline, or
its class's target where it states none, and brings a token every `PER_TOKEN_SECONDS`. Nothing may wait while the device
is idle, and each request has to end.

A world below `LEAST_OF_BEST` is run again, to name a reason: with other arrivals of the same tenants (`chance`, if it
is not below by their mean), and with `AMPLE` slots and memory (`scarce`, if it is not below then: shortest first lets
short requests pass one that waits for memory). A tenant that asks for `NEARLY` its share of a full machine is `near its
share`. Otherwise the `order` is the reason.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from random import Random
from statistics import mean
from typing import NamedTuple

from admission.observer import CoreObserver
from admission.scheduling_policy import SchedulingPolicy
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence as Running
from gateway.tenants.live_policy import scheduling_policy
from labs.benchmarks.overload_loads import DEVICE, MAX_TOKENS, SHORT_PROMPTS, Traffic, drawn_trace
from labs.benchmarks.overload_runs import PER_TOKEN_SECONDS
from labs.benchmarks.report import Report, Spread, scenario_parser
from labs.benchmarks.strategies import Leavers, LeavingLoop
from labs.simulation.arrival import Arrival, ClassTarget
from labs.simulation.loop import Loop
from labs.simulation.policy import SimulatedPolicy, parse_simulated_policy
from labs.simulation.recorder import AttemptOutcome, Recorder
from quotas.policy.policy import CLASSES, DEFAULT_POLICY, DEFAULTS

FAIR, PLAIN = "fair", ("fcfs", "earliest_deadline", "shortest_first")
RUN_SECONDS = 40.0
LEAST_OF_BEST = 0.9  # of the good requests of the best plain order, by tenants within their share
MOST = 0.9  # of requests, after which those still running no longer fill the machine
FEWEST_REQUESTS = 20  # of tenants within their share, for a world to be judged
OTHER_DRAWS = range(1, 5)  # of the arrivals of a world below `LEAST_OF_BEST`
AMPLE = 256, 400_000  # slots, and tokens of memory
NEARLY = 0.9  # of a tenant's share
UNTARGETED_SECONDS = 30.0  # in which a first token is wanted in a class without a target
ANSWERS = (1, 5, 20, 60, 120, 250, 400, 500, 600, 700, 750, 800, 850, 900, 950, 1000, 1024)
DOCUMENTS = (300, 900, 1400, 2000, 2600, 3200, 3600, 4000, 4600, 5400, 6000, 6600, 7200, 7600, 7900, 8100, 8192)
DEADLINES: tuple[tuple[float | None, ...], ...] = ((2.0,), (None,), (8.0,), (None, 2.0), (0.7, 2.0, 8.0), (30.0, None))
DEFAULT_CLASS = next(one.level for one in CLASSES if one.name == DEFAULTS.default_class)
IN_CLASSES = ((DEFAULT_CLASS,), (DEFAULT_CLASS,), (DEFAULT_CLASS,), (0,), (2,), (0, 1), (1, 2), (0, 1, 2))
TARGETS = tuple(ClassTarget(one.ttft) for one in CLASSES)
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
    classes: tuple[int, ...]
    period: tuple[float, float]  # seconds, of which the second is the part in which it sends, at a higher rate
    answers: int  # to each prompt
    done_within: float | None  # seconds to its last token
    patience: float  # it leaves without a token after these seconds
    leaves_after: float  # tokens of an answer

    @classmethod
    def drawn(cls, tenant: str, load: float, random: Random) -> "Asking":
        return cls(
            tenant,
            random.choice((1.0, 1.0, 1.0, 2.0, 4.0)),
            load,
            random.choice(list(KINDS)),
            random.choice(DEADLINES),
            random.choice(IN_CLASSES),
            (random.uniform(10, 40), random.uniform(2, 10)) if random.random() < 0.25 else (1.0, 1.0),
            random.choice((2, 4, 8)) if random.random() < 0.15 else 1,
            random.uniform(10, 40) if random.random() < 0.1 else None,
            random.uniform(0.5, 10) if random.random() < 0.15 else inf,
            random.choice((1.0, 20.0, 100.0)) if random.random() < 0.1 else inf,
        )

    def requests(self, random: Random, seconds: float) -> list[Arrival]:
        traffic, made, time = KINDS[self.kind], list[Arrival](), 0.0
        period, sending = self.period
        rate = self.load * traffic.capacity * period / sending / self.answers
        while (time := time + random.expovariate(rate)) < seconds:
            if time % period >= sending:
                continue
            drawn = random.choice(traffic.trace)
            answer = drawn.prompt_tokens, drawn.output_tokens, traffic.max_tokens
            made.append(
                drawn._replace(
                    time=time,
                    tenant=self.tenant,
                    max_tokens=traffic.max_tokens,
                    priority_class=random.choice(self.classes),
                    deadline=random.choice(self.deadlines),
                    done_within=self.done_within,
                    patience=self.patience,
                    more_prompts=(answer,) * (self.answers - 1),
                    num_answers=self.answers,
                )
            )
        return made


class World(NamedTuple):
    """The tenants and the machine of a world."""

    number: int
    tenants: list[Asking]
    engine: str
    seconds: float
    pace: float = 1.0  # seconds that its slots and its memory make of each second between requests
    draw: int = 0  # of its arrivals

    @classmethod
    def drawn(cls, number: int, seconds: float, *, is_ample: bool = False) -> "World":
        random = Random(number)
        names = [f"t{n}" for n in range(random.choice((2, 3, 4, 6, 10, 20)))]
        shares = [random.paretovariate(random.choice((1.1, 3.0))) for _ in names]
        load = random.uniform(0.4, 2.0)
        tenants = [
            Asking.drawn(name, load * share / sum(shares), random) for name, share in zip(names, shares, strict=True)
        ]
        slots, memory = random.choice((8, 64, 192, 256)), random.choice((400_000, 400_000, 60_000, 30_000))
        slots, memory = AMPLE if is_ample else (slots, memory)
        engine = f"max_num_batched_tokens=512,prefill_chunk=512,max_num_seqs={slots},kv_tokens={memory}"
        world = cls(number, tenants, engine, seconds)
        return world._replace(pace=max(1.0, world._busy_seconds() / (load * seconds)))

    def _busy_seconds(self) -> float:
        """The seconds that the machine takes for all requests at once, by when most of them are done."""
        at_once = [a._replace(time=0.0, deadline=None, done_within=None, patience=inf) for a in self.arrivals()]
        Random(self.number).shuffle(at_once)
        policy = parse_simulated_policy(f"order=fcfs,overload=unbounded,{self.engine}", DEVICE)
        recorder = WorldRecorder()
        Loop(policy.make_core(), DEVICE, recorder, policy.engine.max_model_len).run(at_once)
        done = sorted(recorder.durations)
        return done[int(MOST * len(done))] / MOST if done else 0.0

    def within_share(self) -> set[str]:
        """The tenants that ask for at most their weight's part of the machine, and read their answers."""
        return {one.tenant for one in self.tenants if self.share_asked(one) <= 1.0 and one.leaves_after == inf}

    def share_asked(self, one: Asking) -> float:
        """What a tenant asks for, in parts of its share of the machine."""
        return one.load * sum(each.weight for each in self.tenants) / one.weight

    def arrivals(self) -> list[Arrival]:
        random = Random(self.number + 10**6 * (1 + self.draw))
        made = [arrival for one in self.tenants for arrival in one.requests(random, self.seconds)]
        paced = sorted([a._replace(time=self.pace * a.time) for a in made], key=lambda arrival: arrival.time)
        return [a._replace(session=n) for n, a in enumerate(paced) if a.time < self.seconds]

    def policy(self, order: str) -> SimulatedPolicy:
        parsed = parse_simulated_policy(f"order={order},{self.engine}", DEVICE)
        weights = {one.tenant: one.weight for one in self.tenants}
        return SimulatedPolicy(order, parsed.core, parsed.engine, replace(default_policy(), weights=weights), TARGETS)


@cache
def default_policy() -> SchedulingPolicy:
    return scheduling_policy(DEFAULT_POLICY)


class WorldRecorder(Recorder):
    """Judges each request by its deadline, or its class's target without one."""

    def __init__(self) -> None:
        super().__init__(DEVICE, None, {})

    def _is_good(self, sequence: Running, arrival: Arrival, first: float, per_token: float, now: float) -> bool:
        wanted = arrival.deadline or sequence.request.first_token_target or UNTARGETED_SECONDS
        is_done = arrival.done_within is None or now - arrival.time <= arrival.done_within
        return is_done and first <= wanted and per_token <= PER_TOKEN_SECONDS


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
    open: int  # answers that have not ended
    by_tenant: dict[str, float]  # the good part of its requests


def run(world: World, order: str) -> Outcome:
    policy, arrivals = world.policy(order), world.arrivals()
    core, recorder = policy.make_core(), WorldRecorder()
    loop = LeavingLoop(core, DEVICE, recorder, policy.engine.max_model_len, target=policy.target)
    core.observers += [watch := IdleWatch(core), Leavers(loop, {one.tenant: one.leaves_after for one in world.tenants})]
    loop.run(arrivals)
    ended, good = defaultdict[int, int](int), defaultdict[int, int](int)
    for arrival, outcome in recorder.outcomes:
        ended[arrival.session] += 1
        good[arrival.session] += outcome is AttemptOutcome.GOOD
    of_tenant, within = defaultdict[str, list[bool]](list), world.within_share()
    for arrival in arrivals:
        of_tenant[arrival.tenant].append(good[arrival.session] == len(arrival.prompts))
    every = [one for found in of_tenant.values() for one in found]
    own = [one for tenant, found in of_tenant.items() if tenant in within for one in found]
    return Outcome(
        sum(every) / max(1, len(every)),
        sum(own) / len(own) if len(own) >= FEWEST_REQUESTS else 1.0,
        watch.idle,
        sum(len(arrival.prompts) - ended[arrival.session] for arrival in arrivals),
        {tenant: sum(found) / len(found) for tenant, found in of_tenant.items()},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = scenario_parser(__doc__, runs=300)
    parser.add_argument("--first", type=int, default=1, help="number of the first world")
    options = parser.parse_args(arguments)
    count, seconds = (2, 20.0) if options.quick else (options.runs, RUN_SECONDS)
    report, found = Report("mixes", options.quick), dict[int, dict[str, Outcome]]()
    for number in range(options.first, options.first + count):
        found[number] = compare(World.drawn(number, seconds))
    show(report, found, seconds)
    return report.finish(options.results)


def compare(world: World) -> dict[str, Outcome]:
    """Run the fair order, and the plain ones unless nothing could be much better."""
    fair = run(world, FAIR)
    if fair.good_within >= LEAST_OF_BEST:
        return {FAIR: fair}
    return {FAIR: fair} | {order: run(world, order) for order in PLAIN}


def ratio_of(runs: Sequence[Mapping[str, Outcome]]) -> float:
    """Return the mean good part of tenants within their share over that of the best plain order; 1 without any."""
    best = max([sum(run[order].good_within for run in runs) for order in PLAIN if order in runs[0]], default=0.0)
    return sum(run[FAIR].good_within for run in runs) / best if best else 1.0


def reason(number: int, seconds: float) -> dict[str, object]:
    """Run a world with other arrivals, and with ample slots and memory; return the ratios, and the reason they name."""
    world = World.drawn(number, seconds)
    drawn = [world._replace(draw=draw) for draw in OTHER_DRAWS]
    others = ratio_of([{order: run(one, order) for order in (FAIR, *PLAIN)} for one in drawn])
    ample = ratio_of([compare(World.drawn(number, seconds, is_ample=True))])
    within = [one for one in world.tenants if one.tenant in world.within_share()]
    asked = max(map(world.share_asked, within), default=0.0)
    is_near = asked >= NEARLY and sum(one.load for one in world.tenants) > 1.0
    chance, scarce = others >= LEAST_OF_BEST, ample >= LEAST_OF_BEST
    named = "chance" if chance else "scarce" if scarce else "near its share" if is_near else "order"
    return {"other arrivals": others, "ample": ample, "asked of its share": asked, "reason": named}


def show(report: Report, found: Mapping[int, Mapping[str, Outcome]], seconds: float) -> None:
    """Show and judge the outcomes of each order, by the worlds' numbers."""
    rows, ratios = list[dict[str, object]](), list[float]()
    for number, outcomes in found.items():
        fair = outcomes[FAIR]
        ratios.append(ratio_of([outcomes]))
        if ratios[-1] < LEAST_OF_BEST or fair.idle or fair.open:
            shown = {order: f"{one.good_within:.3f} / {one.good:.3f}" for order, one in outcomes.items()}
            row = {"world": number, "ratio": ratios[-1], **shown, "idle": fair.idle, "open": fair.open}
            is_explained = ratios[-1] < LEAST_OF_BEST and not report.quick
            rows.append(row | (reason(number, seconds) if is_explained else {}))
    compared = [outcomes for outcomes in found.values() if len(outcomes) > 1]
    numbers = {"worlds": len(found), "of which compared": len(compared)}
    report.add_table(
        "fair over the best plain order, 1 where it is not compared", [{**numbers, "ratio": Spread.of(ratios)}]
    )
    if compared:
        goods: dict[str, object] = {o: mean(outcomes[o].good for outcomes in compared) for o in (FAIR, *PLAIN)}
        served: dict[str, object] = {o: mean(outcomes[o].good_within for outcomes in compared) for o in (FAIR, *PLAIN)}
        report.add_table(
            "mean good of the compared worlds", [{"of": "all", **goods}, {"of": "tenants within their share", **served}]
        )
    if rows:
        report.add_table("worlds below: good of tenants within their share / of all", rows)
    below = sum(ratio < LEAST_OF_BEST for ratio in ratios)
    unnamed = sum(row.get("reason") == "order" for row in rows)
    report.at_most(f"worlds in which tenants within their share have under {LEAST_OF_BEST} of the best", below, 0)
    report.at_most("of which neither chance, scarcity nor a tenant's nearness to its share is the reason", unnamed, 0)
    fair_runs = [outcomes[FAIR] for outcomes in found.values()]
    report.at_most("plans of nothing while something waits and nothing runs", sum(one.idle for one in fair_runs), 0)
    report.at_most("answers that have not ended", sum(one.open for one in fair_runs), 0)


if __name__ == "__main__":
    raise SystemExit(main())
