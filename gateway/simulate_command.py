"""`sluice simulate`: run recorded traffic through the scheduling core on a virtual clock, and compare policies.

The core is the one that serves; only the device and the clock are simulated."""

import sys
from argparse import ArgumentTypeError, Namespace, _SubParsersAction
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from admission.core import Order
from admission.simulation import picture
from admission.simulation.arrival import Arrival
from admission.simulation.assignment import Flood
from admission.simulation.device import DEVICES, Device, find_device
from admission.simulation.errors import OptionError
from admission.simulation.json_report import to_json
from admission.simulation.metrics import duration, number, percent, printable
from admission.simulation.page import NUM_COLOURS, page
from admission.simulation.policy import SimulatedPolicy, as_recorded, parse_policy, policy_of
from admission.simulation.recorder import Objective
from admission.simulation.study import Results, Study, capacity
from admission.simulation.table import table
from admission.simulation.target import Target
from admission.simulation.traces import FORMATS, read_traffic
from admission.simulation.workload import Workload
from gateway.event_log_file import read_event_log
from gateway.terms import terms_of
from quotas.policy_file import SUFFIXES, read_policy

DEFAULT_POLICY = Order.FAIR
DEFAULT_DEVICE = "llama3-8b-a100"
NOTES = """\
A policy is a policy file, or an ordering or settings joined by commas, with any field of the core's and the engine's
configuration:
  fair      fcfs      order=fair,quantum=0.1,max_num_seqs=128,weights=gold:4+free:1,kv_tokens=100000

examples:
  sluice simulate --trace yesterday.log --policy policy.yaml --compare edited.yaml
  sluice simulate --trace azure.csv --tenants 4 --load 1.2 --policy fair --compare fcfs --seeds 5 --html fair.html
  sluice simulate --trace azure.csv --rate 3 --tenants app:1 --flood noisy:20@60+30 --compare fcfs"""


def add_to(commands: "_SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "simulate",
        help="what a policy would have done to recorded traffic",
        usage="sluice simulate --trace FILE [--policy P] [--compare P] [flags]",
        description=__doc__,
        epilog=NOTES,
    )
    _add_traffic(parser.add_argument_group("traffic"))
    _add_policies(parser.add_argument_group("policies and device"))
    _add_report(parser.add_argument_group("report"))
    parser.set_defaults(run=_simulate, parser=parser)


def _add_traffic(group: Any) -> None:
    group.add_argument("--trace", metavar="FILE", type=Path, required=True, help="requests and their lengths")
    group.add_argument("--format", choices=["auto", *FORMATS], default="auto", help="of the trace (default: auto)")
    group.add_argument("--requests", metavar="N", type=_count, help="use the first N, repeating the trace if need be")
    pace = group.add_mutually_exclusive_group()
    pace.add_argument("--speedup", metavar="X", type=_positive, default=1.0, help="times as fast as recorded")
    pace.add_argument("--load", metavar="X", type=_positive, help="as fast as X times what the device can complete")
    pace.add_argument(
        "--rate", metavar="R", type=_positive, help="Poisson arrivals, R a second, lengths from the trace"
    )
    group.add_argument(
        "--tenants", metavar="RULE", default="trace", help="4, heavy:0.8,light:0.2, hash:4 or trace (default: trace)"
    )
    group.add_argument("--classes", metavar="RULE", default="trace", help="0:0.1,1:0.9 or trace (default: trace)")
    group.add_argument(
        "--flood",
        metavar="F",
        type=_flood,
        action="append",
        default=[],
        help="TENANT:RATE@START+SECONDS, may be repeated",
    )
    group.add_argument("--max-tokens", metavar="N", type=_count, default=0, help="what each request declares at least")
    group.add_argument(
        "--patience", metavar="S", type=_positive, default=inf, help="clients leave without a token after S"
    )
    group.add_argument("--seeds", metavar="N", type=_count, default=1, help="runs of each policy (default: 1)")


def _add_policies(group: Any) -> None:
    group.add_argument("--policy", metavar="P", help=f"(default: as an event log was recorded; else {DEFAULT_POLICY})")
    group.add_argument("--compare", metavar="P", action="append", default=[], help="another one; may be repeated")
    group.add_argument(
        "--device",
        metavar="D",
        help=f"{', '.join(DEVICES)} or a JSON file of coefficients (default: the one that an event log was recorded "
        f"on, as it was configured; else {DEFAULT_DEVICE})",
    )
    group.add_argument("--jobs", metavar="N", type=_count, default=1, help="runs at a time (default: 1)")


def _add_report(group: Any) -> None:
    good = Objective()
    group.add_argument(
        *("--good-first-token",), metavar="S", type=_positive, default=good.first_token,
        help=f"a good request has its first token within S seconds (default: {good.first_token:g})",
    )  # fmt: skip
    group.add_argument(
        *("--good-per-token",), metavar="S", type=_positive, default=good.per_token,
        help=f"and then a token each S seconds on average (default: {good.per_token:g})",
    )  # fmt: skip
    group.add_argument("--json", metavar="FILE", type=_new_file, help="write every figure of every run")
    group.add_argument("--html", metavar="FILE", type=_new_file, help="write charts and figures as one page")
    group.add_argument("--png", metavar="FILE", type=_new_file, help="write the charts as a picture (extra: plots)")


def _simulate(namespace: Namespace) -> int:
    if namespace.png:
        picture.require()
    study = _study(namespace)
    results = study.run(_progress)
    facts = _facts(namespace, study)
    _write(namespace, results, facts)
    print(f"{facts}\n\n{table(results)}")
    return 0


def _policy(text: str, device: Device, option: str) -> SimulatedPolicy:
    """A policy file, by its path, or an ordering and settings."""
    if not _names_a_file(text):
        return parse_policy(text, device, option)
    path = Path(text)
    policy = read_policy(path)
    targets = tuple(
        Target(level.ttft, level.time_per_output_token, level.when_late == "refuse") for level in policy.classes
    )
    return policy_of(path.name, terms_of(policy), targets, device)


def _names_a_file(text: str) -> bool:
    """Not an ordering, though a file may be called so: that one is named with its folder."""
    path = Path(text)
    if path.suffix in SUFFIXES:
        return True
    return text not in ("", *Order) and "=" not in text and ("/" in text or path.exists())


def _study(namespace: Namespace) -> Study:
    traffic = read_traffic(namespace.trace, namespace.format, read_event_log)
    device = _device(namespace.device, traffic.device)
    if len(namespace.compare) >= NUM_COLOURS:
        raise OptionError("--compare", namespace.compare, f"at most {NUM_COLOURS} policies fit one comparison")
    first, texts = _first_policy(namespace.policy, device), namespace.compare
    policies = _told_apart([first, *(_policy(text, device, "--compare") for text in texts)], [namespace.policy, *texts])
    workload = _at_load(namespace.load, _workload(namespace, traffic.arrivals), policies[0], device)
    objective = Objective(namespace.good_first_token, namespace.good_per_token)
    return Study(policies, workload, device, objective, namespace.seeds, namespace.jobs)


def _first_policy(text: str | None, device: Device) -> SimulatedPolicy:
    if text is None and device.served is not None:
        return as_recorded(device.served)
    return _policy(DEFAULT_POLICY if text is None else text, device, "--policy")


def _told_apart(policies: Sequence[SimulatedPolicy], texts: Sequence[str | None]) -> tuple[SimulatedPolicy, ...]:
    """Files of one name in several folders are called by their paths."""
    counts = Counter(policy.name for policy in policies)
    return tuple(
        replace(policy, name=text) if text and (counts[policy.name] > 1 or not policy.name) else policy
        for policy, text in zip(policies, texts, strict=True)
    )


def _device(name: str | None, recorded: Device | None) -> Device:
    return recorded if name is None and recorded is not None else find_device(name or DEFAULT_DEVICE)


def _workload(namespace: Namespace, arrivals: Sequence[Arrival]) -> Workload:
    return Workload(
        trace=tuple(arrivals),
        requests=namespace.requests,
        speedup=namespace.speedup,
        rate=namespace.rate,
        tenants=namespace.tenants,
        classes=namespace.classes,
        floods=tuple(namespace.flood),
        max_tokens=namespace.max_tokens,
        patience=namespace.patience,
    )


def _at_load(load: float | None, workload: Workload, policy: SimulatedPolicy, device: Device) -> Workload:
    """What is used of the trace, sped up to `load` times the capacity, which a run of its own finds."""
    if load is None:
        return workload
    used = replace(workload, trace=workload.trace[: workload.size])
    seconds = used.trace[-1].time
    if seconds == 0:
        raise OptionError("--load", load, "the trace has no length in time to be sped up: use --rate")
    return replace(used, speedup=load * capacity(policy, used, device) * seconds / len(used.trace))


def _write(namespace: Namespace, results: Results, facts: str) -> None:
    title = f"{namespace.trace.name}: {' and '.join(results.names)}"
    try:
        if namespace.json:
            namespace.json.write_text(
                to_json(results, {"trace": namespace.trace.name, "facts": facts}), encoding="utf-8"
            )
        if namespace.html:
            namespace.html.write_text(page(results, title, facts), encoding="utf-8")
        if namespace.png:
            picture.save(results, title, facts, namespace.png)
    except OSError as error:
        raise OptionError(
            "--json, --html, --png", str(error.filename), f"cannot be written ({error.strerror})"
        ) from None


def _facts(namespace: Namespace, study: Study) -> str:
    workload = study.workload
    parts = [f"{number(workload.size)} requests"]
    if workload.rate is not None:
        parts.append(f"Poisson at {workload.rate:g} a second")
    elif workload.speedup != 1:
        parts.append(f"{workload.speedup:.3g} times as fast as recorded")
    if namespace.load is not None:
        parts.append(f"{percent(namespace.load)} of capacity")
    parts += [f"tenants {workload.tenants}", f"device {study.device.name}"]
    parts += [
        f"flood of {flood.tenant}, {flood.rate:g} a second for {duration(flood.seconds)}" for flood in workload.floods
    ]
    parts.append(f"{study.seeds} seeds" if study.seeds > 1 else "1 seed")
    return printable(" · ".join(parts))


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty() and total > 1:
        print(f"\r{done} of {total} runs", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _count(text: str) -> int:
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise ArgumentTypeError("a whole number, at least 1")


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value > 0 and isfinite(value):
        return value
    raise ArgumentTypeError("a number above 0")


def _flood(text: str) -> Flood:
    try:
        return Flood.parse(text)
    except OptionError as error:
        raise ArgumentTypeError(str(error)) from None


def _new_file(text: str) -> Path:
    """Known to be impossible before minutes are spent on what it should hold."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentTypeError(f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}")
    return path
