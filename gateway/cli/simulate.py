"""`sluice simulate`: run recorded traffic through the scheduling core on a virtual clock, and compare policies.

The core is the one that serves; only the device and the clock are simulated."""

import sys
from argparse import Namespace, _SubParsersAction
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from admission.core import Order
from admission.simulation.arrival import Arrival
from admission.simulation.device import Device, find_device
from admission.simulation.errors import OptionError
from admission.simulation.metrics import escape_controls, format_duration, format_number, format_percent
from admission.simulation.page import NUM_COLOURS, page, sweep_page
from admission.simulation.policy import SimulatedPolicy, parse_simulated_policy, recorded_policy
from admission.simulation.recorder import Objective
from admission.simulation.recording import TraceFacts
from admission.simulation.report import comparison_table, sweep_json, sweep_table, to_json
from admission.simulation.search.sweep import run_sweep
from admission.simulation.study import CAPACITY_REQUESTS, Results, Study, capacity
from admission.simulation.traces import Traffic, read_traffic
from admission.simulation.workload import Workload
from gateway.cli.simulate_checks import check_flags, unread_columns
from gateway.cli.simulate_flags import DEFAULT_DEVICE, DEFAULT_ORDERING, add_policies, add_report, add_traffic
from gateway.telemetry.event_log_file import read_event_log
from gateway.what_if.comparison import simulated
from gateway.what_if.unsimulated import Seen, assumed, unsimulated
from quotas.policy.policy import DEFAULT_POLICY, Policy
from quotas.policy.policy_diff import policy_changes, policy_diff
from quotas.policy.policy_file import SUFFIXES, field_places, parse_policy, read_sources
from quotas.policy.problems import Mark

SATURATED = 0.95  # of the time that the device is busy: more than it can do may be asked of it
MOMENT = 1.0  # seconds
NOTES = """\
A policy is a policy file, or an ordering or settings joined by commas, with any field of the core's and the engine's
configuration, or a file with settings:
  fair      fcfs      order=fair,quantum=0.1,max_num_seqs=128,weights=gold:4+free:1      policy.yaml,kv_tokens=100000

examples:
  sluice simulate --trace yesterday.log --policy policy.yaml --compare edited.yaml
  sluice simulate --trace yesterday.log --policy policy.yaml --compare policy.yaml,kv_tokens=100000
  sluice simulate --trace azure.csv --tenants 4 --load 1.2 --policy fair --compare fcfs --seeds 5 --html fair.html
  sluice simulate --trace azure.csv --rate 3 --tenants app:1 --flood noisy:20@60+30 --compare fcfs"""


def add_simulate_command(commands: "_SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "simulate",
        help="what a policy would have done to recorded traffic",
        usage="sluice simulate --trace FILE [--policy P] [--compare P] [flags]",
        description=__doc__,
        epilog=NOTES,
    )
    add_traffic(parser.add_argument_group("traffic"))
    add_policies(parser.add_argument_group("policies and device"))
    add_report(parser.add_argument_group("report"))
    parser.set_defaults(run=_simulate, parser=parser)


def _simulate(namespace: Namespace) -> int:
    has_file = any(_names_a_file(text.partition(",")[0]) for text in (namespace.policy, *namespace.compare) if text)
    check_flags(namespace, has_file)
    with _progress("reading", "entries", None) as read:
        traffic = read_traffic(
            *(namespace.trace, namespace.format, lambda path: _followed(read_event_log(path), read)), namespace.columns
        )
    traffic = traffic._replace(device=_device(namespace.device, traffic.device), facts=_facts_used(namespace, traffic))
    study, files, most = _study(namespace, traffic)
    if namespace.sweep:
        assert most is not None
        with _progress("simulating", "requests", len(namespace.sweep) * study.size) as simulated:
            sweep = run_sweep(study, namespace.sweep, most, simulated.update)
        table, as_json, as_page = sweep_table(sweep), partial(sweep_json, sweep), partial(sweep_page, sweep)
        said = _remarks(sweep.results[-1], files, traffic.facts)
    else:
        with _progress("simulating", "requests", study.size) as simulated:
            results = study.run(simulated.update)
        table, as_json, as_page = comparison_table(results), partial(to_json, results), partial(page, results)
        said = [*_remarks(results, files, traffic.facts), *_overload(study, results, most)]
    remarks = [escape_controls(line) for line in (*unread_columns(namespace, traffic.facts, has_file), *said)]
    facts = _facts(namespace, study)
    title = f"{namespace.trace.name}: {' and '.join(policy.name for policy in study.policies)}"
    try:
        if namespace.json:
            named = {"trace": namespace.trace.name, "facts": facts, "remarks": remarks}
            namespace.json.write_text(as_json(named), encoding="utf-8")
        if namespace.html:
            namespace.html.write_text(as_page(title, facts, remarks), encoding="utf-8")
    except OSError as error:
        raise OptionError("--json, --html", str(error.filename), f"cannot be written ({error.strerror})") from None
    print("\n".join([*remarks, *([""] if remarks else []), f"{facts}\n\n{table}"]))
    return 0


def _facts_used(namespace: Namespace, traffic: Traffic) -> TraceFacts:
    """Return what is known of the requests once the rules have assigned tenants and service tiers."""
    facts = traffic.facts
    asks_by_rule = namespace.classes != "trace"
    return facts._replace(
        has_tiers=namespace.service_tiers != "trace" or (facts.has_tiers and not asks_by_rule),
        has_keys=facts.has_keys and namespace.tenants == "trace",
    )


class PolicyFile(NamedTuple):
    """A policy that was read from files, the place of each of its fields in them, and the settings beside it."""

    policy: Policy
    places: dict[str, Mark]
    settings: str


def _policy(text: str, traffic: Traffic, option: str) -> tuple[SimulatedPolicy, PolicyFile | None]:
    """Parse a policy: a file by its path, with settings or without, or an ordering with settings."""
    assert traffic.device is not None
    first, _, settings = text.partition(",")
    if not _names_a_file(first):
        return parse_simulated_policy(text, traffic.device, option), None
    path = Path(first)
    sources = read_sources(path)
    policy = parse_policy(sources)
    name = f"{path.name},{settings}" if settings else path.name
    file = PolicyFile(policy, field_places(sources), settings)
    return simulated(name, policy, traffic.device, traffic.facts, settings, option), file


def _names_a_file(text: str) -> bool:
    """Return whether a text names a policy file and no ordering; a file called like an ordering needs its folder."""
    path = Path(text)
    if path.suffix in SUFFIXES:
        return True
    return text not in ("", *Order) and "=" not in text and ("/" in text or path.exists())


def _study(namespace: Namespace, traffic: Traffic) -> tuple[Study, list[PolicyFile | None], float | None]:
    """Return the study, each policy's file if it has one, and the capacity in requests a second if it was measured."""
    device, texts = traffic.device, namespace.compare
    assert device is not None
    if len(texts) >= NUM_COLOURS:
        raise OptionError("--compare", texts, f"at most {NUM_COLOURS} policies fit one comparison")
    pairs = [_first_policy(namespace.policy, traffic), *(_policy(text, traffic, "--compare") for text in texts)]
    policies = _told_apart([policy for policy, _ in pairs], [namespace.policy, *texts])
    context = min(policy.engine.max_model_len for policy in policies)
    load = namespace.sweep[0] if namespace.sweep else namespace.load
    workload, most = _at_load(load, _workload(namespace, traffic.arrivals, context), policies[0], device)
    study = Study(policies, workload, device, _objective(namespace), namespace.seeds, namespace.jobs)
    return study, [file for _, file in pairs], most


def _objective(namespace: Namespace) -> Objective | None:
    """Return the objective of the command line; None has each policy judged by its own targets."""
    given = {"first_token": namespace.good_first_token, "per_token": namespace.good_per_token}
    said = {name: seconds for name, seconds in given.items() if seconds is not None}
    return Objective(**said) if said else None


def _first_policy(text: str | None, traffic: Traffic) -> tuple[SimulatedPolicy, PolicyFile | None]:
    if text is None and traffic.device is not None and traffic.device.served is not None:
        return recorded_policy(traffic.device.served), None
    return _policy(DEFAULT_ORDERING if text is None else text, traffic, "--policy")


def _told_apart(policies: Sequence[SimulatedPolicy], texts: Sequence[str | None]) -> tuple[SimulatedPolicy, ...]:
    """Rename policies whose files have the same name in several folders to their paths."""
    counts = Counter(policy.name for policy in policies)
    return tuple(
        replace(policy, name=text) if text and (counts[policy.name] > 1 or not policy.name) else policy
        for policy, text in zip(policies, texts, strict=True)
    )


def _device(name: str | None, recorded: Device | None) -> Device:
    return recorded if name is None and recorded is not None else find_device(name or DEFAULT_DEVICE)


def _workload(namespace: Namespace, arrivals: Sequence[Arrival], context: int) -> Workload:
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


def _at_load(
    load: float | None, workload: Workload, policy: SimulatedPolicy, device: Device
) -> tuple[Workload, float | None]:
    """Return the used part of the trace sped up to `load` times the capacity, and the capacity,
    which a run measures.
    """
    if load is None:
        return workload, None
    used = replace(workload, trace=workload.trace[: workload.size])
    seconds = used.trace[-1].time
    if seconds == 0:
        raise OptionError("--load", load, "the trace has no length in time to be sped up: use --rate")
    most = _capacity(policy, used, device)
    return replace(used, speedup=load * most * seconds / len(used.trace)), most


def _capacity(policy: SimulatedPolicy, workload: Workload, device: Device) -> float:
    with _progress("what the device can do", "requests", min(workload.size, CAPACITY_REQUESTS)) as bar:
        return capacity(policy, workload, device, bar.update)


def _facts(namespace: Namespace, study: Study) -> str:
    workload = study.workload
    parts = [f"{format_number(workload.size)} requests"]
    if workload.rate is not None:
        parts.append(f"Poisson at {workload.rate:g} a second")
    elif workload.speedup != 1 and not namespace.sweep:
        parts.append(f"{workload.speedup:.3g} times as fast as recorded")
    if namespace.load is not None:
        parts.append(f"{format_percent(namespace.load)} of capacity")
    if namespace.sweep:
        parts.append(f"{namespace.sweep[0]:g} to {namespace.sweep[-1]:g} times capacity")
    parts += [f"tenants {workload.tenants}", f"device {study.device.name}"]
    parts += [
        f"flood of {flood.tenant}, {flood.rate:g} a second for {format_duration(flood.seconds)}"
        for flood in workload.floods
    ]
    if workload.assumed is not None:
        parts.append(f"max_tokens {format_number(workload.assumed)}, of which the trace says nothing")
    parts.append(f"{study.seeds} seeds" if study.seeds > 1 else "1 seed")
    return escape_controls(" · ".join(parts))


def _remarks(results: Results, files: Sequence[PolicyFile | None], traced: TraceFacts) -> list[str]:
    """Return what each policy changes, what of that could not be simulated, and what was taken for granted."""
    study = results.study
    first, *others = files
    pairs = [(first, file) for file in others] if others else [(None, first)]
    arrivals = study.workload.arrivals(1)
    known = [file.policy for file in files if file]
    summaries = [summary for runs in results.runs for summary in runs]
    seen = Seen.of(arrivals, traced, known, summaries, study.device.kv_bytes_per_token is not None)
    remarks = []
    for name, (before, after) in zip(results.names[1:] or results.names, pairs, strict=True):
        if after is None:
            continue
        old, places = (before.policy, before.places) if before else (DEFAULT_POLICY, {})
        changes = policy_changes(old, after.policy)
        if before:
            lines = policy_diff(old, after.policy)
            if before.settings != after.settings:
                lines += [f"settings: {before.settings or 'none'} -> {after.settings or 'none'}"]
            lines = lines or ["nothing changes"]
            remarks += [f"{results.names[0]} -> {name}", *(f"  {line}" for line in lines)]
        remarks += unsimulated(changes, seen, after.places, places)
    return remarks + assumed(known, traced)


def _overload(study: Study, results: Results, most: float | None) -> list[str]:
    """Return whether the requests ask for more than the device can do, by how much, and what to do about it."""
    if results.runs[0][0].busy < SATURATED:
        return []
    workload = study.workload
    arrivals = workload.arrivals(1)
    seconds = arrivals[-1].time
    most = most or _capacity(study.policies[0], workload, study.device)
    if not seconds or not most or len(arrivals) / seconds <= most:
        return []
    asked = len(arrivals) / seconds
    fitting = 0.99 * most / asked
    slower = f"--rate {fitting * workload.rate:.3g}" if workload.rate else f"--speedup {fitting * workload.speedup:.3g}"
    remark = (
        f"overload: the requests ask for {asked / most:.2f} times what {study.device.name} can serve "
        f"({asked:.3g} come a second, it completes {most:.3g}): what waits and is refused follows from that; "
        f"use {slower}, --load 1 or another --device"
    )
    return [remark]


@contextmanager
def _progress(what: str, unit: str, total: int | None) -> Iterator["tqdm[Any]"]:
    """Show progress on a terminal for work that takes longer than a moment."""
    quiet = not sys.stderr.isatty()
    with tqdm(
        desc=what, total=total, unit=f" {unit}", disable=quiet, delay=MOMENT, leave=False, file=sys.stderr
    ) as bar:
        yield bar


def _followed(lines: Iterable[str], bar: "tqdm[Any]") -> Iterator[str]:
    for line in lines:
        bar.update()
        yield line
