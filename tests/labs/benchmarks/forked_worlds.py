"""Counterfactual replays, to be run in a process of their own: what they fork must have one thread."""

from labs.benchmarks.overload_runs import simulate
from labs.simulation.arrival import Arrival

Found = tuple[list[str], list[bool], list[int]]
"""The outcomes by session; of each refusal that was looked into, whether the request would have been good itself, and
how many more would have been in all.
"""


def look_into(policy: str, arrivals: list[Arrival], every: int) -> Found:
    numbered = [arrival._replace(session=number) for number, arrival in enumerate(arrivals)]
    run = simulate(policy, numbered, look_into=every)
    outcomes = [f"{arrival.session} {outcome}" for arrival, outcome in run.outcomes]
    return outcomes, [replay.was_good for replay in run.regrets.replays], run.regrets.gains
