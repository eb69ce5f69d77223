"""Prompts and answers on devices of their own, beside devices that do both: disaggregation, simulated.

A device of the first pool computes a prompt and its first token, its link carries the prompt's keys and values, and a
device of the second goes on (DistServe: Zhong et al., OSDI 2024; Splitwise: Patel et al., ISCA 2024). Each device runs
the core itself. A request goes to the device of its pool with the least to do: the fewest tokens of prompts, or the
fewest requests that have not ended. A transfer begins when the prompt is complete: engines that send a layer while they
compute the next hide most of it, as a faster link does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from labs.simulation.arrival import Arrival
from labs.simulation.device import Device
from labs.simulation.errors import OptionError
from labs.simulation.policy import SimulatedPolicy
from labs.simulation.pools.link import Link
from labs.simulation.pools.replica import REFUSED, AnswerTimes, Replica
from labs.simulation.pools.two_pools import TwoPools
from labs.simulation.recorder import Objective
from labs.simulation.summary import Tail, tail_of


@dataclass(frozen=True, slots=True)
class Split:
    """A division of the devices: prefill, decode, or both."""

    together: int = 0  # prompts and answers
    prefill: int = 0
    decode: int = 0

    @property
    def devices(self) -> int:
        return self.together + self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.together} together" if self.together else f"{self.prefill} prefill, {self.decode} decode"


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """The results of one split. Times are in seconds."""

    split: Split
    offered: int
    completed: int
    goodput: float  # share of the offered requests
    first_token_share: float  # of the offered requests, with the first token in time
    per_token_share: float  # of the offered requests, with tokens in time
    good_rate: float  # good requests a second and device
    first_token: Tail
    per_token: Tail
    prefill_busy: float  # share of the time, of prefill devices
    decode_busy: float  # of decode devices, perhaps the same
    link_busy: float = 0.0  # of the busiest link
    link_wait: float = 0.0  # on average, for transfers before


def splits(devices: int) -> list[Split]:
    """Return all splits of the devices, all together first."""
    apart = [Split(prefill=number, decode=devices - number) for number in range(1, devices)]
    return [Split(together=devices), *apart]


def check(policy: SimulatedPolicy, arrivals: Sequence[Arrival], device: Device) -> None:
    """Raise `OptionError` for requests, a policy or a device that pools cannot simulate."""
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
        return _figures(split, requests, answers, good, busy, busy, seconds)
    pools = TwoPools(split.prefill, split.decode, policy, device, link)
    seconds = pools.run(requests)
    shares = _busy(pools.first, seconds), _busy(pools.second, seconds)
    figures = _figures(split, requests, pools.answers, good, *shares, seconds)
    num_sent = sum(one.num_begun for one in pools.links)
    if not num_sent:
        return figures
    link_busy = max(one.busy for one in pools.links) / seconds
    return replace(figures, link_busy=link_busy, link_wait=sum(one.waited for one in pools.links) / num_sent)


def _serve(pool: Sequence[Replica], requests: Sequence[Arrival]) -> float:
    """Gives each request to the least loaded replica at its arrival; returns the end of the run."""
    for request in requests:
        for replica in pool:
            replica.advance(request.time)
        min(pool, key=lambda one: (one.tokens_to_prefill, one.num_unfinished)).give(request)
    for replica in pool:
        replica.advance(inf)
    return max(replica.end() for replica in pool)


def _answers(pool: Sequence[Replica]) -> dict[int, AnswerTimes]:
    return {number: answer for replica in pool for number, answer in replica.answers.items()}


def _busy(pool: Sequence[Replica], seconds: float) -> float:
    return sum(replica.busy for replica in pool) / (len(pool) * seconds) if seconds else 0.0


def _figures(
    split: Split,
    requests: Sequence[Arrival],
    answers: dict[int, AnswerTimes],
    good: Objective,
    prefill_busy: float,
    decode_busy: float,
    seconds: float,
) -> PoolFigures:
    first_tokens, per_token = list[float](), list[float]()
    num_good = first_in_time = tokens_in_time = 0
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
        first_in_time += waited <= wanted
        tokens_in_time += each <= good.per_token
        num_good += waited <= wanted and each <= good.per_token and last - request.time <= in_all
    offered = max(1, len(requests))
    return PoolFigures(
        split=split,
        offered=len(requests),
        completed=len(first_tokens),
        goodput=num_good / offered,
        first_token_share=first_in_time / offered,
        per_token_share=tokens_in_time / offered,
        good_rate=num_good / seconds / split.devices if seconds else 0.0,
        first_token=tail_of(sorted(first_tokens)),
        per_token=tail_of(sorted(per_token)),
        prefill_busy=prefill_busy,
        decode_busy=decode_busy,
    )
