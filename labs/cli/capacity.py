"""The capacity part of `sluice plan`: from a trace, a rate and a target to lengths, replicas and cost.

Replicas are simulated, so that queues and bursts count: on the roofline that the command prints, or on steps that were
measured."""

import re
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from admission.step_times.step_time import StepTime
from backend.roofline import MemoryPlan
from gateway.cli.arguments import argument
from gateway.table import table
from gateway.telemetry.event_log_file import read_event_log
from labs.cli.simulate_flags import add_columns
from labs.cli.simulation_inputs import progress
from labs.simulation.arrival import Arrival
from labs.simulation.device import Device, planned_device
from labs.simulation.errors import OptionError
from labs.simulation.metrics import format_duration, format_number, format_percent
from labs.simulation.policy import SimulatedPolicy, parse_simulated_policy, recorded_policy
from labs.simulation.recorder import Objective
from labs.simulation.search.replicas import (
    CHANGE,
    GOOD_SHARE,
    NUM_HALVINGS,
    NUM_NEAR_HALVINGS,
    SEEDS,
    SENSITIVITIES,
    Knee,
    Replica,
    fits,
    recommended_len,
    replicas_for,
)
from labs.simulation.statistics import quantile
from labs.simulation.traces import read_traffic
from quotas.policy import units

DEFAULT_REQUESTS = 1000
MAX_REQUESTS = 100_000  # of each of some fifty simulations
DEFAULT_PER_TOKEN_SECONDS = 0.1
FITTING_SHARE = 0.999  # of the requests that the recommended max_model_len holds
SHARES = (0.5, 0.9, 0.95, 0.99, 1.0)
_TARGET = argument(units.positive_duration)
_PRICE = re.compile(r"(\d+(?:\.\d+)?)(?:/h)?")


def add_capacity_flags(plan: ArgumentParser) -> None:
    """Add the flags, and what `sluice plan` calls with the memory and the step times that it has computed."""
    group = plan.add_argument_group("capacity, from a trace")
    group.add_argument("--trace", metavar="FILE", type=Path, help="recorded requests, as `sluice simulate` reads them")
    add_columns(group)
    group.add_argument("--rate", metavar="R", type=argument(_above_zero), help="requests a second of all replicas")
    group.add_argument("--ttft", metavar="D", type=_TARGET, help="first token of 99 in 100 requests, such as 1s")
    group.add_argument(
        "--per-token", metavar="D", type=_TARGET, default=DEFAULT_PER_TOKEN_SECONDS,
        help=f"and then a token every D on average (default: {format_duration(DEFAULT_PER_TOKEN_SECONDS)})",
    )  # fmt: skip
    group.add_argument("--price", metavar="P", type=argument(_price), help="of a GPU an hour, such as 3.50/h")
    group.add_argument(
        "--requests", metavar="N", type=argument(partial(units.count, most=MAX_REQUESTS)), default=DEFAULT_REQUESTS,
        help=f"requests of each simulation, at least (default: {DEFAULT_REQUESTS:,})",
    )  # fmt: skip
    group.add_argument(
        "--device", metavar="LOG", type=Path,
        help="an event log of a server: its step times and settings, in place of the roofline's",
    )  # fmt: skip
    plan.set_defaults(capacity=plan_capacity)


@dataclass(frozen=True, slots=True)
class _Fleet:
    """What is to be served, and on what."""

    rate: float
    ranks: int
    price: float | None  # of a GPU an hour


def plan_capacity(namespace: Namespace, memory: MemoryPlan, steps: StepTime) -> str:
    """Return the text of the capacity part; empty without a trace. Raises `OptionError`, `TraceError`."""
    if namespace.trace is None:
        for option in ("rate", "ttft", "price", "device", "columns"):
            if getattr(namespace, option):
                raise OptionError(f"--{option}", getattr(namespace, option), "is of a trace's requests: give --trace")
        return ""
    if namespace.rate is None or namespace.ttft is None:
        raise OptionError("--trace", str(namespace.trace), "needs --rate and --ttft")
    arrivals = read_traffic(namespace.trace, log_lines=read_event_log, columns=namespace.columns).arrivals
    fleet = _Fleet(namespace.rate, namespace.tensor_parallel, namespace.price)
    objective = Objective(namespace.ttft, namespace.per_token)
    if namespace.device is None:
        replica = planned_replica(arrivals, memory, steps, objective, namespace.requests)
    else:
        replica = measured_replica(arrivals, namespace.device, objective, namespace.requests)
    runs = len(SEEDS) * (1 + NUM_HALVINGS) + 2 * len(SENSITIVITIES) * (1 + NUM_NEAR_HALVINGS)
    with progress("simulating", "requests", runs * replica.requests) as bar:
        drawn = replica.knees(bar.update)
        if not drawn:
            reason = "no rate meets it: one request alone takes too long, or nearly so; more ranks, or a later target"
            raise OptionError("--ttft", format_duration(namespace.ttft), reason)
        replica, knee = drawn[len(drawn) // 2]
        changed = {
            name: [change(replica, factor).knee_near(knee, bar.update) for factor in (1 - CHANGE, 1 + CHANGE)]
            for name, change in SENSITIVITIES.items()
        }
    return "\n".join(
        [
            _lengths(arrivals),
            _advice(arrivals, memory.footprint.model.max_position, replica.policy.engine.max_model_len),
            "",
            _knee(replica, [one for _, one in drawn], fleet),
            _sensitivity(knee, changed, fleet),
        ]
    )


def planned_replica(
    arrivals: list[Arrival], memory: MemoryPlan, steps: StepTime, objective: Objective, requests: int
) -> Replica:
    """Return a replica of this memory and these step times. Raises `OptionError`."""
    device = planned_device("planned", steps, memory.kv_tokens, memory.footprint.kv_bytes_per_token)
    settings = {
        "max_num_seqs": memory.max_num_seqs,
        "max_model_len": memory.max_model_len,
        "max_num_batched_tokens": memory.max_num_batched_tokens,
    }
    policy = parse_simulated_policy(",".join(f"{name}={value}" for name, value in settings.items()), device)
    return _replica(policy, device, arrivals, objective, requests)


def measured_replica(arrivals: list[Arrival], log: Path, objective: Objective, requests: int) -> Replica:
    """Return a replica with the step times, the host times and the settings of an event log. Raises `OptionError`,
    `TraceError`.
    """
    device = read_traffic(log, log_lines=read_event_log, option="--device").device
    if device is None or device.served is None:
        raise OptionError(
            "--device", str(log), "is no event log: start a server with --event-log, and send it requests"
        )
    return _replica(recorded_policy(device.served), device, arrivals, objective, requests)


def _replica(
    policy: SimulatedPolicy, device: Device, arrivals: list[Arrival], objective: Objective, requests: int
) -> Replica:
    longest = policy.engine.max_model_len
    fitting = tuple(one.alike for one in arrivals if fits(one, longest))
    if not fitting:
        raise OptionError("--max-model-len", longest, "no request of the trace fits: raise it")
    return Replica(policy, device, fitting, objective, requests)


def _lengths(arrivals: list[Arrival]) -> str:
    measured = {
        "prompt": [one.prompt_tokens for one in arrivals],
        "answer": [one.output_tokens for one in arrivals],
        "both": [one.prompt_tokens + one.output_tokens for one in arrivals],
    }
    rows = []
    for name, tokens in measured.items():
        ordered = sorted(map(float, tokens))
        rows.append((name, *(format_number(quantile(ordered, share) or 0.0) for share in SHARES)))
    heading = ("tokens", *(f"p{100 * share:g}" for share in SHARES[:-1]), "longest")
    return f"{len(arrivals):,} requests of the trace\n{table(heading, rows, frozenset(heading[1:]))}"


def _advice(arrivals: list[Arrival], longest: int, planned: int) -> str:
    wanted = recommended_len(arrivals, longest, FITTING_SHARE)
    left_out = sum(not fits(one, planned) for one in arrivals)
    line = f"--max-model-len {wanted} holds {format_percent(FITTING_SHARE)} of them"
    if wanted == longest:
        line = f"--max-model-len {wanted}, all that the model has, holds "
        line += f"{format_percent(sum(fits(one, wanted) for one in arrivals) / len(arrivals))} of them"
    if left_out:
        line += f"; planned here is {planned:,}, which refuses {left_out:,} of {len(arrivals):,}"
    return line


def _knee(replica: Replica, knees: list[Knee], fleet: _Fleet) -> str:
    knee = knees[len(knees) // 2]
    run, number = knee.run, replicas_for(fleet.rate, knee.rate)
    first, each = (format_duration(seconds) for seconds in (replica.objective.first_token, replica.objective.per_token))
    rows = [
        (
            "a replica's knee",
            f"{knee.rate:.3g} requests/s",
            f"{format_percent(GOOD_SHARE)} have a first token in {first}, and then one every {each}",
        ),
        (
            "of other draws",
            f"{knees[0].rate:.3g} to {knees[-1].rate:.3g}",
            f"{len(knees)} draws of {replica.requests:,} requests: more --requests, less chance",
        ),
        ("of its capacity", format_percent(knee.rate / knee.capacity), "what it completes without any target"),
        ("first token there", format_duration(run.first_token.p99 or 0.0), "p99"),
        ("a token there", format_duration(run.per_token.p99 or 0.0), "p99 of the requests' means after the first"),
        (
            "tokens there",
            f"{format_number(run.prompt_rate)} + {format_number(run.output_rate)} /s",
            "prompts + answers",
        ),
        ("busy there", format_percent(run.busy), "of the time"),
        ("replicas", f"{number:,}", f"{fleet.rate:g} / {knee.rate:.3g} requests/s, rounded up"),
        ("GPUs", f"{number * fleet.ranks:,}", f"{fleet.ranks} a replica"),
    ]
    if fleet.price is not None:
        hour = fleet.price * fleet.ranks
        output, every = (3600 * rate / 1e6 for rate in (run.output_rate, run.output_rate + run.prompt_rate))
        rows += [
            (
                "cost an hour",
                format_number(number * hour),
                f"{units.counted(number * fleet.ranks, 'GPU')} at {fleet.price:g} an hour",
            ),
            ("cost at the knee", f"{hour / output:.3g}", "of a million answer tokens, prompts included"),
            ("", f"{hour / every:.3g}", "of a million tokens of prompts and answers"),
        ]
    return table(("at " + f"{fleet.rate:g} requests/s", "", ""), rows, frozenset())


def _sensitivity(knee: Knee, changed: dict[str, list[Knee | None]], fleet: _Fleet) -> str:
    def shown(one: Knee | None) -> str:
        return "far more" if one is None else f"{replicas_for(fleet.rate, one.rate):,}"

    by_rate = (f"{replicas_for(fleet.rate * (1 + change), knee.rate):,}" for change in (-CHANGE, CHANGE))
    rows = [("requests a second", *by_rate)]
    rows += [(name, *map(shown, pair)) for name, pair in changed.items()]
    heading = ("replicas, with", f"{-CHANGE:.0%}", f"+{CHANGE:.0%}")
    return table(heading, rows, frozenset(heading[1:]))


def _above_zero(text: str) -> float:
    number = units.number(text)
    if not number:
        raise ValueError("must be above zero")
    return number


def _price(text: str) -> float:
    found = _PRICE.fullmatch(text)
    if found is None:
        raise ValueError("is no price such as 3.50/h")
    return float(found[1])
