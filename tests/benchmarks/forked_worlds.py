"""Counterfactual replays, to be run in a process of their own: what they fork must have one thread."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from admission.simulation.arrival import Arrival
from benchmarks.overload import simulate

Found = tuple[list[str], int, int]
"""Fates in the order in which they were known, refusals that were looked into, and those that would have been good."""


def look_into(policy: str, arrivals: list[Arrival], every: int) -> Found:
    numbered = [arrival._replace(session=number) for number, arrival in enumerate(arrivals)]
    run = simulate(policy, numbered, look_into=every)
    return [f"{arrival.session} {outcome}" for arrival, outcome in run.outcomes], run.regrets.looked, run.regrets.good


def apart(function: Callable[..., Found], *arguments: object) -> Found:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
