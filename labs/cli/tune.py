"""`sluice tune`: search the engine's settings under which most of the recorded requests are good.

Settings meet the requests in the simulator; nothing is served, and nothing is changed."""

from argparse import Namespace, _SubParsersAction
from contextlib import ExitStack
from typing import Any

from gateway.cli.arguments import argument
from gateway.table import table
from labs.cli.simulate_checks import check_flags, unread_columns
from labs.cli.simulate_flags import add_objective, add_policy, add_traffic
from labs.cli.simulation_inputs import (
    at_load,
    facts_of,
    first_policy,
    names_a_file,
    objective_of,
    progress,
    read_traffic_of,
    workload_of,
)
from labs.process_pool import process_pool
from labs.simulation.metrics import NOTHING, escape_controls, format_duration, format_number, format_percent
from labs.simulation.search.tuning import LADDERS, MIN_GAIN_GOODPUT, Tuned, Tuner
from labs.simulation.study import Study

DEFAULT_BUDGET_SIMULATIONS = 30
NOTES = """\
A request is good when it meets the targets of its class in the policy file; without targets, 2 s and 0.1 s a token.
What a larger step takes of the memory beside the model and its keys and values is not simulated.

examples:
  sluice tune --log yesterday.log --policy policy.yaml
  sluice tune --trace azure.csv --load 0.9 --policy policy.yaml,max_num_seqs=128 --budget 60 --jobs 2"""


def add_tune_command(commands: "_SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "tune",
        help="search the engine's settings under which most requests are good",
        usage="sluice tune --log FILE [--policy P] [flags]",
        description=__doc__,
        epilog=NOTES,
    )
    add_traffic(parser)
    add_policy(parser)
    add_objective(parser)
    parser.add_argument(
        "--budget", metavar="N", type=argument(_budget), default=DEFAULT_BUDGET_SIMULATIONS,
        help=f"search for as long as simulating all requests N times takes (default: {DEFAULT_BUDGET_SIMULATIONS})",
    )  # fmt: skip
    parser.set_defaults(run=_tune, parser=parser, compare=[], sweep=None, seeds=1)


def _budget(text: str) -> int:
    if text.isdecimal() and 4 <= int(text) <= 10_000:
        return int(text)
    raise ValueError("is not a whole number from 4 to 10000")


def _tune(namespace: Namespace) -> int:
    has_file = namespace.policy is not None and names_a_file(namespace.policy.partition(",")[0])
    check_flags(namespace, has_file)
    traffic = read_traffic_of(namespace)
    policy, _ = first_policy(namespace.policy, traffic)
    assert traffic.device is not None
    workload = workload_of(namespace, traffic.arrivals, policy.engine.max_model_len)
    workload, _ = at_load(namespace.load, workload, policy, traffic.device)
    study = Study((policy,), workload, traffic.device, objective_of(namespace))
    arrivals = workload.arrivals(seed=1)
    with ExitStack() as stack:
        bar = stack.enter_context(progress("searching", "requests", (namespace.budget + 1) * len(arrivals)))
        pool = stack.enter_context(process_pool(namespace.jobs)) if namespace.jobs > 1 else None
        tuner = Tuner(policy, arrivals, traffic.device, study.judged_by, namespace.budget, pool, bar.update)
        tuned = tuner.run()
    remarks = [escape_controls(line) for line in unread_columns(namespace, traffic.facts, has_file)]
    print("\n".join([*remarks, *([""] if remarks else []), facts_of(namespace, study), "", _report(tuned)]))
    return 0


def _report(tuned: Tuned) -> str:
    present, best = tuned.present, tuned.best
    settings = [(name, *(_written(trial.values[name]) for trial in (present, best))) for name in LADDERS]
    figures = [
        ("goodput", *(format_percent(trial.summary.goodput) for trial in (present, best))),
        ("good requests a second", *(format_number(trial.summary.good_rate) for trial in (present, best))),
        ("first token p95", *(_duration(trial.summary.first_token.p95) for trial in (present, best))),
        ("between tokens p95", *(_duration(trial.summary.interval.p95) for trial in (present, best))),
    ]
    heading = ("", "present", "best found")
    text = table(heading, [*settings, *figures], numeric=frozenset(heading[1:]))
    return f"{text}\n{_advice(tuned)}"


def _advice(tuned: Tuned) -> str:
    tried = f"{tuned.num_settings} settings, as much as {tuned.spent:.0f} simulations of all requests"
    if tuned.gain <= MIN_GAIN_GOODPUT:
        return (
            f"keep the present settings: none of those found is better by {format_percent(MIN_GAIN_GOODPUT)} ({tried})"
        )
    flags = " ".join(f"{_flag(name)} {_written(value)}" for name, value in tuned.best.values.items())
    return f"{flags}\n  {100 * tuned.gain:+.1f} points of goodput ({tried})"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _written(value: float | None) -> str:
    return "off" if value is None else f"{value:g}"


def _duration(seconds: float | None) -> str:
    return NOTHING if seconds is None else format_duration(seconds)
