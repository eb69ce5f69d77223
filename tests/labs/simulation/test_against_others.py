"""Figures agree with queueing theory, and with a simulator written apart from this one, where the terms are equal."""

from collections import deque
from itertools import pairwise
from random import Random
from statistics import mean

import pytest

from admission.step_times.step_time import StepWork
from backend.scheduler.sequence import Sequence
from labs.simulation.arrival import Arrival
from labs.simulation.device import DEVICES, Device, Piece
from labs.simulation.loop import Loop
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import Objective, Recorder, TrackedRequest

PLAIN = (
    "order=fcfs,overload=unbounded,memory=optimistic,prefix_cache=off,calibration=off,steps_in_flight=1,"
    "max_model_len=4096,prefill_chunk=off"
)
BUDGET = 4096
PUBLISHED = DEVICES["llama3-8b-a100"]


class Times(Recorder):
    """Keeps when each request has its first token and its last, by its session."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, Objective(), {})
        self.of: dict[int, tuple[float, float]] = {}

    def _done(self, sequence: Sequence, request: TrackedRequest, now: float) -> None:
        super()._done(sequence, request, now)
        self.of[request.arrival.session] = request.first_token, now


def simulated(arrivals: list[Arrival], device: Device, settings: str) -> dict[int, tuple[float, float]]:
    policy = parse_simulated_policy(f"{PLAIN},max_num_batched_tokens={BUDGET},{settings}", device)
    recorder = Times(device)
    Loop(policy.make_core(), device, recorder, policy.engine.max_model_len).run(arrivals)
    return recorder.of


def poisson(rate: float, count: int, most_prompt: int, most_output: int) -> list[Arrival]:
    random, now, arrivals = Random(3), 0.0, []
    for number in range(count):
        now += random.expovariate(rate)
        prompt, output = random.randint(1, most_prompt), random.randint(1, most_output)
        arrivals.append(Arrival(now, prompt, output, session=number, max_tokens=output))
    return arrivals


@pytest.mark.nightly
def test_one_server_with_equal_service_waits_as_pollaczek_and_khinchine_say() -> None:
    """M/D/1: each wait by Lindley's recursion (1952), and their mean by load x service / 2(1 - load)."""
    service, load = 0.1, 0.7
    device = Device("constant", lambda _: service, Piece(0, 1e-6, 1e-6, 0, 0), 100_000)
    arrivals = poisson(load / service, 6000, 1, 1)
    waits = [0.0]
    for one, following in pairwise(arrivals):
        waits.append(max(0.0, waits[-1] + service - (following.time - one.time)))
    times = simulated(arrivals, device, "max_num_seqs=1")
    found = [times[arrival.session][1] - arrival.time - service for arrival in arrivals]
    assert found == pytest.approx(waits, abs=1e-9)
    assert mean(found) == pytest.approx(load * service / (2 * (1 - load)), rel=0.1)


def batched(arrivals: list[Arrival], device: Device, most: int, budget: int) -> dict[int, tuple[float, float]]:
    """Continuous batching, first come, first served: every step computes a token of each that runs and, while there is
    room, whole prompts of those that wait.
    """
    coming, waiting, running = deque(arrivals), deque[Arrival](), list[tuple[Arrival, int]]()
    first, last, now = dict[int, float](), dict[int, float](), 0.0
    while coming or waiting or running:
        if not (waiting or running):
            now = max(now, coming[0].time)
        while coming and coming[0].time <= now:
            waiting.append(coming.popleft())
        prompts = list[Arrival]()
        while waiting and len(running) + len(prompts) < most:
            if len(running) + sum(one.prompt_tokens for one in prompts) + waiting[0].prompt_tokens > budget:
                break
            prompts.append(waiting.popleft())
        tokens = [one.prompt_tokens for one in prompts]
        context = sum(one.prompt_tokens + generated for one, generated in running)
        pairs = sum(count * (count + 1) // 2 for count in tokens)
        now += device.seconds(StepWork(sum(tokens), len(running), context, 0, pairs))
        first |= {one.session: now for one in prompts}
        running = [(one, generated + 1) for one, generated in running] + [(one, 1) for one in prompts]
        last |= {one.session: now for one, generated in running if generated == one.output_tokens}
        running = [(one, generated) for one, generated in running if generated < one.output_tokens]
    return {session: (first[session], last[session]) for session in last}


@pytest.mark.parametrize(("rate", "most"), [(2.0, 32), (6.0, 8), (6.0, 64)])
def test_continuous_batching_takes_as_long_as_in_a_simulator_of_its_own(rate: float, most: int) -> None:
    arrivals = poisson(rate, 250, 800, 120)
    here = simulated(arrivals, PUBLISHED, f"max_num_seqs={most}")
    there = batched(arrivals, PUBLISHED, most, BUDGET)
    assert here.keys() == there.keys() and len(here) == len(arrivals)
    for session, times in there.items():
        assert here[session] == pytest.approx(times, abs=1e-9)
