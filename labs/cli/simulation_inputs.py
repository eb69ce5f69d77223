"""Reads a simulation's flags: traffic, policies, workload and objective."""

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from admission.core import ORDERS
from gateway.telemetry.event_log_file import read_event_log
from labs.cli.simulate_flags import DEFAULT_DEVICE, DEFAULT_ORDERING
from labs.simulation.arrival import Arrival
from labs.simulation.device import Device, find_device
from labs.simulation.errors import OptionError
from labs.simulation.host import NO_TIME
from labs.simulation.metrics import escape_controls, format_duration, format_number, format_percent
from labs.simulation.policy import SimulatedPolicy, parse_simulated_policy, recorded_policy
from labs.simulation.recorder import Objective
from labs.simulation.recording import TraceFacts
from labs.simulation.study import CAPACITY_REQUESTS, Study, capacity
from labs.simulation.traces import Traffic, read_traffic
from labs.simulation.workload import Workload
from labs.what_if.comparison import simulated
from quotas.policy.policy import Policy
from quotas.policy.policy_file import SUFFIXES, field_places, parse_policy, read_sources
from quotas.policy.problems import Mark
from quotas.policy.units import counted

PROGRESS_DELAY_SECONDS = 1.0


def read_traffic_of(namespace: Namespace) -> Traffic:
    """The trace, with its device, and the facts of its requests after the rules assigned tenants and service tiers.
    Raises `SimulationError`.
    """
    with progress("reading", "entries", None) as read:
        traffic = read_traffic(
            namespace.trace, namespace.format, lambda path: _followed(read_event_log(path), read), namespace.columns
        )
    return traffic._replace(device=_device(namespace.device, traffic.device), facts=_facts_used(namespace, traffic))


class PolicyFile(NamedTuple):
    """A policy that was read from files, the place of each of its fields in them, and the settings beside it."""

    policy: Policy
    places: dict[str, Mark]
    settings: str


def policy_of(text: str, traffic: Traffic, option: str) -> tuple[SimulatedPolicy, PolicyFile | None]:
    """Parse a policy: a file by its path, with settings or without, or an ordering with settings."""
    assert traffic.device is not None
    first, _, settings = text.partition(",")
    if not names_a_file(first):
        return parse_simulated_policy(text, traffic.device, option), None
    path = Path(first)
    sources = read_sources(path)
    policy = parse_policy(sources)
    name = f"{path.name},{settings}" if settings else path.name
    file = PolicyFile(policy, field_places(sources), settings)
    return simulated(name, policy, traffic.device, traffic.facts, settings, option), file


def names_a_file(text: str) -> bool:
    """True if a text names a policy file and no ordering; a file called like an ordering needs its folder."""
    path = Path(text)
    if path.suffix in SUFFIXES:
        return True
    return text not in ("", *ORDERS) and "=" not in text and ("/" in text or path.exists())


def first_policy(text: str | None, traffic: Traffic) -> tuple[SimulatedPolicy, PolicyFile | None]:
    if text is None and traffic.device is not None and traffic.device.served is not None:
        return recorded_policy(traffic.device.served), None
    return policy_of(DEFAULT_ORDERING if text is None else text, traffic, "--policy")


def _device(name: str | None, recorded: Device | None) -> Device:
    return recorded if name is None and recorded is not None else find_device(name or DEFAULT_DEVICE)


def _facts_used(namespace: Namespace, traffic: Traffic) -> TraceFacts:
    """The facts of the requests after the rules assigned tenants and service tiers."""
    facts = traffic.facts
    asks_by_rule = namespace.classes != "trace"
    return facts._replace(
        has_tiers=namespace.service_tiers != "trace" or (facts.has_tiers and not asks_by_rule),
        has_keys=facts.has_keys and namespace.tenants == "trace",
    )


def objective_of(namespace: Namespace) -> Objective | None:
    """Return the objective of the command line; None has each policy judged by its own targets."""
    given = {"first_token": namespace.good_first_token, "per_token": namespace.good_per_token}
    said = {name: seconds for name, seconds in given.items() if seconds is not None}
    return Objective(**said) if said else None


def workload_of(namespace: Namespace, arrivals: Sequence[Arrival], context: int) -> Workload:
    return Workload(
        trace=tuple(arrivals),
        requests=namespace.requests,
        speedup=namespace.speedup,
        rate=namespace.rate,
        tenants=namespace.tenants,
        classes=namespace.classes,
        service_tiers=namespace.service_tiers,
        floods=tuple(namespace.flood),
        max_tokens=namespace.max_tokens,
        patience=namespace.patience,
        deadline=namespace.deadline,
        context=context,
    )


def at_load(
    load: float | None,
    workload: Workload,
    policy: SimulatedPolicy,
    device: Device,
    *,
    devices: int = 1,
    option: str = "--load",
) -> tuple[Workload, float | None]:
    """The used part of the trace sped up to `load` times the capacity of `devices`, and one device's measured capacity.
    Raises `OptionError` about the `option` of the load.
    """
    if load is None:
        return workload, None
    used = replace(workload, trace=workload.trace[: workload.size])
    seconds = used.trace[-1].time
    if seconds == 0:
        raise OptionError(option, load, "the trace has no length in time to be sped up: use --rate")
    most = capacity_of(policy, used, device)
    return replace(used, speedup=load * devices * most * seconds / len(used.trace)), most


def capacity_of(policy: SimulatedPolicy, workload: Workload, device: Device) -> float:
    with progress("what the device can do", "requests", min(workload.size, CAPACITY_REQUESTS)) as bar:
        return capacity(policy, workload, device, bar.update)


def facts_of(namespace: Namespace, study: Study) -> str:
    """A line that describes the simulation."""
    workload = study.workload
    parts = [counted(workload.size, "request")]
    if workload.rate is not None:
        parts.append(f"Poisson at {workload.rate:g} a second")
    elif workload.speedup != 1 and not namespace.sweep:
        parts.append(f"{workload.speedup:.3g} times as fast as recorded")
    if namespace.load is not None:
        parts.append(f"{format_percent(namespace.load)} of capacity")
    if namespace.sweep:
        parts.append(f"{namespace.sweep[0]:g} to {namespace.sweep[-1]:g} times capacity")
    parts += [f"tenants {workload.tenants}", f"device {study.device.name}"]
    if (host := study.device.host) != NO_TIME:
        times = (format_duration(seconds) for seconds in (host.step, host.row, host.request))
        parts.append("host {} a step, {} a token, {} a request".format(*times))
    parts += [
        f"flood of {flood.tenant}, {flood.rate:g} a second for {format_duration(flood.seconds)}"
        for flood in workload.floods
    ]
    if workload.assumed is not None:
        parts.append(f"max_tokens {format_number(workload.assumed)}, of which the trace says nothing")
    parts.append(counted(study.seeds, "seed"))
    return escape_controls(" · ".join(parts))


@contextmanager
def progress(what: str, unit: str, total: int | None) -> Iterator["tqdm[Any]"]:
    """Show progress on a terminal for work that takes longer than a moment."""
    quiet = not sys.stderr.isatty()
    with tqdm(
        desc=what,
        total=total,
        unit=f" {unit}",
        disable=quiet,
        delay=PROGRESS_DELAY_SECONDS,
        leave=False,
        file=sys.stderr,
    ) as bar:
        yield bar


def _followed(lines: Iterable[str], bar: "tqdm[Any]") -> Iterator[str]:
    for line in lines:
        bar.update()
        yield line
