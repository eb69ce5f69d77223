"""The loads of the simulated machine in `overload`: lengths of prompts and answers, and arrivals.

Lengths are drawn independently from quantiles of Azure's LLM inference traces of 2023, log-linear in between: of its
conversations, and of its requests for code, which are long prompts and short answers. A log-normal fit would miss that
half of the conversations' prompts have between 400 and 1,200 tokens. Everyone declares the same `max_tokens`, a power
of two that no drawn answer exceeds.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from random import Random
from typing import NamedTuple

from labs.simulation.arrival import Arrival
from labs.simulation.device import DEVICES
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.study import capacity
from labs.simulation.traces import read_trace
from labs.simulation.workload import Workload

DEVICE = DEVICES["llama3-8b-a100"]
ENGINE = "max_num_batched_tokens=512,max_num_seqs=192,prefill_chunk=512"
MAX_TOKENS = 1024  # that conversations declare
LONGEST = 16_000  # tokens of a recorded prompt; what is longer is cut
SHARES = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.999, 1)
PROMPTS = (2, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 1877, 2735, 4083, 4098, 4142, 6212, 14050)  # tokens
OUTPUTS = (7, 41, 54, 77, 91, 103, 129, 177, 384, 400, 411, 424, 451, 540, 601, 954, 1000)
CODE_PROMPTS = (3, 120, 240, 480, 800, 1130, 1500, 1980, 2560, 3400, 3900, 4600, 5900, 6900, 7200, 7400, 7437)
SHORT_PROMPTS = (8, 20, 30, 45, 60, 80, 100, 140, 190, 280, 340, 440, 700, 1150, 1700, 2100, 2300)
CODE_OUTPUTS = (1, 5, 6, 8, 9, 11, 13, 16, 20, 27, 34, 48, 90, 180, 290, 900, 1899)
FIRST_TOKEN = 2.0  # seconds in which a first token is wanted, unless a load says otherwise
TENANTS = tuple(f"tenant-{number}" for number in range(4))
LIGHT = ("light-1", "light-2", "light-3")
STEADY_SECONDS, BURST_SECONDS = 300.0, 600.0
BURST_START, BURST_END = 240.0, 300.0


def drawn_trace(
    seed: int = 0, count: int = 20_000, prompts: Sequence[int] = PROMPTS, outputs: Sequence[int] = OUTPUTS
) -> list[Arrival]:
    """Returns requests of lengths that have these quantiles, at the shares `SHARES`."""
    random = Random(seed)

    def length(quantiles: Sequence[int]) -> int:
        share = random.random()
        upper = bisect_right(SHARES, share)
        (s0, s1), (low, high) = SHARES[upper - 1 : upper + 1], quantiles[upper - 1 : upper + 1]
        return round(low * (high / low) ** ((share - s0) / (s1 - s0)))

    return [Arrival(0.0, length(prompts), length(outputs)) for _ in range(count)]


@dataclass(frozen=True)
class Traffic:
    """Requests to draw from, and their declarations."""

    name: str
    trace: Sequence[Arrival]  # with its own times, if `is_recorded`
    max_tokens: int
    is_recorded: bool = False
    is_code: bool = False

    @cached_property
    def capacity(self) -> float:
        """The capacity in requests a second: completed with all requests present from the start."""
        at_once = Workload(tuple(self.trace), tenants=str(len(TENANTS)), max_tokens=self.max_tokens)
        return capacity(parse_simulated_policy(f"order=fair,{ENGINE}", DEVICE), at_once, DEVICE)

    @classmethod
    @cache
    def short(cls) -> "Traffic":
        return cls("short", drawn_trace(prompts=SHORT_PROMPTS), MAX_TOKENS)

    @classmethod
    @cache
    def conversations(cls) -> "Traffic":
        return cls("conversations", drawn_trace(), MAX_TOKENS)

    @classmethod
    @cache
    def code(cls) -> "Traffic":
        return cls("code", drawn_trace(prompts=CODE_PROMPTS, outputs=CODE_OUTPUTS), 2048, is_code=True)

    @classmethod
    def recorded(cls, path: Path) -> "Traffic":
        """Reads a trace. Its requests share nothing, and its prompts are cut at `LONGEST`. Raises `TraceError`."""
        spread = Workload(tuple(read_trace(path))).arrivals(seed=0)
        trace = [arrival.alike._replace(prompt_tokens=min(arrival.prompt_tokens, LONGEST)) for arrival in spread]
        longest = max(arrival.output_tokens for arrival in trace)
        return cls(path.stem, trace, max(MAX_TOKENS, 1 << (longest - 1).bit_length()), is_recorded=True)


class Part(NamedTuple):
    """Tenants that together ask for `factor` times the capacity for these requests, in equal parts."""

    tenants: tuple[str, ...]
    factor: float
    deadlines: tuple[float | None, ...] = (FIRST_TOKEN,)  # seconds until a first token, drawn with equal odds
    is_short: bool = False  # whether these are `Traffic.short` instead of those of the load
    classes: tuple[int, ...] = ()  # drawn with equal odds; none: the arrivals' own


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of several tenants: Poisson, with the burst or without, or as they were recorded."""

    name: str
    parts: tuple[Part, ...]
    seconds: float = STEADY_SECONDS
    burst: float = 1.0  # times as many requests from `BURST_START` to `BURST_END`
    is_recorded: bool = False  # whether lengths and times are a piece of the trace, as they follow on each other

    def arrivals(self, traffic: Traffic, seed: int) -> list[Arrival]:
        """Returns requests in order of time, each its own session."""
        random = Random(seed)
        made: list[Arrival] = []
        for part in self.parts:
            drawn = Traffic.short() if part.is_short else traffic
            coming = self._recorded if self.is_recorded else self._poisson
            for arrival in coming(drawn, part.factor * drawn.capacity, random):
                tenant, deadline = random.choice(part.tenants), random.choice(part.deadlines)
                level = random.choice(part.classes) if part.classes else arrival.priority_class
                made.append(
                    arrival._replace(
                        tenant=tenant, max_tokens=drawn.max_tokens, deadline=deadline, priority_class=level
                    )
                )
        return [arrival._replace(session=number) for number, arrival in enumerate(sorted(made, key=_time))]

    def shortened(self, share: float) -> "Load":
        """Returns the same load for a shorter time; one with a burst needs its time."""
        return self if self.burst > 1 else replace(self, seconds=self.seconds * share)

    def _poisson(self, traffic: Traffic, rate: float, random: Random) -> Iterator[Arrival]:
        time = 0.0
        while True:
            time += random.expovariate(rate * (self.burst if BURST_START <= time < BURST_END else 1.0))
            if time >= self.seconds:
                return
            yield random.choice(traffic.trace)._replace(time=time)

    def _recorded(self, traffic: Traffic, rate: float, random: Random) -> Iterator[Arrival]:
        """Yields a piece of the trace from a random place on, as much faster or slower as makes this its mean rate."""
        count = min(round(rate * self.seconds), len(traffic.trace) - 1)
        first = random.randrange(len(traffic.trace) - count)
        start, end = traffic.trace[first].time, traffic.trace[first + count].time
        for arrival in traffic.trace[first : first + count]:
            yield arrival._replace(time=(arrival.time - start) * count / rate / (end - start))


def _time(arrival: Arrival) -> float:
    return arrival.time


def everyone(name: str, factor: float, **others: object) -> Load:
    """Returns the load of four equal tenants."""
    return Load(name, (Part(TENANTS, factor),), **others)  # type: ignore[arg-type]


UNDERLOAD, OVERLOAD = everyone("0.9x", 0.9), everyone("1.4x", 1.4)
BURST = everyone("2.5x burst", 0.8, seconds=BURST_SECONDS, burst=2.5)
RECORDED = everyone("1.4x, recorded times", 1.4, is_recorded=True)
MIXED = Load("1.4x, mixed deadlines", (Part(TENANTS, 1.4, (0.7, 2.0, 8.0)),))
BESIDE_2X = Load("light tenants beside a 2x flood", (Part(LIGHT, 0.45), Part(("flood",), 2.0)))
PATIENT = (None,)
ALONE = Load("light tenants alone", (Part(LIGHT, 0.45, PATIENT, is_short=True),))
BESIDE_4X = Load("beside a 4x flood", (*ALONE.parts, Part(("flood",), 4.0)))
BESIDE_PATIENT = Load("beside a 4x flood that waits", (*ALONE.parts, Part(("flood",), 4.0, PATIENT)))
