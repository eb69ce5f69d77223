"""`sluice simulate`: run recorded traffic through the scheduling core on a virtual clock, and compare policies.

The core is the one that serves; only the device and the clock are simulated."""

from argparse import Namespace, _SubParsersAction
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from labs.cli.simulate_checks import check_flags, unread_columns
from labs.cli.simulate_flags import add_comparison, add_policy, add_report, add_runs, add_traffic
from labs.cli.simulation_inputs import (
    PolicyFile,
    at_load,
    capacity_of,
    facts_of,
    first_policy,
    names_a_file,
    objective_of,
    policy_of,
    progress,
    read_traffic_of,
    workload_of,
)
from labs.simulation.errors import OptionError
from labs.simulation.metrics import escape_controls
from labs.simulation.page import page, sweep_page
from labs.simulation.policy import SimulatedPolicy
from labs.simulation.recording import TraceFacts
from labs.simulation.report import comparison_table, sweep_json, sweep_table, to_json
from labs.simulation.search.sweep import run_sweep
from labs.simulation.study import Results, Study
from labs.simulation.traces import Traffic
from labs.what_if.unsimulated import Seen, assumed, unsimulated
from quotas.policy.policy import DEFAULT_POLICY
from quotas.policy.policy_diff import policy_changes, policy_diff

MOST_POLICIES = 4  # in one comparison, whose table fits a terminal
SATURATED_BUSY_SHARE = 0.95  # of the time: at this utilisation the offered load may exceed the capacity
NOTES = """\
A policy is a policy file, or an ordering or settings joined by commas, with any field of the core's and the engine's
configuration, or a file with settings:
  fair      fcfs      order=fair,confidence=0.8,max_num_seqs=128,weights=gold:4+free:1      policy.yaml,kv_tokens=100000

examples:
  sluice simulate --trace yesterday.log --policy policy.yaml --compare edited.yaml
  sluice simulate --trace yesterday.log --policy policy.yaml --compare policy.yaml,kv_tokens=100000
  sluice simulate --trace azure.csv --tenants 4 --load 1.2 --policy fair --compare fcfs --seeds 5 --html fair.html
  sluice simulate --trace azure.csv --rate 3 --tenants app:1 --flood noisy:20@60+30 --compare fcfs"""


def add_simulate_command(commands: "_SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "simulate",
        help="simulate a policy on recorded traffic",
        usage="sluice simulate --trace FILE [--policy P] [--compare P] [flags]",
        description=__doc__,
        epilog=NOTES,
    )
    add_runs(*add_traffic(parser))
    add_comparison(add_policy(parser))
    add_report(parser)
    parser.set_defaults(run=_simulate, parser=parser)


def _simulate(namespace: Namespace) -> int:
    has_file = any(names_a_file(text.partition(",")[0]) for text in (namespace.policy, *namespace.compare) if text)
    check_flags(namespace, has_file)
    traffic = read_traffic_of(namespace)
    study, files, most = _study(namespace, traffic)
    if namespace.sweep:
        assert most is not None
        with progress("simulating", "requests", len(namespace.sweep) * study.size) as simulated:
            sweep = run_sweep(study, namespace.sweep, most, simulated.update)
        table, as_json, as_page = sweep_table(sweep), partial(sweep_json, sweep), partial(sweep_page, sweep)
        said = _remarks(sweep.results[-1], files, traffic.facts)
    else:
        with progress("simulating", "requests", study.size) as simulated:
            results = study.run(simulated.update)
        table, as_json, as_page = comparison_table(results), partial(to_json, results), partial(page, results)
        said = [*_remarks(results, files, traffic.facts), *_overload(study, results, most)]
    remarks = [escape_controls(line) for line in (*unread_columns(namespace, traffic.facts, has_file), *said)]
    facts = facts_of(namespace, study)
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


def _study(namespace: Namespace, traffic: Traffic) -> tuple[Study, list[PolicyFile | None], float | None]:
    """Return the study, each policy's file if it has one, and the capacity in requests a second if it was measured."""
    device, texts = traffic.device, namespace.compare
    assert device is not None
    if len(texts) >= MOST_POLICIES:
        raise OptionError("--compare", texts, f"at most {MOST_POLICIES} policies fit one comparison")
    pairs = [first_policy(namespace.policy, traffic), *(policy_of(text, traffic, "--compare") for text in texts)]
    policies = _told_apart([policy for policy, _ in pairs], [namespace.policy, *texts])
    context = min(policy.engine.max_model_len for policy in policies)
    load, option = (namespace.sweep[0], "--sweep") if namespace.sweep else (namespace.load, "--load")
    workload = workload_of(namespace, traffic.arrivals, context)
    workload, most = at_load(load, workload, policies[0], device, option=option)
    study = Study(policies, workload, device, objective_of(namespace), namespace.seeds, namespace.jobs)
    return study, [file for _, file in pairs], most


def _told_apart(policies: Sequence[SimulatedPolicy], texts: Sequence[str | None]) -> tuple[SimulatedPolicy, ...]:
    """Rename policies whose files have the same name in several folders to their paths."""
    counts = Counter(policy.name for policy in policies)
    return tuple(
        replace(policy, name=text) if text and (counts[policy.name] > 1 or not policy.name) else policy
        for policy, text in zip(policies, texts, strict=True)
    )


def _remarks(results: Results, files: Sequence[PolicyFile | None], traced: TraceFacts) -> list[str]:
    """The changes of each policy, the unsimulated ones, and the assumptions."""
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
    """A warning if the offered load exceeds the capacity, by how much, and the remedies."""
    if results.runs[0][0].busy < SATURATED_BUSY_SHARE:
        return []
    workload = study.workload
    arrivals = workload.arrivals(1)
    seconds = arrivals[-1].time
    most = most or capacity_of(study.policies[0], workload, study.device)
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
