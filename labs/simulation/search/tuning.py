"""Searches the engine's settings under which most requests of a workload are good.

First by successive halving (Jamieson and Talwalkar, 2016): many settings meet the first part of the requests, the
better third of them a part three times as long, until a few have met all. Then by steps, first from the present
settings, most of which an operator has considered, and then from the best known: the next larger and the next smaller
value of one setting meet all requests, for as long as either is better and the budget lasts.

A search is deterministic, and costs as much as simulating the whole workload `budget` times, the present settings once
more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, pairwise, product
from random import Random
from typing import Any

from backend.errors import ConfigError
from labs.simulation.arrival import Arrival
from labs.simulation.device import Device
from labs.simulation.policy import SimulatedPolicy
from labs.simulation.recorder import Objective
from labs.simulation.study import Progress, simulate_run
from labs.simulation.summary import Summary

LADDERS: Mapping[str, tuple[float, ...]] = {
    "max_num_seqs": (16, 32, 64, 128, 256, 512),
    "max_num_batched_tokens": (256, 512, 1024, 2048, 4096, 8192),
    "prefill_chunk": (64, 128, 256, 512, 1024, 2048, 4096),
}
"""The candidate values of each setting; its present one is among them."""
HALVING_FACTOR = 3  # growth of the parts, and reduction of the settings
MIN_PART_REQUESTS = 200  # requests in a part, at least
MOST_PARTS = 4
HALVING_SHARE_OF_BUDGET, CLIMB_SHARE_OF_BUDGET = 0.4, 0.3  # shares of the budget
MIN_GAIN_GOODPUT = 0.005  # of goodput, for which a change is recommended

Setting = tuple[float | None, ...]  # a value for each of the ladders; None: switched off, and left so


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting, and its result on the whole workload."""

    setting: Setting
    summary: Summary

    @property
    def score(self) -> tuple[float, float]:
        return _score(self.summary)

    @property
    def values(self) -> dict[str, float | None]:
        return dict(zip(LADDERS, self.setting, strict=True))


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best setting that a search found, beside the present one."""

    present: Trial
    best: Trial
    num_settings: int  # tried on any part
    spent: float  # of the budget

    @property
    def gain(self) -> float:
        """The goodput of the best less that of the present one."""
        return self.best.summary.goodput - self.present.summary.goodput


@dataclass(slots=True)
class Tuner:
    """The search over one policy's settings on one list of arrivals, in order of time."""

    policy: SimulatedPolicy
    arrivals: Sequence[Arrival]
    device: Device
    objective: Objective | None
    budget: float = 30.0
    executor: Executor | None = None
    progress: Progress = lambda requests: None
    _known: dict[tuple[Setting, int], Summary] = field(default_factory=dict)
    _spent: float = 0.0

    @property
    def present(self) -> Setting:
        return tuple(getattr(self.policy.engine, name) for name in LADDERS)

    def run(self) -> Tuned:
        whole = len(self.arrivals)
        self._try([self.present], whole)
        self._spent = 0.0
        halved = self._halve()
        best = self._climb(self.present, (HALVING_SHARE_OF_BUDGET + CLIMB_SHARE_OF_BUDGET) * self.budget)
        best = self._climb(self._best([best, halved], whole), self.budget)
        num_settings = len({setting for setting, _ in self._known})
        return Tuned(self._trial(self.present), self._trial(best), num_settings, self._spent)

    def grid(self) -> list[Setting]:
        """All valid settings of an engine, in a fixed order."""
        return [setting for setting in product(*self._ladders()) if self._is_possible(setting)]

    def best_of(self, settings: Iterable[Setting]) -> Trial:
        """Tries all of these on the whole workload; returns the best."""
        whole, settings = len(self.arrivals), list(settings)
        self._try(settings, whole)
        return self._trial(self._best(settings, whole))

    # inside

    def _trial(self, setting: Setting) -> Trial:
        return Trial(setting, self._known[setting, len(self.arrivals)])

    def _ladders(self) -> list[tuple[float | None, ...]]:
        return [
            (None,) if own is None else tuple(sorted({*ladder, own}))
            for own, ladder in zip(self.present, LADDERS.values(), strict=True)
        ]

    def _is_possible(self, setting: Setting) -> bool:
        try:
            self._with(setting)
        except ConfigError:
            return False
        return True

    def _with(self, setting: Setting) -> SimulatedPolicy:
        """The policy with a setting of the grid. Raises `ConfigError` if the setting contradicts itself."""
        values: dict[str, Any] = dict(zip(LADDERS, setting, strict=True))
        return replace(self.policy, engine=replace(self.policy.engine, **values))

    def _halve(self) -> Setting:
        """The best setting that reached the last part."""
        sizes = self._parts()
        share = HALVING_SHARE_OF_BUDGET * self.budget / len(sizes)
        grid, counts = self.grid(), [max(1, round(share * len(self.arrivals) / size)) for size in sizes]
        left = [self.present, *Random(0).sample(grid, min(len(grid), counts[0]))]
        self._try(left, sizes[0])
        for (before, size), count in zip(pairwise(sizes), counts[1:], strict=True):
            left = sorted(left, key=lambda setting: _score(self._known[setting, before]), reverse=True)[:count]
            self._try(left, size)
        return self._best([*left, self.present], len(self.arrivals))

    def _parts(self) -> list[int]:
        """The ascending sizes of the parts; the last is the whole."""
        sizes = [len(self.arrivals)]
        while len(sizes) < MOST_PARTS and sizes[0] // HALVING_FACTOR >= MIN_PART_REQUESTS:
            sizes.insert(0, sizes[0] // HALVING_FACTOR)
        return sizes

    def _climb(self, best: Setting, budget: float) -> Setting:
        """The best setting reached by hill climbing, a step of one value at a time, within the budget."""
        whole, in_vain = len(self.arrivals), 0
        for knob in cycle(range(len(LADDERS))):
            neighbours = list(self._neighbours(best, knob))
            new = [setting for setting in neighbours if (setting, whole) not in self._known]
            if in_vain == len(LADDERS) or self._spent + len(new) > budget:
                break
            self._try(new, whole)
            better = self._best([best, *neighbours], whole)
            in_vain = in_vain + 1 if better == best else 0
            best = better
        return best

    def _neighbours(self, setting: Setting, knob: int) -> Iterator[Setting]:
        ladder = self._ladders()[knob]
        place = ladder.index(setting[knob])
        for value in (*ladder[max(0, place - 1) : place], *ladder[place + 1 : place + 2]):
            neighbour = (*setting[:knob], value, *setting[knob + 1 :])
            if self._is_possible(neighbour):
                yield neighbour

    def _try(self, settings: Iterable[Setting], size: int) -> None:
        """Simulate these on the first `size` requests, unless the result is known."""
        new = [setting for setting in dict.fromkeys(settings) if (setting, size) not in self._known]
        run = partial(_simulated, arrivals=self.arrivals[:size], device=self.device, objective=self.objective)
        each = map if self.executor is None else self.executor.map
        for setting, summary in zip(new, each(run, map(self._with, new)), strict=True):
            self._known[setting, size] = summary
            self._spent += size / len(self.arrivals)
            self.progress(size)

    def _best(self, settings: Iterable[Setting], size: int) -> Setting:
        return max(settings, key=lambda setting: _score(self._known[setting, size]))


def _simulated(
    policy: SimulatedPolicy, arrivals: Sequence[Arrival], device: Device, objective: Objective | None
) -> Summary:
    return simulate_run(policy, arrivals, device, objective)


def _score(summary: Summary) -> tuple[float, float]:
    """The score, larger is better: goodput, ties by earlier first tokens."""
    return summary.goodput, -(summary.first_token.p95 or 0.0)
