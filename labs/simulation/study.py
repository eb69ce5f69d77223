"""Compares policies on one workload over several seeds."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf

from admission.core import Overload
from labs.process_pool import process_pool
from labs.simulation.arrival import Arrival
from labs.simulation.device import Device
from labs.simulation.loop import Loop
from labs.simulation.policy import SimulatedPolicy
from labs.simulation.recorder import OUTPUT_TOKEN_WEIGHT, PROMPT_TOKEN_WEIGHT, Objective, Recorder
from labs.simulation.speculation import SpeculatingLoop
from labs.simulation.statistics import MAX_GAP_TENANTS
from labs.simulation.summary import FREE, Summary, summarise
from labs.simulation.workload import Workload

CAPACITY_REQUESTS = 2000

PROGRESS_INTERVAL_SECONDS = 1.0  # of simulated time, between two reports of progress

Task = tuple[SimulatedPolicy, int]  # and the seed
Progress = Callable[[int], object]  # called with the number of newly ended requests


@dataclass(frozen=True, slots=True)
class Study:
    """The plan of a comparison. Every policy gets the same arrivals."""

    policies: tuple[SimulatedPolicy, ...]
    workload: Workload
    device: Device
    objective: Objective | None  # None: each policy's own targets, if all have some
    seeds: int = 1
    jobs: int = 1  # processes

    @property
    def judged_by(self) -> Objective | None:
        """The objective that decides which requests are good; None if each policy states its own targets."""
        if self.objective is None and not all(policy.states_targets for policy in self.policies):
            return Objective()
        return self.objective

    @property
    def size(self) -> int:
        """The number of requests of all runs, without floods."""
        return len(self.policies) * self.seeds * self.workload.size

    def run(self, progress: Progress = lambda requests: None) -> "Results":
        """Run all; the results have the same order for every `jobs`. `progress` is called as requests end, of all
        `size`.
        """
        tasks = [(policy, seed) for policy, seed in product(self.policies, range(1, self.seeds + 1))]
        summaries = list(_each(self, tasks, progress))
        runs = [tuple(summaries[n : n + self.seeds]) for n in range(0, len(summaries), self.seeds)]
        return Results(self, tuple(runs))


@dataclass(frozen=True, slots=True)
class Results:
    """The summaries of a comparison: `runs[i]` has the i-th policy's, one for each seed."""

    study: Study
    runs: tuple[tuple[Summary, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(policy.name for policy in self.study.policies)

    @property
    def refusal_reasons(self) -> list[str]:
        """The reasons for which any run refused requests."""
        return sorted({reason for summaries in self.runs for summary in summaries for reason in summary.refusals})

    @property
    def currencies(self) -> list[str]:
        """The currencies of any spending."""
        return sorted({currency for summaries in self.runs for summary in summaries for currency in summary.spend})


class SimulatedRun:
    """One policy that goes through one list of arrivals, in order of time."""

    def __init__(
        self, policy: SimulatedPolicy, arrivals: Sequence[Arrival], device: Device, objective: Objective | None
    ) -> None:
        self._policy = policy
        self.recorder = Recorder(device, objective, policy.weights, busiest(arrivals))
        self.core = policy.make_core()
        gateway = policy.rules.gateway() if policy.rules else None
        longest = policy.engine.max_model_len
        make = Loop if policy.speculation is None else partial(SpeculatingLoop, policy.speculation)
        self.loop = make(self.core, device, self.recorder, longest, target=policy.target, gateway=gateway)
        self.loop.expect(arrivals)

    @property
    def num_over(self) -> int:
        """The number of requests that have ended or been refused."""
        return len(self.recorder.outcomes)

    def summary(self, until: float = inf, seed: int = 1) -> Summary:
        """End the run; returns the summary of its events."""
        seconds, scheduler = self.loop.end(until), self.core.scheduler
        counters, evictions = scheduler.counters, scheduler.kv_manager.cache.evictions
        cost = self._policy.rules and self._policy.rules.price
        return summarise(self.recorder, seed, seconds, counters, evictions, self._policy.class_names, cost or FREE)


def busiest(arrivals: Iterable[Arrival]) -> frozenset[str]:
    """The tenants that ask for most service, in weighted tokens: the ones whose gaps are followed."""
    asked = Counter[str]()
    for arrival in arrivals:
        prompts = ((arrival.prompt_tokens, arrival.output_tokens, 0), *arrival.more_prompts)
        asked[arrival.tenant] += sum(
            round(PROMPT_TOKEN_WEIGHT * prompt + OUTPUT_TOKEN_WEIGHT * output) for prompt, output, _ in prompts
        )
    return frozenset(sorted(asked, key=lambda name: (-asked[name], name))[:MAX_GAP_TENANTS])


def simulate_run(
    policy: SimulatedPolicy,
    arrivals: Sequence[Arrival],
    device: Device,
    objective: Objective | None,
    seed: int = 1,
    progress: Progress = lambda requests: None,
) -> Summary:
    """Runs one policy through one list of arrivals, in order of time, to their ends."""
    simulated = SimulatedRun(policy, arrivals, device, objective)
    collecting = gc.isenabled()
    gc.disable()  # everything is freed by reference counts; collections would look at all waiting requests in vain
    try:
        while not simulated.loop.is_over:
            before = simulated.num_over
            simulated.loop.advance(simulated.loop.next_at + PROGRESS_INTERVAL_SECONDS)
            progress(simulated.num_over - before)
    finally:
        if collecting:
            gc.enable()
    return simulated.summary(seed=seed)


def capacity(
    policy: SimulatedPolicy, workload: Workload, device: Device, progress: Progress = lambda requests: None
) -> float:
    """The throughput in requests a second with all requests present from the start, unbounded and uncached."""
    core = replace(policy.core, overload=Overload.UNBOUNDED)
    scheduling = policy.scheduling_policy and replace(policy.scheduling_policy, bounds=(), may_wait={})
    unbounded = replace(policy, core=core, scheduling_policy=scheduling, targets=(), rules=None)
    at_once = replace(workload, requests=min(workload.size, CAPACITY_REQUESTS), rate=1e9, floods=())
    arrivals = [
        arrival._replace(patience=inf, deadline=None, done_within=None, refused_by=None)
        for arrival in at_once.arrivals(seed=0)
    ]
    summary = simulate_run(unbounded, arrivals, device, Objective(), progress=progress)
    return summary.completed / summary.seconds if summary.seconds else 0.0


def _each(study: Study, tasks: Sequence[Task], progress: Progress) -> Iterator[Summary]:
    if study.jobs == 1:
        yield from (_run_task(study, task, progress) for task in tasks)
        return
    with process_pool(min(study.jobs, len(tasks))) as pool:
        for summary in pool.map(partial(_run_task, study), tasks):
            progress(study.workload.size)
            yield summary


def _run_task(study: Study, task: Task, progress: Progress = lambda requests: None) -> Summary:
    policy, seed = task
    return simulate_run(policy, study.workload.arrivals(seed), study.device, study.judged_by, seed, progress)
