"""What a random core has to hold, over one run of it each."""

from math import isclose
from typing import NamedTuple

from tests.labs.core.random_core import RandomCore


class Fairness(NamedTuple):
    """What one schedule showed."""

    gap: float
    bound: float
    preemptions: int

    @property
    def share(self) -> float:
        """Of the bound; at most 1."""
        return self.gap / self.bound if self.bound else 0.0


def random_schedule(seed: int, steps: int = 30) -> Fairness:
    """Tenants that mostly have work waiting, held to the fairness bound.

    Raises `AssertionError` when it is exceeded, or charges do not add up to the busy time.
    """
    run = RandomCore(seed)
    for _ in range(24):
        run.arrive()
    for _ in range(steps):
        while len(run.queue) < 12:
            run.arrive()
        run.plan()
        if run.random.random() < 0.1:
            run.finish(run.random.choice(run.sequences))
        run.complete()
    run.monitor.check()
    while run.scheduler.in_flight:
        run.complete()
    assert isclose(run.charged, run.busy, rel_tol=1e-9), f"charged {run.charged}, busy for {run.busy}"
    return Fairness(run.monitor.gap, run.monitor.bound, run.scheduler.counters.preemptions)
