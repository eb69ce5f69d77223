"""`sluice explain` and `sluice replay`: the core's decisions, read from its event log."""

from argparse import Namespace, _SubParsersAction
from pathlib import Path
from typing import Any

from admission.event_logs.event_log import LogError, ReplayMismatch, replay
from admission.explain import explain
from gateway.telemetry.event_log_file import EventLogError, read_event_log


def add_event_log_commands(commands: "_SubParsersAction[Any]") -> None:
    explaining = commands.add_parser("explain", help="why a request waited, was refused or was preempted")
    which = "the id in the response, such as chatcmpl-...; of a refusal, its header x-sluice-logged-as"
    explaining.add_argument("request", metavar="REQUEST_ID", help=which)
    replaying = commands.add_parser("replay", help="replay an event log and compare its decisions, byte for byte")
    for command, run in ((explaining, _explain), (replaying, _replay)):
        command.add_argument(
            "--log", metavar="FILE", type=Path, required=True, help="the event log, as named by --event-log"
        )
        command.set_defaults(run=run, parser=command)


def _explain(namespace: Namespace) -> int:
    try:
        record = explain(read_event_log(namespace.log), namespace.request)
    except LogError as error:
        raise EventLogError(f"{namespace.log}: {error}") from None
    if not record:
        raise EventLogError(
            f"{namespace.log} says nothing of {namespace.request}: is it the id of a response, in this log? A refusal "
            "names its id in the header x-sluice-logged-as, and in the request log as response_id. One without came "
            "neither to a limit nor to the queue: its message has the reason, and so has the request log"
        )
    print("\n".join(record))
    return 0


def _replay(namespace: Namespace) -> int:
    count = 0
    try:
        for _ in replay(read_event_log(namespace.log)):
            count += 1
    except ReplayMismatch as error:
        raise EventLogError(f"{namespace.log}: not reproduced: {error}") from None
    except LogError as error:
        raise EventLogError(f"{namespace.log}: {error}") from None
    print(f"{count:,} {'entry' if count == 1 else 'entries'} reproduced to the byte")
    return 0
