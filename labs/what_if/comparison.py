"""Compares two policies on recorded requests: the effect of an edit."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.tenants.cache_limits import KVPool, room_problems
from gateway.tenants.effective_policy import KVShape
from gateway.tenants.live_policy import scheduling_policy
from labs.simulation.device import Device
from labs.simulation.errors import OptionError
from labs.simulation.policy import SimulatedPolicy, make_simulated_policy
from labs.simulation.recording import TraceFacts
from labs.simulation.study import SimulatedRun
from labs.simulation.summary import Summary
from labs.simulation.traces import Traffic
from labs.what_if.simulated_policy import PolicyRules, target_of
from labs.what_if.unsimulated import Places, Seen, assumed, unsimulated
from quotas.policy.policy import Policy
from quotas.policy.policy_diff import policy_changes, policy_diff

MOST_REQUESTS = 20_000
MOST_SECONDS = 10.0
SLICE_SECONDS = 0.25  # of simulated time, between two looks at the clock


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The result of a comparison. Both policies got the same requests, up to the same moment."""

    changes: tuple[str, ...]  # lines of text, from `policy_diff`
    not_simulated: tuple[str, ...]  # a sentence for each change without effect in the simulation, with the reason
    assumed: tuple[str, ...]  # a sentence for each assumption
    num_requests: int  # simulated requests
    num_left_out: int  # given requests beyond `most_requests`, or after the time limit
    before: Summary
    after: Summary


def what_if(
    traffic: Traffic,
    before: Policy,
    after: Policy,
    places: Places | None = None,
    most_requests: int = MOST_REQUESTS,
    most_seconds: float = MOST_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> WhatIf:
    """Serve the newest `most_requests` of recorded requests under two policies, side by side.

    `traffic` comes from `read_traffic` of an event log, or is made in memory; it must have a device, with its settings
    besides the policies, and arrivals in order of time. `places` has the places of the fields of `after`.

    The policies are simulated as they are served; changes that are not simulated are named in `not_simulated`. The same
    arguments give the same figures wherever they are computed, unless the time is over first: within about
    `most_seconds` of `clock` both runs end at the same simulated moment, and requests then under way are neither
    completed nor refused. The arguments do not change. It computes with the interpreter's lock held and does nothing
    else, so that an event loop should have it done in another process; its arguments and its result can be pickled.
    Raises `OptionError` without a device, or without a request.
    """
    if traffic.device is None or not traffic.arrivals:
        raise OptionError("what-if", len(traffic.arrivals), "needs requests, and the device that served them")
    newest = traffic.arrivals[-most_requests:]
    start, device = newest[0].time, traffic.device
    facts = traffic.facts._replace(began=None if traffic.facts.began is None else traffic.facts.began + start)
    arrivals = [arrival._replace(time=arrival.time - start) for arrival in newest]
    policies = (before, after)
    runs = [SimulatedRun(simulated("", policy, device, facts), arrivals, device, None) for policy in policies]
    until = _side_by_side(runs, clock, clock() + most_seconds)
    summaries = [run.summary(until) for run in runs]
    num_requests = sum(arrival.time <= until for arrival in arrivals)
    seen = Seen.of(arrivals[:num_requests], facts, policies, summaries, device.kv_bytes_per_token is not None)
    return WhatIf(
        changes=tuple(policy_diff(before, after)),
        not_simulated=tuple(unsimulated(policy_changes(before, after), seen, places or {})),
        assumed=tuple(assumed(policies, facts)),
        num_requests=num_requests,
        num_left_out=len(traffic.arrivals) - num_requests,
        before=summaries[0],
        after=summaries[1],
    )


def simulated(
    name: str, policy: Policy, device: Device, facts: TraceFacts, settings: str = "", option: str = ""
) -> SimulatedPolicy:
    """A policy for a simulation: classes, weights, bounds, limits and prices, on a core and an engine with these
    settings.

    Raises `OptionError` for invalid settings, and, for an `option` of a command, for a policy whose floors leave no
    room.
    """
    names, targets = tuple(level.name for level in policy.classes), tuple(map(target_of, policy.classes))
    base = make_simulated_policy(name, scheduling_policy(policy), targets, device, names, settings, option)
    shape = None
    if device.kv_bytes_per_token is not None:
        block_size = base.engine.block_size
        shape = KVShape(block_size, round(device.kv_bytes_per_token * block_size), base.engine.window_need)
        for field, message in room_problems(policy, KVPool.of(base.engine, shape.block_bytes)) if option else ():
            raise OptionError(option, name, f"{field}: {message}")
    return replace(base, rules=PolicyRules(policy, facts.began, facts.model, shape))


def _side_by_side(runs: Sequence[SimulatedRun], clock: Callable[[], float], deadline: float) -> float:
    """Run them in slices of simulated time, to their ends or until the time is over; returns the moment reached."""
    until = 0.0
    while clock() < deadline and not all(run.loop.is_over for run in runs):
        until = max(until + SLICE_SECONDS, min(run.loop.next_at for run in runs))
        for run in runs:
            run.loop.advance(until)
    return until
