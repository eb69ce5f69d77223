"""The flags of `sluice simulate`, and their types."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeVar

from labs.simulation.device import DEVICES
from labs.simulation.errors import OptionError
from labs.simulation.recorder import Objective
from labs.simulation.search.sweep import parse_loads
from labs.simulation.tables import FIELDS, NO_COLUMNS, parse_columns
from labs.simulation.traces import FORMATS
from labs.simulation.workload import Flood

T = TypeVar("T")

DEFAULT_ORDERING = "fair"
DEFAULT_DEVICE = "llama3-8b-a100"


def add_columns(group: Any) -> None:
    group.add_argument(
        "--columns", metavar="C", type=_columns, default=NO_COLUMNS,
        help=f"what the columns of a table are: time=Timestamp,prompt=Request,output=Response; fields are "
        f"{', '.join(FIELDS)}",
    )  # fmt: skip


def add_traffic(parser: ArgumentParser) -> tuple[Any, Any]:
    """Adds the flags of the traffic; returns their group, and the group of the mutually exclusive pace."""
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--trace", "--log", metavar="FILE", type=Path, required=True, help="recorded requests and their lengths"
    )
    group.add_argument(
        "--format", choices=["auto", *FORMATS], default="auto", help="format of the trace (default: auto)"
    )
    add_columns(group)
    group.add_argument(
        "--requests", metavar="N", type=_count, help="use the first N requests, repeating the trace if need be"
    )
    pace = group.add_mutually_exclusive_group()
    pace.add_argument("--speedup", metavar="X", type=_positive, default=1.0, help="serve X times as fast as recorded")
    pace.add_argument("--load", metavar="X", type=_positive, help="serve X times the device's capacity")
    pace.add_argument(
        "--rate", metavar="R", type=_positive, help="Poisson arrivals, R a second, lengths from the trace"
    )
    group.add_argument(
        "--tenants",
        metavar="RULE",
        default="trace",
        help="tenants of the requests: 4, heavy:0.8,light:0.2, hash:4 or trace (default: trace)",
    )
    classes = "the class of each request: 0:0.1,1:0.9 or trace (default: trace)"
    group.add_argument("--classes", metavar="RULE", default="trace", help=classes)
    tiers = "the service tier that requests ask for: flex:0.3,none:0.7 or trace (default: trace)"
    group.add_argument("--service-tiers", metavar="RULE", default="trace", help=tiers)
    group.add_argument(
        "--flood",
        metavar="F",
        type=_flood,
        action="append",
        default=[],
        help="add requests of one tenant: TENANT:RATE@START+SECONDS; may be repeated",
    )
    group.add_argument(
        "--max-tokens",
        metavar="N",
        type=_count,
        default=0,
        help="tokens that each request declares at least (default: as the trace says, or else a power of two "
        "that no answer exceeds)",
    )
    group.add_argument(
        "--patience", metavar="S", type=_positive, default=inf, help="clients leave after S seconds without a token"
    )
    deadline = "requests want their first token within S seconds, and say so, unless the trace has a deadline for them"
    group.add_argument("--deadline", metavar="S", type=_positive, help=deadline)
    return group, pace


def add_runs(group: Any, pace: Any) -> None:
    """Adds the flags of repetitions and loads."""
    sweep = "serve each of several loads from LOW to HIGH, as --load does, and find the largest with 90 %% good"
    pace.add_argument("--sweep", metavar="LOW:HIGH[:N]", type=sweep_loads, help=sweep)
    group.add_argument("--seeds", metavar="N", type=_count, default=1, help="runs of each policy (default: 1)")


def add_policy(parser: ArgumentParser) -> Any:
    """Adds the flags of policy, device and processes; returns their group."""
    group = parser.add_argument_group("policies and device")
    group.add_argument(
        "--policy",
        metavar="P",
        help=f"the policy to simulate (default: as an event log was recorded; else {DEFAULT_ORDERING})",
    )
    group.add_argument(
        "--device",
        metavar="D",
        help=f"what computes: {', '.join(DEVICES)} or a JSON file of coefficients (default: the device that an event "
        f"log was recorded on, as it was configured; else {DEFAULT_DEVICE})",
    )
    group.add_argument("--jobs", metavar="N", type=_count, default=1, help="runs at a time (default: 1)")
    return group


def add_comparison(group: Any) -> None:
    group.add_argument(
        "--compare", metavar="P", action="append", default=[], help="a policy to compare with; may be repeated"
    )


def add_objective(parser: ArgumentParser) -> Any:
    """Adds the flags of the objective; returns the group of the report's."""
    group, good = parser.add_argument_group("report"), Objective()
    group.add_argument(
        "--good-first-token", metavar="S", type=_positive,
        help="a good request has its first token within S seconds (default: as each policy promises its class; "
        f"{good.first_token:g} where a policy promises nothing)",
    )  # fmt: skip
    group.add_argument(
        "--good-per-token", metavar="S", type=_positive,
        help=f"and then a token every S seconds on average (default: as promised, or {good.per_token:g})",
    )  # fmt: skip
    return group


def add_report(parser: ArgumentParser) -> None:
    group = add_objective(parser)
    group.add_argument("--json", metavar="FILE", type=new_file, help="write every figure of every run")
    group.add_argument("--html", metavar="FILE", type=new_file, help="write every figure as one page")


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


def _parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A type of argument whose errors name no option, since argparse does."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except OptionError as error:
            raise ArgumentTypeError(str(error).partition(": ")[2]) from None

    return read


_columns, sweep_loads, _flood = _parsed(parse_columns), _parsed(parse_loads), _parsed(Flood.parse)


def new_file(text: str) -> Path:
    """Parse the path of a file to write, and refuse an impossible one before minutes are spent on its content."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentTypeError(f"{path} is a folder" if path.is_dir() else f"there is no folder {path.parent}")
    return path
