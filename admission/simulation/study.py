"""Policies compared on one workload over several seeds."""

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from admission.core import Overload
from admission.simulation.arrival import Arrival
from admission.simulation.device import Device
from admission.simulation.loop import Loop
from admission.simulation.policy import SimulatedPolicy
from admission.simulation.recorder import Objective, Recorder
from admission.simulation.summary import Summary, summarise
from admission.simulation.workload import Workload

CAPACITY_REQUESTS = 2000

Task = tuple[SimulatedPolicy, int]  # and the seed


@dataclass(frozen=True, slots=True)
class Study:
    """What is simulated. Every policy meets the same arrivals."""

    policies: tuple[SimulatedPolicy, ...]
    workload: Workload
    device: Device
    objective: Objective
    seeds: int = 1
    jobs: int = 1  # processes

    def run(self, progress: Callable[[int, int], object] = lambda done, total: None) -> "Results":
        """Results in the same order whatever `jobs`. `progress` is told how many of all runs are done."""
        tasks = [(policy, seed) for policy, seed in product(self.policies, range(1, self.seeds + 1))]
        summaries = []
        for summary in _each(partial(_run_task, self), tasks, self.jobs):
            summaries.append(summary)
            progress(len(summaries), len(tasks))
        runs = [tuple(summaries[n : n + self.seeds]) for n in range(0, len(summaries), self.seeds)]
        return Results(self, tuple(runs))


@dataclass(frozen=True, slots=True)
class Results:
    """`runs[i]` are those of the i-th policy, one for each seed."""

    study: Study
    runs: tuple[tuple[Summary, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(policy.name for policy in self.study.policies)

    @property
    def refusal_reasons(self) -> list[str]:
        """That any run had."""
        return sorted({reason for summaries in self.runs for summary in summaries for reason in summary.refusals})


def run(
    policy: SimulatedPolicy, arrivals: Sequence[Arrival], device: Device, objective: Objective, seed: int = 1
) -> Summary:
    """One policy through one list of arrivals, in order of time."""
    recorder = Recorder(device, objective, policy.weights)
    core = policy.make_core()
    collecting = gc.isenabled()
    gc.disable()  # everything is freed by reference counts; collections would look at all waiting requests in vain
    try:
        seconds = Loop(core, device, recorder, policy.engine.max_model_len, target=policy.target).run(arrivals)
    finally:
        if collecting:
            gc.enable()
    return summarise(recorder, seed, seconds, core.scheduler.counters.recomputed_tokens)


def capacity(policy: SimulatedPolicy, workload: Workload, device: Device) -> float:
    """Requests a second that the device completes when all are there from the start."""
    unbounded = replace(policy, core=replace(policy.core, overload=Overload.UNBOUNDED))
    at_once = replace(workload, requests=min(workload.size, CAPACITY_REQUESTS), rate=1e9, floods=())
    arrivals = [arrival._replace(patience=float("inf")) for arrival in at_once.arrivals(seed=0)]
    summary = run(unbounded, arrivals, device, Objective())
    return summary.completed / summary.seconds if summary.seconds else 0.0


def _each(function: Callable[[Task], Summary], tasks: Sequence[Task], jobs: int) -> Iterator[Summary]:
    if jobs == 1:
        yield from map(function, tasks)
        return
    with ProcessPoolExecutor(min(jobs, len(tasks))) as pool:
        yield from pool.map(function, tasks)


def _run_task(study: Study, task: Task) -> Summary:
    policy, seed = task
    return run(policy, study.workload.arrivals(seed), study.device, study.objective, seed)
