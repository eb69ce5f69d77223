"""A strategic tenant tries to exceed its share, beside three honest ones with the same demand.

All four always have work waiting. Each one's gain is the true cost of its rows (`true_costs`). A strategy gains by how
much more its tenant gets than the honest mean, as a share of it; for a tenant that arrives earlier, beyond an honest
early tenant's advantage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from statistics import mean
from typing import NamedTuple

from admission.observer import CoreObserver
from backend.scheduler.batch import StepOutput
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import FinishReason
from backend.scheduler.sequence import Sequence as Running
from labs.benchmarks.report import Report, Spread
from labs.benchmarks.true_costs import BOOKS, DEVICE, DOCUMENTS, POLICY, Mix, Row
from labs.simulation.arrival import Arrival
from labs.simulation.loop import Loop
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder

HONEST = tuple(f"honest-{number}" for number in range(3))
STRATEGIST = "strategist"
USUAL = Mix("chat", 600, 120)
CLASS = 1  # the default class
ADMITTING = POLICY.replace("overload=unbounded", "overload=deadline")  # as a gateway does by default
ASKED = 0.5  # of the machine by each, so that all of them have work waiting
FIRST_BY = 2.0  # seconds
PRESSING = 4.0  # of the usual requests, if most of them leave or are refused


def _as_it_is(arrival: Arrival) -> Arrival:
    return arrival


@dataclass(frozen=True, slots=True)
class Strategy:
    """The way in which one tenant asks."""

    name: str
    mix: Mix = USUAL
    change: Callable[[Arrival], Arrival] = _as_it_is
    times: float = 1.0  # as many requests as an honest tenant with this mix would send
    leaves_after: float = inf  # tokens
    beside: Mix = USUAL  # of the honest
    first_by: float = 0.0  # seconds, before the others come

    @property
    def honest(self) -> "Strategy":
        """The same place without a strategy."""
        return Strategy("none", self.beside, beside=self.beside, first_by=self.first_by)


def _leaves(seconds: float) -> Callable[[Arrival], Arrival]:
    return lambda arrival: arrival._replace(patience=seconds)


def _declares(tokens: int) -> Callable[[Arrival], Arrival]:
    return lambda arrival: arrival._replace(max_tokens=tokens)


STRATEGIES = (
    Strategy("leaves after 0.2 s", change=_leaves(0.2), times=PRESSING),
    Strategy("leaves after 1 s", change=_leaves(1.0), times=PRESSING),
    Strategy("leaves after its first token", times=PRESSING, leaves_after=1),
    Strategy("leaves after ten tokens", times=PRESSING, leaves_after=10),
    Strategy("long prompts, leaves after 0.2 s", DOCUMENTS, _leaves(0.2), PRESSING, beside=DOCUMENTS),
    Strategy("long prompts, leaves after 2 s", DOCUMENTS, _leaves(2.0), PRESSING, beside=DOCUMENTS),
    Strategy("long prompts, leaves after its first token", DOCUMENTS, times=2.0, leaves_after=1, beside=DOCUMENTS),
    Strategy("ten times as many, of a tenth", Mix("tiny", 60, 12)),
    Strategy("asks for a token at a time", Mix("token", 660, 1), lambda a: a._replace(max_tokens=1, output_tokens=1)),
    Strategy("huge prompts", BOOKS),
    Strategy("long answers to short prompts", Mix("stories", 50, 1200)),
    Strategy("declares what it needs", change=lambda a: a._replace(max_tokens=a.output_tokens)),
    Strategy("declares 100,000 tokens", change=_declares(100_000)),
    Strategy("declares 100,000 tokens, before others come", change=_declares(100_000), first_by=FIRST_BY),
    Strategy("deadlines of 2 s", change=lambda a: a._replace(deadline=2.0), times=PRESSING),
    Strategy("deadlines of 30 s", change=lambda a: a._replace(deadline=30.0), times=2.0),
    Strategy("done within 10 s", change=lambda a: a._replace(done_within=10.0), times=PRESSING),
    Strategy("the most urgent class", change=lambda a: a._replace(priority_class=0)),
    Strategy("tokens every 30 ms", change=lambda a: a._replace(interval=0.03)),
    Strategy("says that it comes again", change=lambda a: a._replace(expects=30.0)),
)


class Gains(NamedTuple):
    """The device time of a strategist over an honest tenant's, in three intervals.

    A tenant that was served less than the honest until the second minute has credit, and catches up with them. Its
    lasting gain leaves that out: (own use - max(own use before, honest use before)) / (honest use - honest use before).
    """

    first: float  # in the first seconds
    later: float  # from the second minute on
    lasting: float

    @classmethod
    def of(cls, own: Sequence[float], honest: Sequence[float]) -> "Gains":
        """`own` and `honest`: the seconds used until the end of the first, at the second minute, and at the end."""
        usual = honest[2] - honest[1]
        return cls(own[0] / honest[0], (own[2] - own[1]) / usual, (own[2] - max(own[1], honest[1])) / usual)


class LeavingLoop(Loop):
    """A `Loop` some of whose clients leave in the midst of their answers."""

    def leave(self, sequence: Running, now: float) -> None:
        """Let a client leave at once, unless its answer has ended."""
        self._at(now, partial(self._left, sequence))

    def _left(self, sequence: Running, now: float) -> None:
        if sequence.finish_reason is None:
            self._core.finish_sequence(sequence, FinishReason.CANCELLED, now)
            self._recorder.abandoned(sequence, now)
            self._ended(sequence)
            self._plan(now)


class Leavers(CoreObserver):
    """Clients who leave once they have some tokens: `tokens`, by tenant."""

    def __init__(self, loop: LeavingLoop, tokens: Mapping[str, float]) -> None:
        self._loop, self._tokens = loop, tokens

    def updated(self, step: ScheduledStep, output: StepOutput, now: float) -> None:
        for sequence in step.sampled:
            if len(sequence.output) >= self._tokens.get(sequence.tenant, inf):
                self._loop.leave(sequence, now)


def show_strategies(report: Report, seeds: Sequence[int], seconds: float) -> None:
    rows: list[Row] = []
    worst = []
    for strategy in STRATEGIES:
        gains = [_gain(strategy, seed, seconds) for seed in seeds]
        if strategy.first_by:
            gains = [one - _gain(strategy.honest, seed, seconds) for one, seed in zip(gains, seeds, strict=True)]
        worst.append((max(gains), strategy.name))
        rows.append({"strategy": strategy.name, "gain": Spread.of(gains)})
    report.add_table(f"one of four equal tenants tries to get more than a quarter of {seconds:g} s", rows)
    most, name = max(worst)
    report.at_most(f"gain of the best strategy ({name}), worst seed", most, 0.02)


def _gain(strategy: Strategy, seed: int, seconds: float) -> float:
    """Returns how much more than the honest the strategist got, as a share of that."""
    found = _true_seconds(strategy, seed, seconds)
    return found[STRATEGIST] / mean(found[name] for name in HONEST) - 1


def _true_seconds(strategy: Strategy, seed: int, seconds: float) -> dict[str, float]:
    """Returns what each tenant cost the device, once all were there."""
    simulated = parse_simulated_policy(ADMITTING, DEVICE)
    core, recorder = simulated.make_core(), Recorder(DEVICE, Objective(), {})
    loop = LeavingLoop(core, DEVICE, recorder, simulated.engine.max_model_len)
    if strategy.leaves_after < inf:
        core.observers.append(Leavers(loop, {STRATEGIST: strategy.leaves_after}))
    loop.expect(_arrivals(strategy, seed, seconds))
    loop.advance(strategy.first_by)
    before = {name: tenant.seconds for name, tenant in recorder.tenants.items()}
    loop.advance(seconds)
    return {name: tenant.seconds - before.get(name, 0.0) for name, tenant in recorder.tenants.items()}


def _arrivals(strategy: Strategy, seed: int, seconds: float) -> list[Arrival]:
    random = Random(seed)
    asked = [one for name in HONEST for one in _of(name, strategy.honest, random, strategy.first_by, seconds)]
    return sorted([*asked, *_of(STRATEGIST, strategy, random, 0.0, seconds)], key=lambda arrival: arrival.time)


def _of(tenant: str, strategy: Strategy, random: Random, start: float, end: float) -> Iterator[Arrival]:
    rate, time = ASKED * strategy.times / strategy.mix.seconds, start
    while (time := time + random.expovariate(rate)) < end:
        arrival = strategy.mix.request(random)._replace(time=time, tenant=tenant, priority_class=CLASS)
        yield strategy.change(arrival)
