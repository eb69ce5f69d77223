"""`sluice pools`: compares prefill and decode devices with devices that do both.

The simulator serves the requests with each split of the devices; a link carries keys and values from prefill devices to
decode devices. No real device is used.
"""

from argparse import Namespace, _SubParsersAction
from collections.abc import Iterator, Sequence
from typing import Any

from gateway.cli.arguments import argument
from gateway.table import table
from labs.cli.simulate_checks import check_flags, unread_columns
from labs.cli.simulate_flags import add_objective, add_policy, add_runs, add_traffic
from labs.cli.simulation_inputs import (
    at_load,
    facts_of,
    first_policy,
    objective_of,
    progress,
    read_traffic_of,
    workload_of,
)
from labs.simulation.arrival import Arrival
from labs.simulation.errors import OptionError
from labs.simulation.metrics import NOTHING, escape_controls, format_duration, format_number, format_percent
from labs.simulation.policy import SimulatedPolicy
from labs.simulation.pools.link import Link
from labs.simulation.pools.pools import PoolFigures, Split, check, simulate_split, splits
from labs.simulation.recorder import Objective
from labs.simulation.search.sweep import KNEE_GOODPUT
from labs.simulation.study import Study
from labs.simulation.summary import Tail
from labs.simulation.traces import Traffic

DEFAULT_DEVICES, MAX_DEVICES = 4, 64
DEFAULT_LINK_GBPS = 100.0
NOTES = """\
Each device runs the core itself; a request goes to the device of its pool with the least to do. Loads are multiples of
what all devices complete together. Each device that computes prompts has a link of its own. A transfer begins when its
prompt is complete and has all its memory on the far side.

examples:
  sluice pools --trace azure.csv --load 0.8 --good-per-token 0.05
  sluice pools --trace azure.csv --load 0.8 --split 1:3 --link-gbps 25
  sluice pools --trace azure.csv --sweep 0.3:1.1:9 --devices 8 --link-gbps 400"""


def add_pools_command(commands: "_SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "pools",
        help="compare split prefill and decode devices with devices that do both",
        usage="sluice pools --trace FILE [--devices N | --split P:D] [--link-gbps X] [flags]",
        description=__doc__,
        epilog=NOTES,
    )
    add_runs(*add_traffic(parser))
    group = add_policy(parser)
    number = group.add_mutually_exclusive_group()
    number.add_argument(
        "--devices", metavar="N", type=argument(_devices), default=DEFAULT_DEVICES,
        help=f"devices that are split in every way, from 2 to {MAX_DEVICES} (default: {DEFAULT_DEVICES})",
    )  # fmt: skip
    number.add_argument(
        "--split", metavar="P:D", type=argument(_split),
        help="the one split to simulate beside as many devices together: P compute prompts, D go on",
    )  # fmt: skip
    group.add_argument(
        "--link-gbps", metavar="X", type=argument(_above_zero), default=DEFAULT_LINK_GBPS,
        help=f"gigabits a second with which each device of the first pool sends (default: {DEFAULT_LINK_GBPS:g})",
    )  # fmt: skip
    group.add_argument(
        "--link-latency", metavar="S", type=argument(_at_least_zero), default=1e-4,
        help="seconds of a transfer beside its bytes (default: 0.0001)",
    )  # fmt: skip
    add_objective(parser)
    parser.set_defaults(run=_pools, parser=parser, compare=[])


def _devices(text: str) -> int:
    if text.isdecimal() and 2 <= int(text) <= MAX_DEVICES:
        return int(text)
    raise ValueError(f"is not a whole number from 2 to {MAX_DEVICES}")


def _split(text: str) -> Split:
    prefill, _, decode = text.partition(":")
    if (
        prefill.isdecimal()
        and decode.isdecimal()
        and min(one := (int(prefill), int(decode)))
        and sum(one) <= MAX_DEVICES
    ):
        return Split(prefill=one[0], decode=one[1])
    raise ValueError(f"two whole numbers above 0, of {MAX_DEVICES} devices in all, such as 1:3")


def _above_zero(text: str) -> float:
    if (value := _at_least_zero(text)) > 0:
        return value
    raise ValueError("a number above 0")


def _at_least_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value < float("inf"):
        return value
    raise ValueError("a number, at least 0")


def _pools(namespace: Namespace) -> int:
    check_flags(namespace, has_policy_file=False)
    for option, value in (("--seeds", namespace.seeds), ("--jobs", namespace.jobs)):
        if value != 1:
            raise OptionError(option, value, "has no effect: splits are simulated once, one after another")
    traffic = read_traffic_of(namespace)
    policy, file = first_policy(namespace.policy, traffic)
    if file is not None:
        raise OptionError("--policy", policy.name, "limits and classes are not simulated over pools: give settings")
    remarks = [escape_controls(line) for line in unread_columns(namespace, traffic.facts, has_policy_file=False)]
    assert traffic.device is not None
    loads = namespace.sweep or (namespace.load,)
    found = {load: _at(load, namespace, policy, traffic) for load in loads}
    devices = _ways(namespace)[0].devices
    workload = workload_of(namespace, traffic.arrivals, policy.engine.max_model_len)
    facts = facts_of(namespace, Study((policy,), workload, traffic.device, None))
    link = f"{devices} devices · links of {namespace.link_gbps:g} Gb/s"
    report = _curves(found) if namespace.sweep else _report(next(iter(found.values())))
    print("\n".join([*remarks, *([""] if remarks else []), f"{facts} · {link}", "", report]))
    return 0


def _ways(namespace: Namespace) -> list[Split]:
    """The splits to compare; the first has as many devices that do both."""
    one: Split | None = namespace.split
    return splits(namespace.devices) if one is None else [Split(together=one.devices), one]


def _at(load: float | None, namespace: Namespace, policy: SimulatedPolicy, traffic: Traffic) -> list[PoolFigures]:
    """The figures of each split at a load; None: at the pace of the flags."""
    device = traffic.device
    assert device is not None
    workload = workload_of(namespace, traffic.arrivals, policy.engine.max_model_len)
    ways = _ways(namespace)
    workload, _ = at_load(load, workload, policy, device, devices=ways[0].devices)
    arrivals: Sequence[Arrival] = workload.arrivals(seed=1)
    check(policy, arrivals, device)
    link, good = Link(namespace.link_gbps * 1e9 / 8, namespace.link_latency), objective_of(namespace) or Objective()
    what = "simulating" if load is None else f"simulating {load:g} times capacity"
    with progress(what, "requests", len(ways) * len(arrivals)) as bar:
        figures = []
        for split in ways:
            figures.append(simulate_split(split, policy, arrivals, device, link, good))
            bar.update(len(arrivals))
    return figures


def _report(found: Sequence[PoolFigures]) -> str:
    heading = (
        "devices",
        "good",
        "good a second and device",
        "completed",
        "first token in time",
        "p50",
        "p99",
        "tokens in time",
        "p50",
        "p99",
        "prefill busy",
        "decode busy",
        "link busy",
        "waits for it",
    )
    return f"{table(heading, [_row(one) for one in found], numeric=frozenset(heading[1:]))}\n{_advice(found)}"


def _row(one: PoolFigures) -> tuple[str, ...]:
    apart = not one.split.together
    return (
        str(one.split),
        format_percent(one.goodput),
        format_number(one.good_rate),
        format_number(one.completed),
        format_percent(one.first_token_share),
        *_times(one.first_token),
        format_percent(one.per_token_share),
        *_times(one.per_token),
        format_percent(one.prefill_busy),
        format_percent(one.decode_busy),
        format_percent(one.link_busy) if apart else NOTHING,
        format_duration(one.link_wait) if apart else NOTHING,
    )


def _times(tail: Tail) -> Iterator[str]:
    return (NOTHING if seconds is None else format_duration(seconds) for seconds in (tail.p50, tail.p99))


def _advice(found: Sequence[PoolFigures]) -> str:
    together, *apart = found
    best = max(apart, key=lambda one: one.goodput)
    points = 100 * (best.goodput - together.goodput)
    if points <= 0:
        return f"keep them together: the best split ({best.split}) has {points:+.1f} points of goodput"
    return f"setting devices apart pays here: {best.split} has {points:+.1f} points of goodput beside all together"


def _curves(found: dict[float | None, list[PoolFigures]]) -> str:
    ways: list[Split] = [one.split for one in next(iter(found.values()))]
    rows = [(f"{load:g}", *(format_percent(one.goodput) for one in figures)) for load, figures in found.items()]
    knees = [
        max((load for load, figures in found.items() if load and figures[number].goodput >= KNEE_GOODPUT), default=None)
        for number in range(len(ways))
    ]
    loads = ("below all" if not one else f"{one:g}" for one in knees)
    last = [(f"largest load with {format_percent(KNEE_GOODPUT)} good", *loads)]
    rates = [found[one][number].good_rate if one else None for number, one in enumerate(knees)]
    last += [("good requests a second and device at it", *(format_number(one) if one else NOTHING for one in rates))]
    heading = ("load", *map(str, ways))
    return table(heading, [*rows, *last], numeric=frozenset(heading[1:]))
