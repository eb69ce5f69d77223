"""A tenant that declares otherwise than what it wants gains nothing by it, neither time nor a share of the engine."""

from collections.abc import Callable, Iterator
from functools import cache
from math import exp
from random import Random
from statistics import mean
from typing import NamedTuple

import pytest

from labs.simulation.arrival import Arrival, Turn
from labs.simulation.contents import Content
from labs.simulation.device import DEVICES
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective
from labs.simulation.study import SimulatedRun

DEVICE = DEVICES["llama3-8b-a100"]
POLICY = "order=fair,overload=unbounded,max_num_batched_tokens=512,prefill_chunk=512,max_num_seqs=32"
TENANTS = ("declares", "b", "c", "d")
DECLARED, KINDS, PIECE = 1024, 20, 16
RATE = 40.0  # requests a second: about twice what the device can do
SEEDS = (401, 402, 403)
MOST = 0.02  # that a strategy may gain

Declares = Callable[[Arrival], Arrival]


class Got(NamedTuple):
    """What the tenant had of a run."""

    completion: float  # mean seconds from a wish to its last token, of all of its wishes
    engine: float  # share of the engine's time, while all had work waiting


def honestly(arrival: Arrival) -> Arrival:
    return arrival


def much(arrival: Arrival) -> Arrival:
    return arrival._replace(max_tokens=100_000)


def in_pieces(arrival: Arrival) -> Arrival:
    """Declare next to nothing, and ask for the rest of the answer as soon as there is some of it."""
    first, *more = (min(PIECE, arrival.output_tokens - done) for done in range(0, arrival.output_tokens, PIECE))
    turns = tuple(Turn(0.0, 0, tokens) for tokens in more)
    return arrival._replace(output_tokens=first, max_tokens=PIECE, turns=turns)


def arrivals(declares: Declares, seed: int, seconds: float) -> Iterator[Arrival]:
    """Yield the same wishes for every declaration, of kinds that correlate with the lengths of answers."""
    random, time, number = Random(seed), 0.0, 0
    while (time := time + random.expovariate(RATE)) < seconds:
        kind, tenant, number = random.randrange(KINDS), random.choice(TENANTS), number + 1
        prompt = [50 + kind, 100 + kind, *(random.randrange(30_000) for _ in range(round(exp(random.uniform(3, 6)))))]
        output = max(1, round(exp(3.0 + 2.5 * kind / KINDS + random.gauss(0.0, 0.5))))
        content = Content.of_session(number)
        asked = Arrival(time, len(prompt), output, number, tenant, max_tokens=DECLARED, content=content)
        if tenant == TENANTS[0]:
            asked = declares(asked)
        yield asked


@cache
def got(declares: Declares, seed: int, seconds: float) -> Got:
    wishes = list(arrivals(declares, seed, seconds))
    run = SimulatedRun(parse_simulated_policy(POLICY, DEVICE), wishes, DEVICE, Objective())
    run.loop.advance(seconds)
    shares = {name: tenant.seconds for name, tenant in run.recorder.tenants.items()}
    while not run.loop.is_over:
        run.loop.advance(run.loop.next_at + 10.0)
    ended = zip(run.recorder.outcomes, run.recorder.durations, strict=True)
    completions = [
        arrival.time + duration - (arrival.time if arrival.began is None else arrival.began)
        for (arrival, _), duration in ended
        if arrival.tenant == TENANTS[0] and not arrival.turns
    ]
    return Got(mean(completions), shares[TENANTS[0]] / sum(shares.values()))


@pytest.mark.parametrize(
    "seconds", [10.0, *(pytest.param(seconds, marks=pytest.mark.nightly) for seconds in (20.0, 40.0))]
)
@pytest.mark.parametrize("declares", [much, in_pieces])
def test_declaring_otherwise_than_honestly_gains_nothing(declares: Declares, seconds: float) -> None:
    honest = [got(honestly, seed, seconds) for seed in SEEDS]
    other = [got(declares, seed, seconds) for seed in SEEDS]
    sooner = 1 - mean(one.completion / before.completion for one, before in zip(other, honest, strict=True))
    more = mean(one.engine / before.engine for one, before in zip(other, honest, strict=True)) - 1
    assert sooner < MOST and more < MOST, f"sooner by {sooner:.1%}, of the engine {more:.1%} more"
