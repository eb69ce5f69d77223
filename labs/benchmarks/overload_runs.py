"""One policy through one load of `labs.benchmarks.overload`, and the figures by which it is judged."""

import gc
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import NamedTuple

from admission.promise import Promise
from backend.scheduler.sequence import Sequence as Running
from labs.benchmarks.counterfactual import ForkingLoop, Regrets, by_session
from labs.benchmarks.overload_loads import BURST_END, BURST_SECONDS, BURST_START, DEVICE, ENGINE, FIRST_TOKEN
from labs.benchmarks.report import quantile
from labs.simulation.arrival import Arrival
from labs.simulation.clients import Clients
from labs.simulation.device import Device
from labs.simulation.policy import parse_simulated_policy
from labs.simulation.recorder import AttemptOutcome, Objective, Recorder, TrackedRequest

PER_TOKEN_SECONDS = 0.1  # on average for each token after the first, of a good request
WARM_UP = 30.0
RECOVERY_WINDOW_SECONDS = 10.0  # seconds, over which goodput is told after a burst
WINDOW_SECONDS = 30.0  # seconds, of which the worst is shown
WINDOW_PROMISES = 100  # in a window of coverage
COVERED = (0.82, 0.97)  # that a window of bounds with a confidence of 0.9 should be within

GOOD, REFUSED, EXPIRED = AttemptOutcome.GOOD, AttemptOutcome.REFUSED, AttemptOutcome.EXPIRED


class KeptPromise(NamedTuple):
    """The promise of an admitted request, and its times; in seconds from its arrival."""

    number: int  # in the order in which they were given
    tenant: str
    told_first: float
    told_last: float
    first: float | None  # None: given up before
    last: float | None
    prompt: int = 0  # tokens
    length: int = 0  # tokens of the answer, as far as it came


class PromiseRecorder(Recorder):
    """Judges each request by its own deadline and `PER_TOKEN_SECONDS`, and keeps what it was promised."""

    def __init__(self) -> None:
        super().__init__(DEVICE, Objective(FIRST_TOKEN, PER_TOKEN_SECONDS), {})
        self.kept: list[KeptPromise] = []
        self._told: dict[Running, tuple[int, Promise]] = {}  # with their numbers

    @property
    def promises(self) -> list[KeptPromise]:
        """The promises with known outcomes, in the order in which they were given."""
        return sorted(self.kept)

    def queued(self, sequence: Running, arrival: Arrival, promise: Promise) -> None:
        super().queued(sequence, arrival, promise)
        if promise.first_token is not None:
            self._told[sequence] = len(self._told) + len(self.kept), promise

    def expired(self, sequence: Running, now: float) -> None:
        self._resolve(sequence, None, None)
        super().expired(sequence, now)

    def _done(self, sequence: Running, request: TrackedRequest, now: float) -> None:
        since = request.arrival.time
        self._resolve(sequence, request.first_token - since, now - since)
        super()._done(sequence, request, now)

    def _resolve(self, sequence: Running, first: float | None, last: float | None) -> None:
        number, told = self._told.pop(sequence, (0, Promise()))
        if told.first_token is not None and told.last_token is not None:
            who, prompt, length = sequence.tenant, sequence.num_prompt_tokens, len(sequence.output)
            kept = KeptPromise(number, who, told.first_token, told.last_token, first, last, prompt, length)
            self.kept.append(kept)


@dataclass
class Run:
    """One policy through one list of arrivals; each request has one outcome, that of its last attempt."""

    arrivals: list[Arrival]
    by_session: Mapping[int, AttemptOutcome]
    attempts: float  # for each request
    promises: list[KeptPromise]
    first_tokens: Mapping[str, Sequence[float]]  # seconds, of completed requests, by tenant
    regrets: Regrets = field(default_factory=Regrets)

    @cached_property
    def outcomes(self) -> list[tuple[Arrival, AttemptOutcome]]:
        return [(arrival, self.by_session[arrival.session]) for arrival in self.arrivals]

    def share(self, *outcomes: AttemptOutcome, of: Callable[[Arrival], bool] = lambda _: True) -> float:
        """The share of these outcomes among the requests `of` a kind; 1 without any."""
        found = [outcome in outcomes for arrival, outcome in self.outcomes if of(arrival)]
        return sum(found) / len(found) if found else 1.0

    @property
    def good(self) -> float:
        return self.share(GOOD)

    @property
    def refused(self) -> float:
        return self.share(REFUSED)

    @property
    def missed(self) -> float:
        """The share of the offered requests that were admitted, and not good."""
        return self.share(*(outcome for outcome in AttemptOutcome if outcome not in (GOOD, REFUSED)))

    @property
    def good_tokens(self) -> float:
        """The share of the offered tokens, of prompts and answers, that good requests had."""
        good = sum(a.prompt_tokens + a.output_tokens for a, outcome in self.outcomes if outcome is GOOD)
        return good / sum(a.prompt_tokens + a.output_tokens for a in self.arrivals)

    @cached_property
    def by_length(self) -> list[float]:
        """The share of good requests in each quartile of prompts, from the shortest to the longest."""
        lengths = sorted(arrival.prompt_tokens for arrival in self.arrivals)
        cuts = [lengths[len(lengths) * n // 4] for n in (1, 2, 3)]
        return self._good_shares(lambda arrival: bisect_right(cuts, arrival.prompt_tokens))

    @property
    def longest_over_shortest(self) -> float:
        return self.by_length[-1] / self.by_length[0] if self.by_length[0] else 0.0

    @property
    def worst_tenant(self) -> float:
        return min(self._good_shares(lambda arrival: arrival.tenant))

    @property
    def worst_window(self) -> float:
        """The share of good requests among the arrivals of the worst `WINDOW_SECONDS`."""
        return min(self._good_shares(lambda arrival: int(arrival.time / WINDOW_SECONDS)))

    def _good_shares(self, kind: Callable[[Arrival], object]) -> list[float]:
        good: defaultdict[object, list[bool]] = defaultdict(list)
        for arrival, outcome in self.outcomes:
            good[kind(arrival)].append(outcome is GOOD)
        return [_mean(each) for _, each in sorted(good.items(), key=lambda item: str(item[0]))]

    def good_within(self, deadline: float) -> float:
        """Returns the share of good ones among the requests with this deadline."""
        return self.share(GOOD, of=lambda arrival: arrival.deadline == deadline)

    def good_of(self, tenants: Iterable[str]) -> float:
        names = set(tenants)
        return self.share(GOOD, of=lambda arrival: arrival.tenant in names)

    def p99_of(self, tenants: Iterable[str]) -> float:
        """Returns the 99th percentile of these tenants' times to a first token, in seconds."""
        return quantile(sorted(time for name in tenants for time in self.first_tokens.get(name, ())), 0.99)

    @property
    def recovery(self) -> float:
        """Seconds after the burst until arrivals of a window fare 95 % as well as before it."""
        before = self._good_between(WARM_UP, BURST_START)
        time = BURST_END
        while self._good_between(time, time + RECOVERY_WINDOW_SECONDS) < 0.95 * before and time < BURST_SECONDS:
            time += 1
        return time - BURST_END

    def _good_between(self, start: float, end: float) -> float:
        return self.share(GOOD, of=lambda arrival: start <= arrival.time < end)

    # what was refused

    @property
    def wrongly_refused(self) -> float:
        """The share of the offered requests whose refusal left fewer good ones in all, by the refusals looked into."""
        return self.regrets.wrong * self.refused

    @property
    def refused_though_good(self) -> float:
        """The share of the offered requests that were refused and would have been good themselves."""
        return self.regrets.good_itself * self.refused

    # what was promised

    def covered(self) -> float:
        """The share of the windows of `WINDOW_PROMISES` consecutive promises of first tokens that are `COVERED`."""
        held = [_holds(promise) for promise in self.promises]
        total, counts = sum(held[: WINDOW_PROMISES - 1]), []
        for first, newest in enumerate(held[WINDOW_PROMISES - 1 :]):
            total += newest
            counts.append(COVERED[0] <= total / WINDOW_PROMISES <= COVERED[1])
            total -= held[first]
        return sum(counts) / len(counts) if counts else 1.0

    @property
    def coverage(self) -> float:
        return _mean([_holds(promise) for promise in self.promises])

    @property
    def completion_coverage(self) -> float:
        return _mean([p.last <= p.told_last for p in self.promises if p.last is not None])

    @property
    def worst_covered_tenant(self) -> float:
        """The share of promises of first tokens that held for the tenant for which fewest did, of at least 50."""
        by_tenant: defaultdict[str, list[bool]] = defaultdict(list)
        for promise in self.promises:
            by_tenant[promise.tenant].append(_holds(promise))
        return min((_mean(held) for held in by_tenant.values() if len(held) >= WINDOW_PROMISES / 2), default=1.0)

    @property
    def told_over_true(self) -> float:
        """The median of how many times as long as it took a completion was promised to take at most."""
        return median([p.told_last / p.last for p in self.promises if p.last]) if self.promises else 1.0


def _holds(promise: KeptPromise) -> bool:
    return promise.first is not None and promise.first <= promise.told_first


def _mean(held: Sequence[bool]) -> float:
    return sum(held) / len(held) if held else 1.0


def simulate(
    policy: str,
    arrivals: list[Arrival],
    clients: Clients | None = None,
    look_into: int = 0,
    make_loop: type[ForkingLoop] = ForkingLoop,
    device: Device = DEVICE,
) -> Run:
    """`look_into`: every n-th refusal is replayed as an admission; 0: none. A `device` may be slower than `DEVICE`,
    with its memory.
    """
    simulated = parse_simulated_policy(f"{policy},{ENGINE}", DEVICE)
    recorder = PromiseRecorder()
    loop = make_loop(simulated.make_core(), device, recorder, simulated.engine.max_model_len, clients)
    loop.every, loop.regrets = look_into, Regrets()
    gc.disable()
    try:
        loop.run(arrivals)
    finally:
        gc.enable()
    outcomes = by_session(recorder.outcomes)
    loop.regrets.ended(outcomes)
    attempts = len(recorder.outcomes) / max(1, len(outcomes))
    first_tokens = {name: tenant.first_token_times for name, tenant in recorder.tenants.items()}
    return Run(arrivals, outcomes, attempts, recorder.promises, first_tokens, loop.regrets)
