"""Prompts and answers on devices of their own, beside devices that do both: disaggregation, simulated.

A device of the first pool computes a prompt and its first token, a link carries the prompt's keys and values, and a
device of the second goes on (DistServe: Zhong et al., OSDI 2024; Splitwise: Patel et al., ISCA 2024). Each device runs
the core itself. A request goes to the device of its pool with the least to do: the fewest tokens of prompts, or the
fewest requests that have not ended. A prompt leaves the memory of the first pool with its first token, not when it has
been sent, and what waits for memory of the second waits on the link's far side: neither pool holds the other up, which
flatters a link that is slow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from admission.simulation.arrival import Arrival
from admission.simulation.device import Device
from admission.simulation.errors import OptionError
from admission.simulation.policy import SimulatedPolicy
from admission.simulation.pools.link import Link, LinkUse
from admission.simulation.pools.replica import REFUSED, Answer, Replica, decode_replica
from admission.simulation.recorder import Objective
from admission.simulation.summary import Tail, tail_of


@dataclass(frozen=True, slots=True)
class Split:
    """How many devices do what."""

    together: int = 0  # prompts and answers
    prefill: int = 0
    decode: int = 0

    def __str__(self) -> str:
        return f"{self.together} together" if self.together else f"{self.prefill} prefill, {self.decode} decode"


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """What one split makes of the requests. Times are in seconds."""

    split: Split
    offered: int
    completed: int
    goodput: float  # share of the offered requests
    first_token: Tail
    per_token: Tail
    prefill_busy: float  # share of the time, of the devices that compute prompts
    decode_busy: float  # of those that compute answers, which may be the same
    link_busy: float = 0.0
    link_wait: float = 0.0  # on average, for transfers before


def splits(devices: int) -> list[Split]:
    """Returns all ways to use so many devices, all together first."""
    apart = [Split(prefill=number, decode=devices - number) for number in range(1, devices)]
    return [Split(together=devices), *apart]


def check(policy: SimulatedPolicy, arrivals: Sequence[Arrival], device: Device) -> None:
    """Raises `OptionError` where these requests, this policy or this device cannot be simulated in pools."""
    if policy.speculation is not None:
        raise OptionError("--policy", policy.name, "tokens are not drafted over pools")
    if device.kv_bytes_per_token is None:
        raise OptionError("--device", device.name, "says no kv_bytes_per_token, of which transfers are made")
    if any(arrival.turns or arrival.more_prompts for arrival in arrivals):
        reason = "has sessions of several turns, or requests of several prompts: pools serve one prompt at a time"
        raise OptionError("--trace", "", reason)


def simulate_split(
    split: Split, policy: SimulatedPolicy, arrivals: Sequence[Arrival], device: Device, link: Link, good: Objective
) -> PoolFigures:
    """Serves all requests, which come in order of time, by a split of the devices."""
    requests = [arrival._replace(session=number) for number, arrival in enumerate(arrivals)]
    if split.together:
        pool = [Replica(policy, device) for _ in range(split.together)]
        seconds = _serve(pool, requests)
        answers, busy = _answers(pool), _busy(pool, seconds)
        return _figures(split, requests, answers, good, busy, busy)
    assert device.kv_bytes_per_token is not None
    first = [Replica(policy, device) for _ in range(split.prefill)]
    seconds = _serve(first, [request._replace(output_tokens=1, max_tokens=1, interval=None) for request in requests])
    begun, use, second = _answers(first), LinkUse(link), [decode_replica(policy, device) for _ in range(split.decode)]
    transferred = []
    for ready, number in sorted((answer.last, number) for number, answer in begun.items() if answer.last is not None):
        request = requests[number]
        if request.output_tokens > 1:
            arrived = use.transfer(request.prompt_tokens * device.kv_bytes_per_token, ready)
            transferred.append(_rest_of(request, arrived))
    end = _serve(second, transferred)
    ended = _answers(second)
    answers = {
        number: Answer(answer.first, ended[number].last if number in ended else answer.last)
        for number, answer in begun.items()
    }
    figures = _figures(split, requests, answers, good, _busy(first, seconds), _busy(second, end))
    if not transferred:
        return figures
    return replace(figures, link_busy=use.busy / end, link_wait=use.waited / len(transferred))


def _rest_of(request: Arrival, arrived: float) -> Arrival:
    """Returns what is left of a request whose first token is there: its prompt is longer by that. Its client waits."""
    return request._replace(
        time=arrived,
        prompt_tokens=request.prompt_tokens + 1,
        output_tokens=request.output_tokens - 1,
        max_tokens=max(1, request.declared_tokens - 1),
        deadline=None,
        done_within=None,
        patience=inf,
        content=None,
    )


def _serve(pool: Sequence[Replica], requests: Sequence[Arrival]) -> float:
    """Gives each request to the replica with the least to do when it comes; returns when all was over."""
    for request in requests:
        for replica in pool:
            replica.advance(request.time)
        min(pool, key=lambda one: (one.tokens_to_prefill, one.num_unfinished)).give(request)
    return max(replica.end() for replica in pool)


def _answers(pool: Sequence[Replica]) -> dict[int, Answer]:
    return {number: answer for replica in pool for number, answer in replica.answers.items()}


def _busy(pool: Sequence[Replica], seconds: float) -> float:
    return sum(replica.busy for replica in pool) / (len(pool) * seconds) if seconds else 0.0


def _figures(
    split: Split,
    requests: Sequence[Arrival],
    answers: dict[int, Answer],
    good: Objective,
    prefill_busy: float,
    decode_busy: float,
) -> PoolFigures:
    first_tokens, per_token, num_good = list[float](), list[float](), 0
    for request in requests:
        first, last = answers.get(request.session, REFUSED)
        if first is None or last is None:
            continue
        waited = first - request.time
        each = (last - first) / (request.output_tokens - 1) if request.output_tokens > 1 else 0.0
        first_tokens.append(waited)
        per_token.append(each)
        wanted = good.first_token if request.deadline is None else request.deadline
        in_all = inf if request.done_within is None else request.done_within
        num_good += waited <= wanted and each <= good.per_token and last - request.time <= in_all
    share = num_good / len(requests) if requests else 0.0
    tails = tail_of(sorted(first_tokens)), tail_of(sorted(per_token))
    return PoolFigures(split, len(requests), len(first_tokens), share, *tails, prefill_busy, decode_busy)
