"""How many replicas a traffic needs: one is simulated at several rates, never computed from averages.

A replica of many sees a random part of the requests, so its arrivals are Poisson, with lengths drawn from the trace. A
router that goes by load does better than that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from labs.simulation.arrival import Arrival
from labs.simulation.device import Device
from labs.simulation.policy import SimulatedPolicy
from labs.simulation.recorder import AttemptOutcome, Objective
from labs.simulation.study import PROGRESS_INTERVAL_SECONDS, SimulatedRun, capacity
from labs.simulation.summary import Summary
from labs.simulation.workload import Workload

GOOD_SHARE = 0.99  # of the requests at the knee: the objective is a p99
MIN_RUN_TARGETS = 30  # length of a run in first-token targets: in a shorter one no queue shows an overload
MAX_RUN_REQUESTS = 10_000  # beyond which a run is not made longer for that
NUM_HALVINGS = 6  # of the interval in which a knee is looked for: to 2 % of the capacity
NEAR = (0.4, 1.6)  # times a known knee, where the knee after a change of `CHANGE` is looked for
NUM_NEAR_HALVINGS = 5  # to 4 % of the knee
CHANGE = 0.2  # of a quantity, whose effect is shown
SEEDS = (1, 2, 3)  # of the draws whose knees are compared

Progress = Callable[[int], object]  # called with the number of newly simulated requests


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica and its traffic."""

    policy: SimulatedPolicy
    device: Device
    arrivals: tuple[Arrival, ...]
    objective: Objective
    requests: int  # in each simulation, at least
    seed: int = SEEDS[0]  # of the draw

    def at(self, rate: float) -> Summary:
        """Simulate the replica at a rate of requests a second; no further than it is decided that too few are good."""
        arrivals = self.traffic(rate)
        run = SimulatedRun(self.policy, arrivals, self.device, self.objective)
        outcomes, seen, num_bad = run.recorder.outcomes, 0, 0
        while not run.loop.is_over and num_bad <= (1 - GOOD_SHARE) * len(arrivals):
            run.loop.advance(run.loop.next_at + PROGRESS_INTERVAL_SECONDS)
            num_bad += sum(outcome is not AttemptOutcome.GOOD for _, outcome in outcomes[seen:])
            seen = len(outcomes)
        return run.summary(until=run.loop.next_at if not run.loop.is_over else inf)

    def traffic(self, rate: float) -> list[Arrival]:
        """Draw the requests of a simulation; at another rate the same ones come, faster or slower."""
        wanted = ceil(MIN_RUN_TARGETS * self.objective.first_token * rate)
        number = max(self.requests, min(wanted, MAX_RUN_REQUESTS))
        context = self.policy.engine.max_model_len
        return Workload(self.arrivals, requests=number, rate=rate, context=context).arrivals(self.seed)

    def capacity(self) -> float:
        """Return the requests a second that it completes when all are there at once."""
        context = self.policy.engine.max_model_len
        return capacity(self.policy, Workload(self.arrivals, requests=self.requests, context=context), self.device)

    def knee(self, progress: Progress) -> "Knee | None":
        """Return the largest rate at which `GOOD_SHARE` of the requests are good; None: at none of those tried."""
        most = self.capacity()
        progress(self.requests)
        return self._search(0.0, most, NUM_HALVINGS, most, progress)

    def knees(self, progress: Progress) -> "list[tuple[Replica, Knee]]":
        """Return other draws of the requests with their knees, the lowest first, without those that have none: bursts
        decide which requests are not good, and few are, so that the knee is known no better than by their spread.
        """
        draws = [replace(self, seed=seed) for seed in SEEDS]
        found = [(draw, knee) for draw in draws if (knee := draw.knee(progress)) is not None]
        return sorted(found, key=lambda one: one[1].rate)

    def knee_near(self, knee: "Knee", progress: Progress) -> "Knee | None":
        """Return the knee of a replica that differs a little from the one whose knee is known; None: far below it."""
        most = self.capacity()
        progress(self.requests)
        low, high = (factor * knee.rate for factor in NEAR)
        return self._search(low, min(high, most), NUM_NEAR_HALVINGS, most, progress)

    def _search(self, low: float, high: float, halvings: int, most: float, progress: Progress) -> "Knee | None":
        best = None
        for _ in range(halvings):
            middle = (low + high) / 2
            summary = self.at(middle)
            progress(self.requests)
            if summary.goodput >= GOOD_SHARE:
                low, best = middle, Knee(middle, most, summary)
            else:
                high = middle
        return best

    def with_prompts(self, factor: float) -> "Replica":
        return self._with_lengths(lambda one: one._replace(prompt_tokens=_times(one.prompt_tokens, factor)))

    def with_answers(self, factor: float) -> "Replica":
        return self._with_lengths(lambda one: one._replace(output_tokens=_times(one.output_tokens, factor)))

    def with_steps(self, factor: float) -> "Replica":
        """Return the replica on a device whose steps take `factor` times as long."""
        seconds = self.device.seconds
        return replace(self, device=replace(self.device, seconds=lambda work: factor * seconds(work)))

    def with_first_token(self, factor: float) -> "Replica":
        objective = replace(self.objective, first_token=factor * self.objective.first_token)
        return replace(self, objective=objective)

    def _with_lengths(self, change: Callable[[Arrival], Arrival]) -> "Replica":
        longest = self.policy.engine.max_model_len
        changed = tuple(change(one) for one in self.arrivals)
        return replace(self, arrivals=tuple(one for one in changed if fits(one, longest)))


@dataclass(frozen=True, slots=True)
class Knee:
    """The largest good load of one replica."""

    rate: float  # requests a second
    capacity: float  # that it completes when all are there at once
    run: Summary


SENSITIVITIES: dict[str, Callable[[Replica, float], Replica]] = {
    "prompts": Replica.with_prompts,
    "answers": Replica.with_answers,
    "step times": Replica.with_steps,
    "first-token target": Replica.with_first_token,
}


def replicas_for(rate: float, knee: float) -> int:
    return max(1, ceil(rate / knee - 1e-9))


def fits(arrival: Arrival, context: int) -> bool:
    return arrival.prompt_tokens + arrival.output_tokens <= context


def recommended_len(arrivals: Sequence[Arrival], longest: int, share: float) -> int:
    """Return the tokens that hold this share of the requests, rounded up to a multiple of 1,024, or as far as the
    model goes.
    """
    ordered = sorted(one.prompt_tokens + one.output_tokens for one in arrivals)
    needed = ordered[min(len(ordered) - 1, ceil(share * len(ordered)) - 1)]
    return min(longest, -(-needed // 1024) * 1024)


def _times(tokens: int, factor: float) -> int:
    return max(1, round(factor * tokens))
